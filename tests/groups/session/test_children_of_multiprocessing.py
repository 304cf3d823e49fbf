"""Ranks that are forks of one process, as notebook launchers start them: they end by `os._exit`, without `atexit`."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast._frameworks.session import Session
from tests.support.wide import wide

FAIL = ("raises", "exits with 3")
LONG = 60
"""Seconds in which the end of a rank that fails is seen, on any machine."""


def rank(number: int, port: int, how: str, folder: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    Session(job=holdfast.Job(timeout=30)).until_exit()
    dist.barrier()
    if number == 1:
        if how == "raises":
            raise ValueError("rank 1 fails")
        holdfast.async_save({"w": torch.ones(4)}, f"{folder}/last", job=holdfast.Job(no_dist=True))
        if how.startswith("exits"):
            sys.exit(int(how[-1]))
        return
    ends = time.monotonic() + (LONG if how in FAIL else 3)
    while time.monotonic() < ends:
        time.sleep(0.1)  # between two, the session's error is raised here
    Path(folder, "done").touch()


def launch(how: str, folder: str) -> list[int | None]:
    """Return the exit codes of both ranks. Each is reaped at once when it ends."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank, args=(number, store.port, how, folder)) for number in range(2)]
    for process in ranks:
        process.start()
    ranks[1].join()
    ranks[0].join()
    return [process.exitcode for process in ranks]


@pytest.mark.parametrize(
    "how",
    ["raises", "returns", *wide(["exits with 0", "exits with 3"])],
)
def test_one_that_ends_well_ends_nobody_and_its_last_save_is_committed(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", __name__, how, str(tmp_path)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    codes = json.loads(ended.stdout.splitlines()[-1])
    if how in FAIL:
        assert codes == [1, 1 if how == "raises" else 3], ended.stderr
        assert ("ValueError: rank 1 fails" in ended.stderr) == (how == "raises")
        assert "The session ended because rank 1" in ended.stderr
        assert not (tmp_path / "done").exists()
        return
    assert codes == [0, 0], ended.stderr
    assert (tmp_path / "done").exists()
    assert holdfast.load(tmp_path / "last").keys() == {"w"}


if __name__ == "__main__":
    print(json.dumps(launch(sys.argv[1], sys.argv[2])))
