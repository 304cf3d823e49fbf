from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
from hypothesis import settings

from tests import THRESHOLD
from tests.store.faults import open_below
from tests.support.durations import slowest_files
from tests.support.forkservers import make_folder
from tests.support.processes import PRELOAD, shared

PRELOAD.append("tests.frameworks.megatron.preload")
forkserver.connect_to_new_process = shared().connect_to_new_process

# Opening a TCPStore looks the peer's name up; a name server that drops a packet must cost a test
# one second, not five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Property tests: no time limit a case (the machine may be shared), no folder of found cases left behind, and
# the same cases in every run, so that a suite that passes passes again.
settings.register_profile("holdfast", deadline=None, database=None, derandomize=True)
settings.load_profile("holdfast")

LONG = """
frameworks/ray/test_ray.py
roster/test_hosts.py
test_torch_private.py
docs/test_recipes.py
groups/session/test_session.py
frameworks/huggingface/test_in_frameworks.py
protocol/test_liveness.py
run/test_local_tier.py
frameworks/megatron_bridge/test_bridge.py
groups/session/test_after_end.py
frameworks/megatron/test_checkpointing.py
promises/test_keys.py
frameworks/fsdp/test_fsdp2.py
system/test_async.py
system/test_conversions.py
watch/test_faults.py
test_drill.py
promises/test_strangers.py
frameworks/megatron_fsdp/test_megatron_fsdp.py
promises/test_run_owner.py
frameworks/deepspeed/test_deepspeed.py
test_late.py
frameworks/megatron/test_reshard.py
docs/test_programs.py
frameworks/huggingface/test_views.py
run/test_interrupts.py
equality/test_engine.py
system/test_ranks.py
frameworks/verl/test_verl.py
frameworks/huggingface/test_fetch.py
protocol/test_simulation.py
frameworks/test_guard_healthy.py
frameworks/megatron/test_writers.py
frameworks/test_guard.py
docs/test_start.py
frameworks/megatron/test_fused.py
test_strangers.py
groups/lifecycle/test_warm_up.py
cli/test_odd_places.py
saving/test_unchanged.py
system/test_crash.py
docs/test_model.py
cli/test_run.py
loading/test_readers.py
frameworks/test_install.py
store/test_objects.py
watch/test_roll_call.py
frameworks/huggingface/test_adapters.py
views/test_rank_share.py
"""
"""Files that take longest begin first, or one of them would be what a worker has left to do while the others are done.
Those that compute stand between those that wait, or all workers would import frameworks at once."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that starts the workers
        config.add_cleanup(make_folder().cleanup)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for all tests stays: no garbage collection goes through it, now or in a test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*THRESHOLD)  # here, objects that a test has left are to end soon
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    rank = {tests / name: number for number, name in enumerate(LONG.split())}
    assert all(path.is_file() for path in rank), "a file of LONG is gone"
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.durations:
        reports = [one for kind in terminalreporter.stats.values() for one in kind]
        terminalreporter.write_sep("=", "slowest files")
        for line in slowest_files(
            (one for one in reports if isinstance(one, pytest.TestReport)), config.option.durations_min or 0
        ):
            terminalreporter.write_line(line)


FEW = 256
"""Descriptors that a test process may have open between two tests: many systems allow a process 1024."""


@pytest.fixture(autouse=True)
def few_descriptors() -> Iterator[None]:
    """Stores and ranks refer to each other: with the large heap of a suite it may be thousands of tests until
    the garbage collector finds that they are done, and closes their sockets."""
    yield
    if len(os.listdir("/proc/self/fd")) > FEW:
        gc.collect()
        left = open_below("")
        assert len(left) <= FEW, Counter(left).most_common(20)
