"""The safetensors container: write its header before streamed data, and check every field when reading it.

A file is `u64 length | JSON header | data`. Holdfast writes the header itself, because it streams and hashes
the data, and because the safetensors library neither syncs nor verifies. The library can open the files.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from holdfast._core.base.collector import collector_paused
from holdfast._core.base.values import NO_JSON, shortened
from holdfast._core.format.limits import DATA_HEADER_BYTES, bounded_memory, check_size
from holdfast._core.layout.tensor import Dims
from holdfast._core.ready import ready
from holdfast.errors import BadInput, CorruptCheckpoint

ALIGN = 64
Read = Callable[[int, int], bytes]
"""`read(start, length)` returns these bytes of one file; fewer at its end."""


class HeaderEntry(msgspec.Struct, frozen=True, gc=False):  # holds no object that could refer back to it
    """One tensor of a file; `start` and `stop` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def encode_header(entries: Sequence[tuple[str, str, Dims, int, int]], metadata: dict[str, str]) -> bytes:
    """Return length and JSON header for `(name, tag, shape, start, stop)` rows, padded to align the data.
    Their names differ."""
    rows = {name: HeaderEntry(tag, shape, (start, stop)) for name, tag, shape, start, stop in entries}
    text = msgspec.json.encode({"__metadata__": metadata, **rows})
    if len(text) > DATA_HEADER_BYTES:
        raise BadInput(
            f"The header of a data file with {len(rows)} parts of tensors would have {len(text)} bytes, "
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
    entries: dict[str, HeaderEntry]
    metadata: dict[str, str]
    data_start: int
    """Position of the data, in bytes from the start of the file."""


class _HeaderMetadata(msgspec.Struct):
    raw: msgspec.Raw = msgspec.field(name="__metadata__", default_factory=msgspec.Raw)


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # json keeps the last of two equal names. Another reader may keep the first, and load something else.
    unique = dict(pairs)
    if len(unique) != len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {name!r} stands twice")
    return unique


def read_header(read: Read, size: int, where: str, limit: int = DATA_HEADER_BYTES) -> Header:
    """Read and check a header. CorruptCheckpoint if it is damaged or contradicts the file's size."""
    return parse_header(raw_header(read, size, where, limit), size, where)


def raw_header(read: Read, size: int, where: str, limit: int = DATA_HEADER_BYTES) -> bytes:
    """Read a header's length and JSON, without parsing it."""
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
        if len(text) != length:
            raise CorruptCheckpoint(
                f"The header of {where} can't be read: only {len(text)} of {length} bytes are there."
            )
        return prefix + text


def parse_header(raw: bytes, size: int, where: str) -> Header:
    """Parse and check the result of `raw_header`. size: of the file."""
    with bounded_memory(f"The header of {where}"):
        entries, metadata = _parsed(raw[8:], where)
    # Gaps and overlaps between entries are not checked: the index locates the chunks of a data file, not
    # these entries, and `columns.check_rows` finds overlapping chunks in an index. Of a file without an
    # index, `hugging_face.check_entries` does.
    room = size - len(raw)
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        if not 0 <= start <= stop <= room:
            raise CorruptCheckpoint(
                f"{where} places {name!r} at bytes {start} to {stop} of {room}: the file is damaged or "
                "truncated."
            )
    return Header(raw, entries, metadata, len(raw))


def _parsed(text: bytes, where: str) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    try:
        with collector_paused(), suppress(*NO_JSON):
            if (found := _quickly_parsed(text)) is not None:
                return found
        values = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        metadata = msgspec.convert(values.pop("__metadata__", {}), ready(dict[str, str]))
        # json accepts lone surrogates, but such text can't be encoded.
        "".join((*values, *metadata, *metadata.values())).encode()
        return msgspec.convert(values, ready(dict[str, HeaderEntry])), metadata
    # RecursionError: json recurses into nested brackets. The message is cut, because it may quote a name,
    # which may be as long as the header.
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise CorruptCheckpoint(
            f"The header of {where} can't be read: {shortened(str(error), 1000)}."
        ) from None


def _quickly_parsed(text: bytes) -> tuple[dict[str, HeaderEntry], dict[str, str]] | None:
    """Parse a header fast; None if a name may occur twice, which msgspec does not detect.

    The slow parser takes 15 times as long, and three times the memory.
    """
    raw = bytes(msgspec.json.decode(text, type=ready(_HeaderMetadata)).raw)
    first = b'{"__metadata__":' + raw
    if raw and not text.startswith(first):
        return None
    rest = b"{" + text[len(first) + text.startswith(b",", len(first)) :] if raw else text
    entries = msgspec.json.decode(rest, type=ready(dict[str, HeaderEntry]))
    metadata = msgspec.json.decode(raw, type=ready(dict[str, str])) if raw else {}
    # Each object has its own brace, each pair its own colon; there are more if a name occurs twice.
    if rest.count(b"{") != 1 + len(entries) or rest.count(b":") != 4 * len(entries):
        return None
    once = raw.count(b":") == len(metadata) or len(json.loads(raw, object_pairs_hook=list)) == len(metadata)
    return (entries, metadata) if once else None
