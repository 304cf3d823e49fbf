"""Which save `restore` brings back, in random histories of a run: with local folders, and without."""

from __future__ import annotations

import multiprocessing as mp
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.run import tier_histories


def lived(folder: Path, seeds: range, starts: int, has_local: bool, seconds: int = 300) -> Counter[str]:
    """Live through histories in one process, which forks their starts: it has no threads."""
    context = mp.get_context("forkserver")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(tier_histories.live, folder, seeds, starts, has_local).result(seconds)


def test_some_histories_with_local_folders(tmp_path: Path) -> None:
    found = lived(tmp_path, range(3200, 3208), 6, True)
    print(dict(found))
    assert min(found[kind] for kind in ("local", "run", "given")) > 5


def test_some_histories_without_local_folders(tmp_path: Path) -> None:
    found = lived(tmp_path, range(5), 6, False)
    print(dict(found))
    assert min(found[kind] for kind in ("run", "given")) > 5
    assert not found["local"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("has_local", [True, False])
def test_many_histories(tmp_path: Path, has_local: bool) -> None:
    found = lived(tmp_path, range(10_000, 10_400), 8, has_local, 3500)
    print(dict(found))
    assert found["run"] > 400
    assert (found["local"] > 400) == has_local
