"""Our stores keep the contract; and a store that does not is caught by it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast._core.store.base import Store
from holdfast._core.store.local import LocalStore
from holdfast.errors import Conflict
from holdfast.testing import MemoryStore, StoreContract


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "root")

    def link(self, store: Store, path: str, to: str) -> None:
        place = Path(store.url, path)
        place.symlink_to(os.path.relpath(Path(store.url, to), place.parent))


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class Careless(MemoryStore):
    """Replaces whatever is there: the mistake that the contract is for."""

    def publish(self, path: str, data: bytes, replacing: bytes | None) -> None:
        self.files[self._full(path)] = data


def test_the_contract_catches_a_careless_store() -> None:
    contract = StoreContract()
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        contract.test_publish_is_exclusive(Careless())
    with pytest.raises(AssertionError):
        contract.test_of_several_that_publish_one_wins(Careless(), 0)
    with pytest.raises(Conflict):
        MemoryStore().publish("a", b"", b"x")
