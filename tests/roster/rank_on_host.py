"""A rank on a host of its own: it does what is written to its stdin, and tells how that ended.

session LOST_AFTER     a session, until the next line
save LOST_AFTER STEP   one save
see                    tells how many neighbours on other hosts can be seen, until the next line

python -m tests.roster.rank_on_host store                        serves the message store
python -m tests.roster.rank_on_host RANK WORLD HOST PORT
"""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast._core.protocol.call import find_roster
from holdfast._core.protocol.job import Job
from holdfast._core.roster import links
from holdfast._core.roster.beacon import beacon_of
from holdfast.errors import HoldfastError

links._PROBES.update(TCP_KEEPIDLE=1, TCP_KEEPINTVL=1, TCP_KEEPCNT=2)


def say(*words: Any) -> None:
    print(*words, flush=True)


def serve() -> None:
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    say(store.port)
    sys.stdin.read()


def live(rank: int, world: int, host: str, port: int) -> None:
    torch.set_num_threads(1)
    logging.getLogger("holdfast").setLevel(logging.ERROR)
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    say("ready")
    while line := sys.stdin.readline().split():
        try:
            follow(rank, *line)
        except HoldfastError as error:
            say(f"{type(error).__name__} {error.rank} {error}")
    os._exit(0)  # peers may be gone, and the process group would wait for them


def follow(rank: int, what: str, lost_after: str = "60", step: str = "0") -> None:
    job = holdfast.Job(timeout=60, lost_after=float(lost_after))
    if what == "session":
        with holdfast.session(job=job, grace=10, warm=False):
            see()
        say("through")
    elif what == "save":
        world = dist.get_world_size()
        state = {"x": holdfast.Shard(torch.full((1,), float(step)), (world,), (rank,))}
        holdfast.save(state, f"{os.environ['FOLDER']}/{step}", step=int(step), job=job)
        say("saved", step)
    else:
        see()


def see() -> None:
    """Tell how many neighbours on other hosts can be seen, when that changes, until the next line."""
    watch, said = beacon_of(find_roster(Job())).watch, -1
    while not wait([sys.stdin], 0.0):
        links = [one.link for one in list(watch._neighbours.values()) if one.link is not None]
        seen = sum(link.is_up() for link in links)
        if seen != said:
            say("sees", seen)
            said = seen
        time.sleep(0.02)
    sys.stdin.readline()


if __name__ == "__main__":
    if sys.argv[1] == "store":
        serve()
    else:
        live(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
