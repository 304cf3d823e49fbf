"""The safetensors container: write its header before streamed data, and check every field when reading it.

A file is `u64 length | JSON header | data`. Holdfast writes the header itself, because it streams and hashes
the data, and because the safetensors library neither syncs nor verifies. The library can open the files.
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
"""`read(start, length)` returns these bytes of one file; fewer at its end."""


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a file; `start` and `stop` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def encode_header(entries: Iterable[tuple[str, str, Dims, int, int]], metadata: dict[str, str]) -> bytes:
    """Return length and JSON header for `(name, tag, shape, start, stop)` rows, padded to align the data."""
    # The rows are formatted as text, because json.dumps would need a dict for each of up to 200,000 rows.
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
    # safetensors allows spaces after the JSON. They align the data that follows.
    text += b" " * (-(len(text) + 8) % ALIGN)
    return struct.pack("<Q", len(text)) + text


class Header(NamedTuple):
    """A parsed header."""

    raw: bytes
    """Length and JSON: the bytes that the header's digest covers."""
    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int
    """Position of the data, in bytes from the start of the file."""


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # json keeps the last of two equal names. Another reader may keep the first, and load something else.
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name!r} stands twice")
            seen.add(name)
    return unique


def read_header(read: Read, size: int, where: str, limit: int = DATA_HEADER_BYTES) -> Header:
    """Read and check a header. CorruptCheckpoint if it is damaged or contradicts the file's size."""
    prefix = read(0, 8)
    if len(prefix) < 8:
        raise CorruptCheckpoint(
            f"{where} is {size} bytes long, too short for a safetensors file: it is truncated."
        )
    length = struct.unpack("<Q", prefix)[0]
    # Before reading that many bytes: a damaged length can be up to 2^64.
    if length > size - 8:
        raise CorruptCheckpoint(
            f"{where} announces a header of {length} bytes in a file of {size}: it is damaged or truncated."
        )
    check_size(f"The header of {where}", length, limit)
    with bounded_memory(f"The header of {where}"):
        text = read(8, length)
        entries, metadata = _parsed(text, length, where)
    # Gaps and overlaps between entries are not checked: the index locates the chunks of a data file, not
    # these entries, and `columns.check_rows` finds overlapping chunks in an index.
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
    # RecursionError: json recurses into nested brackets. The message is cut, because it may quote a name,
    # which may be as long as the header.
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise CorruptCheckpoint(f"The header of {where} can't be read: {str(error)[:1000]}.") from None
