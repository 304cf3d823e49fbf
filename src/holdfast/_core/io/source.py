"""The interface of a load to the index or metadata of a checkpoint of any format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from holdfast._core.base.values import Message
from holdfast._core.format.columns import Array, Columns
from holdfast._core.plan.shard_table import ShardTable


class Source(Protocol):
    """An index: a Holdfast index, or the metadata of another format presented as one."""

    where: str
    identity: str
    about: Message
    object_prefix: bytes
    """Prefix that an object's bytes need for `objects.decode`."""
    fetched_for: str
    """Ranks and grid that a slice was fetched for; "" if the source is complete."""

    @property
    def tensors(self) -> int: ...

    @property
    def bytes_read(self) -> int:
        """Bytes read of the index or metadata so far."""
        ...

    def names(self) -> list[str]: ...

    def find(self, wanted: Sequence[str]) -> Array: ...

    def find_one(self, name: str) -> int: ...

    def select(self, rows: Array | None = None) -> Columns: ...


class Rows(NamedTuple):
    """Rows of a state, in the names and shapes of a source."""

    table: ShardTable
    owner: list[int]
    """For each row, the owner of the state's row that it was translated from."""
    blank: list[int]
    """Rows of the state that the source fills only in part; the remainder is set to zero (a padded
    vocabulary)."""


class ForeignSource(ABC):
    """A source with other names and shapes than a state has, such as a published model."""

    @property
    @abstractmethod
    def tied(self) -> tuple[str, str] | None:
        """A tensor and the one that equals it in most models (tied weights), if both exist."""

    @abstractmethod
    def translate(self, table: ShardTable, owner: Sequence[int]) -> Rows:
        """Translate the rows of a state to rows of this source. owner: for each row, its owner.

        Raises MissingTensors for a part that is not there, ShapeMismatch for one that does not fit the state.
        """

    @abstractmethod
    def is_weight(self, name: str) -> bool:
        """Return whether a tensor should be requested by some rank: false for scales, which are read with
        other tensors."""


def rows_of(source: Source, table: ShardTable, owner: Sequence[int]) -> Rows:
    """Return the rows of a state in the names and shapes of a source."""
    if isinstance(source, ForeignSource):
        return source.translate(table, owner)
    return Rows(table, list(owner), [])
