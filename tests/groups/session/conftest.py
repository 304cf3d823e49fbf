from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.groups.session.launch import fork_server


@pytest.fixture(scope="module")
def forks() -> Iterator[None]:
    """`launch` may be called."""
    with fork_server():
        yield
