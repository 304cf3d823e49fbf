"""A bucket on a server, behind a proxy that injects faults; its names are those of the files and the tests."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from holdfast._core.run import owner
from holdfast._core.store import pins
from tests.support.object_servers import BUCKET, Proxy, moto, s3_environment


@pytest.fixture(scope="session")
def server() -> Iterator[int]:
    with moto() as port:
        yield port


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    made = Proxy(server)
    for name, value in s3_environment(made.port).items():
        monkeypatch.setenv(name, value)
    yield made
    made.rule = lambda *_: "pass"
    for left in (owner, pins):  # or what a test has left makes its requests to the next test's proxy
        left._give_back()
    made.close()


@pytest.fixture
def place(request: pytest.FixtureRequest) -> str:
    """A folder of the test's own."""
    name = f"{request.path.stem}-{request.node.name.lower()}"
    return f"s3://{BUCKET}/{re.sub('[^a-z0-9_]+', '-', name)}"


@pytest.fixture
def deletions_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a read waits until its pin is deleted, on a busy machine, too: what comes next may remove the step."""
    monkeypatch.setattr(pins, "_DELETED_WITHIN", 60.0)
