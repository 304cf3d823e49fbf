from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.processes import PRELOAD

PRELOAD.append("tests.integrations.megatron.preload")
# Whoever starts the forkserver first, a pool without need of torch too, decides what all later ranks have imported.
multiprocessing.set_forkserver_preload([*PRELOAD, "tests.support.frozen"])

# Opening a TCPStore looks the peer's name up; a name server that drops a packet must cost a test
# one second, not five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Property tests: no time limit a case (the machine may be shared), no folder of found cases left behind, and
# the same cases in every run, so that a suite that passes passes again.
settings.register_profile("holdfast", deadline=None, database=None, derandomize=True)
settings.load_profile("holdfast")

FEW = 256
"""Descriptors that a test process may have open between two tests: many systems allow a process 1024."""


@pytest.fixture(autouse=True)
def few_descriptors() -> Iterator[None]:
    """Stores and ranks refer to each other: with the large heap of a suite it may be thousands of tests until
    the garbage collector finds that they are done, and closes their sockets."""
    yield
    if len(os.listdir("/proc/self/fd")) > FEW:
        gc.collect()
        left = len(os.listdir("/proc/self/fd"))
        assert left <= FEW, f"{left} descriptors are open"
