"""Size limits of files and objects that are read whole. Larger ones are refused before they cost memory.

They are far above the sizes in real checkpoints, and writers obey them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Protocol, TypeVar

from holdfast.errors import CorruptCheckpoint

_Result = TypeVar("_Result")
METADATA_BYTES = 1 << 30
"""`.metadata` of torch DCP or megatron-core: enough for five million chunks, at 183 bytes each (measured)."""
OBJECT_BYTES = 16 << 30
"""One object, or a file that holds one, such as `common.pt`."""
INDEX_BYTES = 8 << 30
"""An index: about 50 bytes per chunk, and 8 per digest block."""
INDEX_HEADER_BYTES = 16 << 20
"""The JSON header of an index: a few KiB and the user's notes."""
DATA_HEADER_BYTES = 100_000_000
"""The JSON header of a data file, one line per chunk: the limit of the safetensors library."""


def check_size(where: str, size: int, limit: int) -> None:
    """Raise CorruptCheckpoint if `size` exceeds `limit`."""
    if size > limit:
        raise CorruptCheckpoint(f"{where} has {size} bytes, more than the {limit} that Holdfast reads of it.")


@contextmanager
def bounded_memory(where: str) -> Iterator[None]:
    """Turn a MemoryError into CorruptCheckpoint: a file caused the allocation, so `restore` can fall back to
    another step."""
    try:
        yield
    except MemoryError:
        raise CorruptCheckpoint(
            f"{where} asks for more memory than there is: it is damaged, or this host is too small for it."
        ) from None


class _HasWhere(Protocol):
    where: str


def in_bounded_memory(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Run a method inside `bounded_memory`, for an object whose `where` names what it reads."""

    @wraps(method)
    def bounded(self: _HasWhere, *args: object, **named: object) -> _Result:
        with bounded_memory(self.where):
            return method(self, *args, **named)

    return bounded
