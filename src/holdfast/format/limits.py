"""Bounds on what is read whole. A file that says more is refused before memory or time is spent on it.

They are far above what checkpoints have, and what is written keeps to them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from holdfast.errors import CorruptCheckpoint

METADATA_BYTES = 1 << 30
"""`.metadata` of torch DCP or megatron-core: 183 bytes a chunk were measured, so over five million chunks."""
OBJECT_BYTES = 16 << 30
"""One object, or a file that is one, such as `common.pt`."""
INDEX_BYTES = 8 << 30
"""An index: about 150 bytes a chunk and 8 a digest block."""
INDEX_HEADER_BYTES = 16 << 20
"""The JSON header of an index: a few KiB and the user's notes."""
DATA_HEADER_BYTES = 100_000_000
"""The JSON header of a data file, a line a chunk: what the safetensors library reads."""


def check_size(where: str, size: int, limit: int) -> None:
    """Refuse what is larger than its bound."""
    if size > limit:
        raise CorruptCheckpoint(f"{where} has {size} bytes, more than the {limit} that Holdfast reads of it.")


@contextmanager
def bounded_memory(where: str) -> Iterator[None]:
    """Turn a failed allocation for what a file says of itself into damage of the file, so that `restore`
    falls back."""
    try:
        yield
    except MemoryError:
        raise CorruptCheckpoint(
            f"{where} asks for more memory than there is: it is damaged, or this host is too small for it."
        ) from None


class _HasWhere(Protocol):
    where: str


_Self = TypeVar("_Self", bound=_HasWhere)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_bounded_memory(
    method: Callable[Concatenate[_Self, _P], _R],
) -> Callable[Concatenate[_Self, _P], _R]:
    """`bounded_memory` around a method of what knows `where` it reads."""

    @wraps(method)
    def bounded(self: _Self, /, *args: _P.args, **named: _P.kwargs) -> _R:
        with bounded_memory(self.where):
            return method(self, *args, **named)

    return bounded
