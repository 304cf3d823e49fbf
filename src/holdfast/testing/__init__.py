"""What users test with: a clock, and the contracts that every store and every roster must keep."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.testing.clock import ManualClock
    from holdfast.testing.roster_contract import RosterContract
    from holdfast.testing.store_contract import StoreContract

_WHERE = {
    "ManualClock": "holdfast.testing.clock",
    "RosterContract": "holdfast.testing.roster_contract",
    "StoreContract": "holdfast.testing.store_contract",
}

__all__ = ["ManualClock", "RosterContract", "StoreContract"]


# On demand: the contracts import pytest, which the clock does not need.
def __getattr__(name: str) -> object:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'holdfast.testing' has no attribute {name!r}")
