"""Random deaths of ranks and hosts with local folders before a run: `restore` takes the newest whole step, bit
for bit."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run import tier_jobs as jobs
from tests.run.test_local_tier import cut_short, flip, garble_index, lose_all, lose_data, lose_index
from tests.support.object_servers import BUCKET, Proxy, moto, s3_environment
from tests.support.processes import ProcessWorld

HOSTS, RANKS = 2, 4
HARMS = [flip, cut_short, lose_data, garble_index, lose_index, lose_all]
Step = tuple[int, int]
"""The start that saved it, and its number. A start goes on from the number that it restored."""


class Promises:
    """What a restore must bring back at least."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.durable = self.local = 0
        """The newest step that was promised to be in the run, and in the local folders; numbers only grow."""
        self.counts: Counter[str] = Counter()
        self._read = [0] * RANKS

    def heed(self, salt: int) -> None:
        """Check what the ranks of a start have told, and note what they were promised."""
        restored: set[tuple[int, int, bool]] = set()
        promised: list[tuple[str, int]] = []
        for rank in range(RANKS):
            path = self.folder / f"told-{rank}"
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            for line in lines[self._read[rank] :]:
                if not line.endswith(b"\n"):
                    continue  # it was killed as it wrote
                start, what, *rest = json.loads(line)
                assert start == salt
                if what == "restored":
                    of, step, right, is_local = rest
                    assert right, f"rank {rank} of start {salt} restored other values of step {step}"
                    restored.add((of, step, is_local))
                elif what == "began":
                    restored.add((0, 0, False))
                elif what == "committed":
                    assert rest[2], f"step {rest[1]} of start {salt} was not committed in the local folders"
                    promised.append(("local", rest[1]))
                else:
                    promised.append(("durable", rest[1]))
            self._read[rank] = len(lines)
        assert len(restored) <= 1, f"ranks of start {salt} restored different steps: {restored}"
        for _, step, is_local in restored:
            assert step >= max(self.local, self.durable), (
                f"start {salt} restored step {step}, but step {self.local} was committed in the local folders, "
                f"and step {self.durable} in the run"
            )
            # A step after the newest promised one may be whole, too. From here on it is the newest.
            self.local = step if is_local else 0
            self.durable = self.durable if is_local else step
            self.counts["local" if is_local else "run" if step else "began"] += 1
        for where, step in promised:
            self.local = max(self.local, step if where == "local" else 0)
            self.durable = max(self.durable, step if where == "durable" else 0)
            self.counts[f"promised {where}"] += 1

    def harmed(self) -> None:
        self.local = 0


def deaths(folder: Path, seed: int, starts: int, proxy: Proxy | None = None) -> Counter[str]:
    """Start the job again and again, and kill it in the middle of its saves."""
    dice = random.Random(seed)
    run = str(folder / "run") if proxy is None else f"s3://{BUCKET}/{folder.name}-{seed}"
    env = {} if proxy is None else s3_environment(proxy.port)
    promises = Promises(folder)
    for salt in range(1, starts + 1):
        for path in (jobs.hold(str(folder)), jobs.cut(str(folder))):
            path.unlink(missing_ok=True)
        if proxy is not None:
            proxy.rule = lambda *_: "pass"
        with ProcessWorld(RANKS, env=env) as world:
            world.start(jobs.train_until_killed, run, str(folder), HOSTS, salt)
            # Mostly until some saves are committed: a start that is killed earlier tells little.
            lines = dice.choice([0, 1, 3, 5, 7, 9])
            wait_for(lambda salt=salt, lines=lines: told(folder, salt) >= lines)  # type: ignore[misc]
            time.sleep(dice.uniform(0.0, 0.1))
            away = dice.choice(["", "hold", "cut"])
            promises.counts[f"run: {away or 'there'}"] += 1
            if away and proxy is not None:
                proxy.rule = lambda *_: "drop"
            elif away:
                (folder / away).touch()
            time.sleep(dice.uniform(0.0, 0.3))
            victims = dice.choice([[0], [3], [0, 1], [2, 3], [0, 1, 2, 3]])
            for rank in victims:
                world.signal(rank, signal.SIGKILL)
            time.sleep(dice.choice([0.0, 0.1, 0.4]))
            for rank in range(RANKS):  # as a launcher does
                world.signal(rank, signal.SIGKILL)
            world.collect(30.0)
        promises.heed(salt)
        promises.counts["deaths"] += 1
        if dice.random() < 0.3:
            copies = sorted((folder / f"host-{dice.randrange(HOSTS)}").glob("*/step-*/index.safetensors"))
            if copies:
                harm = dice.choice(HARMS)
                promises.harmed()
                promises.counts[harm.__name__] += 1
                harm(copies[-1].parent)
    return promises.counts


def told(folder: Path, salt: int) -> int:
    """Return how many lines the rank that is behind has told in this start."""
    paths = [folder / f"told-{rank}" for rank in range(RANKS)]
    return min(path.read_bytes().count(f"[{salt}, ".encode()) if path.exists() else 0 for path in paths)


def wait_for(ready: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while time.monotonic() < ends and not ready():
        time.sleep(0.005)


@pytest.mark.wide
def test_some_deaths(tmp_path: Path) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    found = deaths(folder, 1, 6)
    assert found["deaths"] == 6
    assert found["local"] >= 2
    assert found["promised local"] > 10


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_many_deaths(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / f"many-{seed}"
    folder.mkdir()
    if seed % 2:
        found = deaths(folder, seed, 50)
    else:
        with moto() as port:
            proxy = Proxy(port)
            try:
                found = deaths(folder, seed, 50, proxy)
            finally:
                proxy.close()
    print(dict(found))
    assert found["deaths"] == 50
    assert found["local"] >= 10
    assert found["run"] >= 1
