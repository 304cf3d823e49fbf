"""A stranger on the network who has the address of the message store: a forged end of a rank.

Ranks are processes with a process group over a real TCPStore. `tests/promises/test_keys.py` has every key, and
`tests/roster/test_hosts.py` the ports of the ranks.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._core.base.values import Message
from holdfast._core.roster.seal import Seal
from holdfast.errors import HoldfastError
from tests.support.forger import Forger
from tests.support.processes import ProcessWorld

LATE = 4.0
"""Seconds by which rank 1 comes later than rank 0, which waits for it meanwhile."""


def save(rank: int, folder: str, step: int) -> str:
    time.sleep(LATE * rank * (step > 1))
    state = {"w": holdfast.Shard(torch.full((2,), float(step)), (4,), (2 * rank,))}
    try:
        holdfast.save(state, f"{folder}/{step}", step=step, job=holdfast.Job(timeout=20))
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def gone(at: Message) -> Message:
    # Of after all that the rank will have said: a sign of life refutes an earlier one.
    return {"token": at["who"]["token"], "how": "its process has ended (forged)", "beat": 1 << 60}


def bury(forger: Forger, key: str, seal: Seal | None) -> None:
    """Say for as long as rank 0 waits that rank 1 has ended."""
    at, ends = forger.read("at/1"), time.monotonic() + LATE
    forged = gone(at) if key == "gone/1" else {**at, "ended": "its program has ended (forged)"}
    while time.monotonic() < ends:
        forger.write(key, forged, seal)
        time.sleep(0.05)


@pytest.mark.parametrize("key", ["gone/1", "at/1"])
@pytest.mark.parametrize("secret", ["", "a secret of the launcher"], ids=["open", "secret"])
def test_a_forged_end_of_a_rank(key: str, secret: str, tmp_path: Path) -> None:
    """Without HOLDFAST_SECRET a seal keeps off who has not read the store, and nobody who has: an accident
    is not believed, an attack is. With it, neither is."""
    with ProcessWorld(2, env={"HOLDFAST_SECRET": secret}) as world:
        assert world.store is not None
        assert world.run(save, str(tmp_path), 1) == ["saved"] * 2
        forger = Forger("127.0.0.1", world.store.port)
        try:
            world.start(save, str(tmp_path), 2)
            bury(forger, key, Seal("of another job"))
            assert [end.get() for end in world.collect(60)] == ["saved"] * 2
            world.start(save, str(tmp_path), 3)
            bury(forger, key, None)
            ends = [end.get() for end in world.collect(60)]
        finally:
            forger.close()
    if secret:
        assert ends == ["saved"] * 2
    else:
        assert ends[0].startswith("RankFailed"), ends
        assert "forged" in ends[0]
        assert ends[1] != "saved"
    for step in (1, 2) if not secret else (1, 2, 3):
        found = {"w": torch.zeros(4)}
        holdfast.load(found, tmp_path / str(step), job=holdfast.Job(no_dist=True))
        assert found["w"].tolist() == [step] * 4
    assert (tmp_path / "3" / "index.safetensors").exists() == bool(secret)
