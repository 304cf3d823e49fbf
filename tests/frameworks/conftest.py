from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes import ProcessWorld


@pytest.fixture
def mcore_world() -> Iterator[ProcessWorld]:
    """Eight new ranks: megatron-core's groups, with gloo's threads, go with the processes that have them."""
    with ProcessWorld(8) as world:
        yield world
