"""Interfaces that you can implement: `Store`, storage for files, and `Roster`, messages between ranks.

`holdfast.testing` has a contract test for each, to subclass in your tests, and an in-memory implementation.
"""

from holdfast._core.roster.base import Roster
from holdfast._core.store.base import Capabilities, Entry, Kind, NotFound, OtherSize, Reader, Store, Writer

__all__ = ["Capabilities", "Entry", "Kind", "NotFound", "OtherSize", "Reader", "Roster", "Store", "Writer"]
