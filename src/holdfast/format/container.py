"""The safetensors container: write its header ahead of streamed data, read it with suspicion.

A file is `u64 length | JSON header | data`. We write the header ourselves because data is
streamed and hashed on its way out, and because the safetensors library neither syncs nor checks.
What we write, the library opens.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from holdfast.errors import BadInput, CorruptCheckpoint
from holdfast.format.limits import DATA_HEADER_BYTES, bounded_memory, check_size
from holdfast.layout.tensor import Dims

ALIGN = 64
Read = Callable[[int, int], bytes]
"""`read(start, length)` gives those bytes of one file, or fewer at its end."""


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a file; `start` and `stop` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def encode_header(entries: Iterable[tuple[str, str, Dims, int, int]], metadata: dict[str, str]) -> bytes:
    """Length and JSON header for `(name, tag, shape, start, stop)` rows, padded so that data is aligned."""
    # Rows are put together as text: there may be 200,000 of them, and json.dumps of all would
    # need a dict for each.
    quoted = json.encoder.encode_basestring
    rows = [f'"__metadata__":{json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))}']
    for name, tag, shape, start, stop in entries:
        sides = ",".join(map(str, shape))
        rows.append(f'{quoted(name)}:{{"dtype":"{tag}","shape":[{sides}],"data_offsets":[{start},{stop}]}}')
    text = ("{" + ",".join(rows) + "}").encode()
    if len(text) > DATA_HEADER_BYTES:
        raise BadInput(
            f"The header of a data file with {len(rows) - 1} parts of tensors would have {len(text)} bytes, "
            f"more than the {DATA_HEADER_BYTES} that readers take.",
            hint="Use shorter names.",
        )
    # safetensors lets spaces follow the JSON; with them, data begins where its dtypes want it.
    text += b" " * (-(len(text) + 8) % ALIGN)
    return struct.pack("<Q", len(text)) + text


class Header(NamedTuple):
    """A parsed header."""

    raw: bytes
    """With the length before it, for digesting."""
    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int
    """Where data begins, in bytes from the start of the file."""


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # Of two equal names json keeps the last one; another reader may take the first, and load something else.
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name!r} stands twice")
            seen.add(name)
    return unique


def read_header(read: Read, size: int, where: str, limit: int = DATA_HEADER_BYTES) -> Header:
    """Read and check a header; every way in which it can lie ends in CorruptCheckpoint."""
    prefix = read(0, 8)
    if len(prefix) < 8:
        raise CorruptCheckpoint(
            f"{where} is {size} bytes long, too short for a safetensors file: it is truncated."
        )
    length = struct.unpack("<Q", prefix)[0]
    # Checked before a read of that size is made: eight bytes can say 2^64.
    if length > size - 8:
        raise CorruptCheckpoint(
            f"{where} announces a header of {length} bytes in a file of {size}: it is damaged or truncated."
        )
    check_size(f"The header of {where}", length, limit)
    with bounded_memory(f"The header of {where}"):
        text = read(8, length)
        entries, metadata = _parsed(text, length, where)
    # Gaps and overlaps between entries are not looked for: chunks of a data file are found by the index,
    # never by these entries, and `columns.check_rows` finds chunks of an index that overlap.
    room = size - 8 - length
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        if not 0 <= start <= stop <= room:
            raise CorruptCheckpoint(
                f"{where} places {name!r} at bytes {start} to {stop} of {room}: the file is damaged or "
                "truncated."
            )
    return Header(prefix + text, entries, metadata, 8 + length)


def _parsed(text: bytes, length: int, where: str) -> tuple[dict[str, Entry], dict[str, str]]:
    try:
        if len(text) != length:
            raise ValueError(f"only {len(text)} of {length} bytes are there")
        values = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        metadata = msgspec.convert(values.pop("__metadata__", {}), dict[str, str])
        return msgspec.convert(values, dict[str, Entry]), metadata
    # json recurses, so brackets in brackets end in RecursionError. The message is cut because it may quote a
    # name, which may be as long as the header.
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise CorruptCheckpoint(f"The header of {where} can't be read: {str(error)[:1000]}.") from None


class WrittenFile(NamedTuple):
    """What a rank tells the committer of a file."""

    name: str
    size: int
    index_start: int
    index_size: int
