"""What you may write yourself: a store for files, and a roster, the messages between ranks.

`holdfast.testing` has a contract for each, which a test of yours subclasses, and one of each in memory.
"""

from holdfast._roster.base import Roster
from holdfast._store.base import Entry, Kind, NotFound, Reader, Store, Writer

__all__ = ["Entry", "Kind", "NotFound", "Reader", "Roster", "Store", "Writer"]
