"""Worlds of eight ranks, as fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes import ProcessWorld


@pytest.fixture(scope="module")
def world() -> Iterator[ProcessWorld]:
    """Eight ranks that a module's tests share; none of them may kill one."""
    with ProcessWorld(8) as shared:
        yield shared


@pytest.fixture
def mortal() -> Iterator[ProcessWorld]:
    """Eight ranks of a test's own, to be killed; the store lives in the test, as with a launcher."""
    with ProcessWorld(8) as own:
        yield own
