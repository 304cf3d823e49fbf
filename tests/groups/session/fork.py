"""Starts ranks of a program as interpreters of their own that need not import torch again:
python -m tests.groups.session.fork PROGRAM [MODULE ...]. The program, and modules that it needs, are imported here.

Reads jobs as lines of JSON, forks a process for each rank, and writes who was started and who has ended. A
child goes on to the normal end of an interpreter: hooks, `atexit`, exit code.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import warnings
from importlib import import_module
from typing import Any

import torch.distributed  # noqa: F401


def start(job: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(job["env"], RANK=str(rank))
    terminal = os.open(job["terminal"], os.O_WRONLY | os.O_APPEND)
    silence = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((silence, 0), (terminal, 1), (terminal, 2)):
        os.dup2(source, target)
    sys.argv = [PROGRAM, *job["args"]]
    return 0


def serve() -> bool:
    """True in a child, which is to run its job and leave as programs do."""
    for line in sys.stdin:
        job = json.loads(line)
        ranks: dict[int, int] = {}
        for rank in job["ranks"]:
            pid = start(job, rank)
            if not pid:
                return True
            ranks[pid] = rank
        print(json.dumps({rank: pid for pid, rank in ranks.items()}), flush=True)
        while ranks:
            pid, status = os.wait()
            print(json.dumps([ranks.pop(pid), os.waitstatus_to_exitcode(status)]), flush=True)
    return False


PROGRAM = sys.argv[1]

if __name__ == "__main__":
    for module in sys.argv[1:]:
        import_module(module)
    gc.collect()
    gc.freeze()  # or the end of each rank goes through all of it, and so copies it
    if serve():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*found in sys.modules")
            runpy.run_module(PROGRAM, run_name="__main__")
