"""A rank of a job whose session ends in one way or another: python -m
tests.groups.session.exits MODE FOLDER HOW."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast.groups.session.session import Session
from tests.groups.session.after_end import AMPLE, after_the_session, caught_sessions
from tests.groups.session.jobs import end_with
from tests.groups.session.unseen_saves import save_in_vain

LIMITS: dict[str, Any] = {"timeout": 40.0, "stall_timeout": 5.0, "grace": 5.0}
SOON = 3.0
"""Seconds that collectives wait, where a rank does not come to one."""
WAITED_FOR = ("dawdle", "early good exit")


def in_a_block(mode: str, rank: int, folder: str) -> None:
    grid = holdfast.Grid(int(os.environ["WORLD_SIZE"]), tp=2)
    with holdfast.session(grid, backend="gloo", **LIMITS) as s:
        checkpoints = s.checkpoints(folder, timeout=20, stall_timeout=5)
        for _ in range(3):
            for name in sorted({"tp", "dp"} & set(s.groups)):
                dist.all_reduce(torch.ones(1), group=s.groups[name])
        end_with(mode, rank, checkpoints)


def to_the_end(mode: str, rank: int, folder: str, destroys: bool) -> None:
    """As a framework does it: groups are its own, and it may destroy them itself."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=SOON if mode in WAITED_FOR else 60))
    dist.new_group([0, 1])
    Session(**LIMITS, after_end=AMPLE if mode == "late" else 120.0, owns_world=True).until_exit()
    dist.all_reduce(torch.ones(1))
    end_with(mode, rank, holdfast.Checkpoints(folder, timeout=20, stall_timeout=5))
    if destroys:
        dist.destroy_process_group()


if __name__ == "__main__":
    mode, folder, how = sys.argv[1:]
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if mode == "raise with handlers":  # they were there before Holdfast
        # In one piece: the ranks share a terminal.
        atexit.register(os.write, 1, f"the handler of rank {rank}\n".encode())
    if how == "block":
        in_a_block(mode, rank, folder)
    elif how == "caught":
        caught_sessions(rank, folder, LIMITS)
    elif how == "save in vain":
        save_in_vain(mode, folder)
    elif how == "after":
        after_the_session(mode.split(",")[rank], rank, folder, LIMITS)
    else:
        to_the_end(mode, rank, folder, how == "destroys")
    print(f"rank {rank} is through", flush=True)
