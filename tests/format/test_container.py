"""The safetensors container: what we write others open; what lies is CorruptCheckpoint."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load

from holdfast._core.format.container import ALIGN, Header, encode_header, read_header
from holdfast._core.format.names import is_data_file
from holdfast.errors import CorruptCheckpoint


def parse(data: bytes) -> Header:
    return read_header(lambda start, length: data[start : start + length], len(data), "the file")


def raw(header: Any, room: int = 16) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(room)


def test_the_safetensors_library_opens_what_we_write(tmp_path: Path) -> None:
    values = np.arange(6, dtype="<f4").reshape(2, 3), np.arange(5, dtype="u1")
    rows = [("a", "F32", (2, 3), 0, 24), ('ü "x"\n\\', "U8", (5,), 24, 29), ("none", "I64", (0, 4), 29, 29)]
    data = encode_header(rows, {"who": 'me "too"'}) + values[0].tobytes() + values[1].tobytes()
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    found = load(data)
    assert set(found) == {"a", 'ü "x"\n\\', "none"}
    assert (found["a"] == values[0]).all()
    assert (found['ü "x"\n\\'] == values[1]).all()
    assert found["none"].shape == (0, 4)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"who": 'me "too"'}


@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 9), max_size=6),
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"]))
    ),
)
def test_any_names_and_metadata_come_back(sizes: dict[str, int], metadata: dict[str, str]) -> None:
    sizes.pop("__metadata__", None)
    rows, at = [], 0
    for name, size in sizes.items():
        rows.append((name, "U8", (size,), at, at + size))
        at += size
    header = encode_header(rows, metadata)
    found = parse(header + bytes(at))
    assert found.metadata == metadata
    assert found.data_start == len(header)
    assert len(header) % ALIGN == 0
    assert {n: (e.dtype, e.shape, e.data_offsets) for n, e in found.entries.items()} == {
        name: (tag, shape, (start, stop)) for name, tag, shape, start, stop in rows
    }
    try:
        opened = load(header + bytes(at))
    except SafetensorError as error:  # its own limits on names do not make our files wrong
        pytest.fail(f"safetensors refuses {sizes}: {error}")
    assert {name: len(value) for name, value in opened.items()} == sizes


GOOD = {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}
MALFORMED: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "0 bytes long, too short"),
    ("seven bytes", b"\x01" * 7, "too short for a safetensors file"),
    (
        "length past the end",
        struct.pack("<Q", 100) + b"{}",
        "announces a header of 100 bytes in a file of 10",
    ),
    ("length of 2^64-1", b"\xff" * 8 + b"{}", "announces a header of 18446744073709551615"),
    ("not JSON", raw(b"{]"), "can't be read"),
    ("not UTF-8", raw(b'{"\xff": 1}'), "can't be read"),
    ("empty", raw(b""), "can't be read"),
    ("a list", raw([1]), "not a JSON object"),
    ("a number", raw(3), "not a JSON object"),
    ("deep nesting", raw(b"[" * 100_000), "can't be read"),
    (
        "a name twice",
        raw(
            b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
            b'"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
        ),
        "'a' stands twice",
    ),
    ("metadata twice", raw(b'{"__metadata__":{"x":"1","x":"2"}}'), "'x' stands twice"),
    ("metadata of numbers", raw({"__metadata__": {"a": 1}}), "can't be read"),
    ("metadata no object", raw({"__metadata__": "x"}), "can't be read"),
    ("entry no object", raw({"a": 3}), "can't be read"),
    ("entry null", raw({"a": None}), "can't be read"),
    ("no dtype", raw({"a": {"shape": [4], "data_offsets": [0, 4]}}), "dtype"),
    ("no shape", raw({"a": {"dtype": "U8", "data_offsets": [0, 4]}}), "shape"),
    ("no offsets", raw({"a": {"dtype": "U8", "shape": [4]}}), "data_offsets"),
    ("one offset", raw({"a": GOOD["a"] | {"data_offsets": [0]}}), "can't be read"),
    ("three offsets", raw({"a": GOOD["a"] | {"data_offsets": [0, 1, 2]}}), "can't be read"),
    ("float offset", raw({"a": GOOD["a"] | {"data_offsets": [0, 4.5]}}), "can't be read"),
    ("NaN offset", raw(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,NaN]}}'), "can't be read"),
    ("text shape", raw({"a": GOOD["a"] | {"shape": "4"}}), "can't be read"),
    ("negative start", raw({"a": GOOD["a"] | {"data_offsets": [-4, 4]}}), "'a' at bytes -4 to 4"),
    ("stop before start", raw({"a": GOOD["a"] | {"data_offsets": [4, 2]}}), "'a' at bytes 4 to 2"),
    ("stop past the end", raw({"a": GOOD["a"] | {"data_offsets": [0, 17]}}), "bytes 0 to 17 of 16"),
    ("stop at 2^70", raw({"a": GOOD["a"] | {"data_offsets": [0, 1 << 70]}}), "."),
    (
        "number of 5000 digits",
        raw(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,' + b"9" * 5000 + b"]}}"),
        ".",
    ),
]


@pytest.mark.parametrize(
    ("data", "words"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED]
)
def test_every_malformed_header_is_corrupt(data: bytes, words: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=re.escape(words) if words != "." else words) as caught:
        parse(data)
    assert "the file" in str(caught.value)


def test_every_truncation_is_corrupt_or_a_whole_header() -> None:
    whole = encode_header([("a", "U8", (4,), 0, 4)], {}) + b"data"
    for length in range(len(whole)):
        with pytest.raises(CorruptCheckpoint):
            parse(whole[:length])
    assert parse(whole).entries["a"].shape == (4,)


def test_a_read_that_stops_early_is_corrupt() -> None:
    data = raw(GOOD)
    with pytest.raises(CorruptCheckpoint, match=r"only \d+ of \d+ bytes"):
        read_header(lambda start, length: data[start : start + length][:20], len(data), "the file")


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    for candidate in (data, struct.pack("<Q", len(data)) + data):
        try:
            parse(candidate)
        except CorruptCheckpoint:
            continue


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("data/abc-r00001.safetensors", True),
        ("data/abc-r00001-002.safetensors", True),
        ("data/../index.safetensors", False),
        ("data/..safetensors", False),
        ("../data/a.safetensors", False),
        ("/data/a.safetensors", False),
        ("data/a/b.safetensors", False),
        ("data//a.safetensors", False),
        ("data/.hidden.safetensors", False),
        ("data/a.safetensors\n", False),
        ("data/a\0.safetensors", False),
        ("data/a.pt", False),
        ("index.safetensors", False),
        ("data\\a.safetensors", False),
        ("file:///data/a.safetensors", False),
        ("", False),
    ],
)
def test_only_plain_names_in_the_data_folder_are_opened(name: str, safe: bool) -> None:
    assert is_data_file(name) is safe
