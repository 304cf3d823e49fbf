"""What users test with: a clock, a store and a roster in memory, and the contracts of all of them."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast._core.roster.memory import Board, MemoryRoster
    from holdfast.testing.clock import ManualClock
    from holdfast.testing.memory_store import MemoryStore
    from holdfast.testing.roster_contract import RosterContract
    from holdfast.testing.store_contract import StoreContract

_WHERE = {
    "Board": "holdfast._core.roster.memory",
    "ManualClock": "holdfast.testing.clock",
    "MemoryRoster": "holdfast._core.roster.memory",
    "MemoryStore": "holdfast.testing.memory_store",
    "RosterContract": "holdfast.testing.roster_contract",
    "StoreContract": "holdfast.testing.store_contract",
}

__all__ = ["Board", "ManualClock", "MemoryRoster", "MemoryStore", "RosterContract", "StoreContract"]


# On demand: the contracts import pytest, which the clock does not need.
def __getattr__(name: str) -> object:
    if name in _WHERE:
        if name.endswith("Contract") and _WHERE[name] not in sys.modules:
            # An assertion that fails shows its values only if pytest rewrites it.
            import_module("pytest").register_assert_rewrite(_WHERE[name])
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'holdfast.testing' has no attribute {name!r}")
