"""Object stores keep the contract: S3, Google's preconditions, and S3 with one fault in three."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from holdfast._core.store.base import Store
from holdfast._core.store.local import open_store
from holdfast.testing import StoreContract
from tests.support.object_servers import BUCKET, Google, Proxy, google_environment, hurry, s3_environment

pytest.importorskip("obstore")
_numbers = itertools.count(1)


class TestS3(StoreContract):
    @pytest.fixture
    def store(self, server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        proxy = Proxy(server)
        for name, value in s3_environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        yield open_store(f"s3://{BUCKET}/contract-{next(_numbers)}")
        proxy.close()


class TestS3WithFaults(StoreContract):
    """Every third request is refused, dropped, or done without a reply."""

    @pytest.fixture
    def store(self, server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        hurry(monkeypatch, "503")
        proxy = Proxy(server)
        faults = itertools.cycle(("503", "drop", "lost"))
        proxy.rule = lambda method, path, query, number: next(faults) if number % 3 == 1 else "pass"
        for name, value in s3_environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        yield open_store(f"s3://{BUCKET}/contract-{next(_numbers)}")
        proxy.close()

    def test_a_chain_of_replacements_loses_none(self, store: Store) -> None:
        # A version whose reply was lost may be replaced before its writer looks: that one is told that the
        # version of another stands, which is so. No version is replaced twice.
        count, done = self.chain(store)
        assert done <= count <= 40


class TestGoogle(StoreContract):
    @pytest.fixture
    def google(self, server: int) -> Iterator[int]:
        proxy = Proxy(server, Google())
        yield proxy.port
        proxy.close()

    @pytest.fixture
    def store(self, google: int, monkeypatch: pytest.MonkeyPatch) -> Store:
        for name, value in google_environment(google).items():
            monkeypatch.setenv(name, value)
        return open_store(f"gs://{BUCKET}/contract-{next(_numbers)}")
