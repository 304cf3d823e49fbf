"""A rank of a job whose session ends in one way or another: python -m
tests.groups.session.exits MODE FOLDER HOW."""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

import holdfast
from holdfast._groups.session.session import GroupSession
from tests.groups.session.after_end import AMPLE, GRACE, SHORT, after_the_session, caught_sessions
from tests.groups.session.jobs import end_with
from tests.groups.session.unseen_saves import save_in_vain

JOB, IN_SAVES = (
    holdfast.Job(timeout=40.0, stall_timeout=5.0),
    holdfast.Job(timeout=20.0, stall_timeout=5.0),
)
SOON = 3.0
"""Seconds that collectives wait, where a rank does not come to one."""
WAITED_FOR = ("dawdle", "early good exit")


def in_a_block(mode: str, rank: int, folder: str) -> None:
    grid = holdfast.Grid(int(os.environ["WORLD_SIZE"]), tp=2)
    with holdfast.session(grid, backend="gloo", grace=GRACE, job=JOB) as s:
        checkpoints = s.checkpoints(folder, job=IN_SAVES)
        for _ in range(3):
            for name in sorted({"tp", "dp"} & set(s.groups)):
                dist.all_reduce(torch.ones(1), group=s.groups[name])
        end_with(mode, rank, checkpoints)


def to_the_end(mode: str, rank: int, folder: str, destroys: bool) -> None:
    """As a framework does it: groups are its own, and it may destroy them itself."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=SOON if mode in WAITED_FOR else 60))
    dist.new_group([0, 1])
    bounds = {"late": AMPLE, "thread": SHORT}
    GroupSession(grace=GRACE, job=JOB, after_end=bounds.get(mode), owns_world=True).until_exit()
    dist.all_reduce(torch.ones(1))
    end_with(
        mode,
        rank,
        holdfast.Checkpoints(folder, job=IN_SAVES),
    )
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
        caught_sessions(rank, folder, JOB)
    elif how == "save in vain":
        save_in_vain(mode, folder)
    elif how == "after":
        # It is the end that is looked at: of so many ranks, one that forks first comes late on a busy machine.
        after_the_session(mode.split(",")[rank], rank, folder, replace(JOB, stall_timeout=40.0))
    else:
        to_the_end(mode, rank, folder, how == "destroys")
    print(f"rank {rank} is through", flush=True)
