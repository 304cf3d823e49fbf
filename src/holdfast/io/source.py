"""What a load reads of a checkpoint before it reads data, whatever the format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from holdfast.format.columns import Array, Columns


class Source(Protocol):
    """An index: a Holdfast index, or the metadata of another format presented as one."""

    where: str
    identity: str
    about: dict[str, Any]
    tensors: int
    object_prefix: bytes
    """Prefix that an object's bytes need for `objects.decode`."""
    fetched_for: str
    """Ranks and grid that a slice was fetched for; "" if the source is complete."""

    @property
    def bytes_read(self) -> int:
        """Bytes read of the index or metadata so far."""
        ...

    def names(self) -> list[str]: ...

    def find(self, wanted: Sequence[str]) -> Array: ...

    def find_one(self, name: str) -> int: ...

    def select(self, rows: Array | None = None) -> Columns: ...
