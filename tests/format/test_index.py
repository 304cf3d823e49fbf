"""The index: what goes in comes out, in whole and in part, and no damage is believed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.format.columns import SPECS, Columns, pad, unpad
from holdfast._core.format.container import read_header
from holdfast._core.format.digest import digest, digest_many
from holdfast._core.format.index import Index
from holdfast._core.format.index_layout import FENCE, encode
from holdfast._core.format.index_pages import PAGE
from holdfast._core.layout.tensor import OBJECT
from holdfast.errors import CorruptCheckpoint
from tests.format.indexes import build, content, everything, many, open_bytes, place_of, random_rows, reader

Row = tuple[str, int, int, tuple[int, ...], int]


def arrays(index: Index) -> list[Any]:
    columns = index.embedded()
    return [getattr(columns, name) for name in SPECS]


@settings(max_examples=150)
@given(random_rows(), st.integers(0, 9))
def test_what_goes_in_comes_out(rows: list[Row], seed: int) -> None:
    columns = build(rows, seed)
    about = {"step": 3, "notes": {"ü": [1, None, 'x"\n']}}
    data = encode(columns, about)
    index = open_bytes(data)
    assert index.about == about
    assert content(index.embedded()) == content(columns)
    assert index.names() == sorted(row[0] for row in rows)
    for at, name in enumerate(columns.names):
        assert columns.shape_of(at) == next(row[3] for row in rows if row[0] == name)
    assert encode(index.embedded(), about) == data
    narrow = encode(columns, about, narrow=True)
    assert len(narrow) <= len(data)
    assert content(open_bytes(narrow).embedded()) == content(columns)
    assert [array.dtype for array in arrays(open_bytes(narrow))] == [array.dtype for array in arrays(index)]
    assert index.identity == open_bytes(data).identity


@settings(max_examples=100)
@given(random_rows(), st.data())
def test_select_of_some_rows_is_slicing(rows: list[Row], data: st.DataObject) -> None:
    columns = build(rows)
    index = open_bytes(encode(columns, {}))
    keep = sorted(data.draw(st.sets(st.integers(0, max(len(rows) - 1, 0)))) if rows else [])
    found = index.select(np.asarray(keep, np.int64))
    begins = [0, *columns.chunk_end.tolist()]
    digest_begins = [0, *columns.digest_end.tolist()]
    assert found.names == [columns.names[row] for row in keep]
    at, digest_at = 0, 0
    for place, row in enumerate(keep):
        assert found.shape[place].tolist() == columns.shape[row].tolist()
        assert (found.dtype[place], found.kind[place]) == (columns.dtype[row], columns.kind[row])
        for chunk in range(begins[row], begins[row + 1]):
            for name in ("offset", "size", "file", "position", "block"):
                assert getattr(found, name)[at].tolist() == getattr(columns, name)[chunk].tolist()
            mine = columns.digests[digest_begins[chunk] : digest_begins[chunk + 1]].tolist()
            assert found.digests[digest_at : digest_at + len(mine)].tolist() == mine
            digest_at += len(mine)
            assert found.digest_end[at] == digest_at
            at += 1
        assert found.chunk_end[place] == at
    assert len(found.file) == at
    assert len(found.digests) == digest_at


@settings(max_examples=100)
@given(random_rows(), st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=3)))
def test_find_is_a_dict(rows: list[Row], others: list[str]) -> None:
    columns = build(rows)
    index = open_bytes(encode(columns, {}))
    place = {name: at for at, name in enumerate(columns.names)}
    wanted = [*others, *columns.names, *columns.names[:2]]
    assert index.find(wanted).tolist() == [place.get(name, -1) for name in wanted]
    if columns.names:
        assert index.find_one(columns.names[-1]) == len(rows) - 1


@pytest.mark.parametrize("count", [FENCE - 1, FENCE, FENCE + 1, 3 * FENCE])
def test_find_around_the_edges_of_the_fence(count: int) -> None:
    columns = many(count)
    index = open_bytes(encode(columns, {}))
    assert index.find(columns.names).tolist() == list(range(count))
    between = [name + "x" for name in columns.names]
    assert (index.find(["", *between, "\U0010ffff"]) == -1).all()


def test_an_index_of_nothing() -> None:
    index = open_bytes(encode(Columns(), {}))
    assert index.names() == []
    assert index.find(["a"]).tolist() == [-1]
    assert index.select().names == []
    assert index.select(np.zeros(0, np.int64)).file_names == []


def test_partial_reads_read_a_part() -> None:
    columns = many(20_000)
    data = encode(columns, {})
    index = open_bytes(data)
    opening = index.bytes_read
    assert opening < len(data) // 50 + 16_384
    row = index.find_one(columns.names[12_345])
    assert row == 12_345
    found = index.select(np.asarray([row]))
    assert found.names == [columns.names[row]]
    # One page of each column and the fence: far from all of it, and no page is read twice.
    assert index.bytes_read < len(data) // 3
    assert index.bytes_read - opening < 22 * PAGE
    before = index.bytes_read
    index.select(np.asarray([row]))
    assert index.bytes_read == before


class Reads:
    """The bytes of a file, and which of them were read."""

    def __init__(self, data: bytes) -> None:
        self.data, self.count, self.times = data, 0, np.zeros(len(data), int)

    def __call__(self, start: int, length: int) -> bytes:
        self.count += 1
        self.times[start : start + length] += 1
        return self.data[start : start + length]


def scattered(columns: Columns, index: Index) -> None:
    found = index.find(columns.names[3::7])
    assert found.tolist() == list(range(3, len(columns.names), 7))
    assert content(index.select(found)) == content(open_bytes(encode(columns, {})).select(found))


def every(columns: Columns, index: Index) -> None:
    assert index.select(index.find(columns.names)).names == columns.names
    assert index.select().position.tolist() == columns.position.tolist()
    assert index.names() == columns.names


def nearly_every(columns: Columns, index: Index) -> None:
    rows = np.delete(np.arange(len(columns.names)), [0, 700, 701, 9_000])
    begins = np.concatenate([[0], columns.chunk_end[:-1]])
    chunks = np.concatenate([np.arange(begins[row], columns.chunk_end[row]) for row in rows])
    found = index.select(rows)
    assert found.names == [columns.names[row] for row in rows]
    assert (found.file == columns.file[chunks]).all()
    assert (found.position == columns.position[chunks]).all()


def one_by_one(columns: Columns, index: Index) -> None:
    for row in range(0, len(columns.names), 997):
        assert index.find_one(columns.names[row]) == row
        assert index.select(np.asarray([row])).names == [columns.names[row]]
    index.embedded()


@pytest.mark.parametrize("use", [scattered, every, nearly_every, one_by_one])
@pytest.mark.parametrize("count", [50, 20_000])
def test_no_byte_of_an_index_is_read_twice(use: Any, count: int) -> None:
    if count == 50 and use is nearly_every:
        pytest.skip("has rows of its own")
    columns = many(count)
    read = Reads(encode(columns, {}))
    index = Index(read, len(read.data), "the index")
    use(columns, index)
    assert read.times.max() == 1
    assert index.bytes_read == read.times.sum()


def test_what_is_used_whole_is_read_in_a_few_pieces() -> None:
    columns = many(20_000)
    data = encode(columns, {})
    read = Reads(data)
    Index(read, len(data), "the index").select(np.arange(20_000))
    assert read.count < 8
    whole = Reads(data)
    assert content(Index(whole, len(data), "the index", whole=True).embedded()) == content(columns)
    assert whole.count == 1
    small = Reads(encode(many(100), {}))
    Index(small, len(small.data), "the index").find_one("none")
    assert small.count == 1


def test_every_flipped_byte_is_noticed_or_changes_nothing() -> None:
    """All bytes of a small index, header and padding included, each with three kinds of flip."""
    rows: list[Row] = [
        ("a", 1, 0, (4, 3), 2),
        ("b", OBJECT * 0, OBJECT, (9,), 1),
        ("c", 5, 0, (), 1),
        ("d", 2, 0, (0,), 1),
    ]
    data = encode(build(rows), {"step": 1, "notes": "x"})
    good = everything(data)
    noticed = 0
    for at in range(len(data)):
        for flip in (0x01, 0x20, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= flip
            try:
                found = everything(bytes(damaged))
            except CorruptCheckpoint:
                noticed += 1
                continue
            assert found == good, f"byte {at} ^ {flip}"
    assert noticed == 3 * len(data)  # every byte is under some digest


@pytest.mark.parametrize("most", [0, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**63 - 1])
def test_narrow_columns_hold_every_number(most: int) -> None:
    """Next to the bounds of each type; and a negative number, which only a forged index has there."""
    for least in (0, -1):
        columns = build([("a", 1, 0, (4, 3), 2)])
        columns.file_size = np.asarray([most, least], "<i8")
        index = open_bytes(encode(columns, {}, narrow=True))
        assert index.column("file_size").tolist() == [most, least]
        assert index.column("file_size").dtype == np.int64


def test_a_narrow_index_is_half_as_large() -> None:
    columns = many(5000)
    wide, narrow = encode(columns, {}), encode(columns, {}, narrow=True)
    assert len(narrow) < 0.6 * len(wide)
    rows = open_bytes(narrow).find(columns.names[5:4000:3])
    assert content(open_bytes(narrow).select(rows)) == content(open_bytes(wide).select(rows))


def test_only_the_version_with_narrow_columns_may_have_them() -> None:
    data = encode(build([("a", 1, 0, (4, 3), 2)]), {}, narrow=True)
    assert everything(reseal(data, lambda header: None)) == everything(data)
    with pytest.raises(CorruptCheckpoint, match="column"):
        everything(reseal(data, lambda header: header["__metadata__"].update(format="holdfast-1")))
    for dtype, name in (("U16", "digests"), ("U16", "names"), ("F32", "position"), ("U64", "offset")):
        with pytest.raises(CorruptCheckpoint, match=f"column '{name}'"):
            everything(reseal(data, entry(name, dtype=dtype)))


def test_every_truncation_and_growth_is_noticed() -> None:
    data = encode(build([("a", 1, 0, (4, 3), 2)]), {})
    for length in range(0, len(data), 3):
        with pytest.raises(CorruptCheckpoint):
            everything(data[:length])
    for extra in (1, 8, 16, 100):
        with pytest.raises(CorruptCheckpoint):
            everything(data + bytes(extra))


def test_a_flip_in_one_page_spares_the_others() -> None:
    columns = many(20_000)
    data = bytearray(encode(columns, {}))
    low, high = place_of(bytes(data), "names")
    data[(low + high) // 2] ^= 1
    index = open_bytes(bytes(data))
    assert index.find_one(columns.names[0]) == 0
    assert index.find_one(columns.names[-1]) == 19_999
    with pytest.raises(CorruptCheckpoint, match=r"Page \d+ of the index does not match its digest"):
        index.find_one(columns.names[10_000])
    with pytest.raises(CorruptCheckpoint, match="Page"):
        index.names()


# -- indexes that lie under right digests --------------------------------------------------------


def lying(change: Any) -> bytes:
    rows: list[Row] = [
        ("a", 1, 0, (4, 3), 2),
        ("b", 0, OBJECT, (9,), 1),
        ("c", 5, 0, (2,), 1),
        ("d", 2, 0, (), 1),
    ]
    columns = build(rows, files=2)
    change(columns)
    return encode(columns, {})


def put(name: str, at: Any, value: Any) -> Any:
    def change(columns: Columns) -> None:
        array = getattr(columns, name).copy()
        array[at] = value
        setattr(columns, name, array)

    return change


def cut(name: str) -> Any:
    return lambda columns: setattr(columns, name, getattr(columns, name)[:-1])


HUGE = 2**63 - 1
LIES: list[tuple[str, Any, str]] = [
    ("names out of order", lambda c: c.names.reverse(), "do not ascend"),
    ("a name twice", lambda c: c.names.__setitem__(1, "a"), "do not ascend"),
    ("unknown dtype", put("dtype", 0, 99), "dtype, kind or number of dimensions"),
    ("unknown kind", put("kind", 0, 7), "dtype, kind or number of dimensions"),
    ("too many dimensions", put("ndim", 0, 40), "dtype, kind or number of dimensions"),
    ("too few dimensions", put("ndim", 0, 1), "impossible shape"),
    ("object of floats", put("kind", 0, OBJECT), "impossible shape"),
    ("negative shape", put("shape", (0, 0), -4), "impossible shape"),
    ("huge shape", put("shape", (0, 0), HUGE), "impossible shape"),
    ("huge object", put("shape", (1, 1), 1 << 60), "impossible shape"),
    ("chunk ends descend", put("chunk_end", 1, 0), "counts chunks that do not ascend"),
    ("chunk end beyond", put("chunk_end", 3, 99), "counts chunks that do not ascend"),
    ("chunk end negative", put("chunk_end", 0, -1), "counts chunks that do not ascend"),
    ("chunk end of -2^63", put("chunk_end", 1, -(2**63)), "counts chunks that do not ascend"),
    ("digest end of -2^63", put("digest_end", 1, -(2**63)), "counts digests that do not ascend"),
    ("digest ends descend", put("digest_end", 1, 0), "counts digests that do not ascend"),
    ("digest end beyond", put("digest_end", 4, 1000), "counts digests that do not ascend"),
    ("digest end huge", put("digest_end", 4, HUGE), "counts digests that do not ascend"),
    ("too many digests", put("block", 0, 1), "too few or too many digests"),
    ("block of nothing", put("block", 0, 0), "outside its file"),
    ("negative block", put("block", 0, -5), "outside its file"),
    ("negative size", put("size", (0, 0), -1), "impossible size"),
    ("huge size", put("size", (0, 0), HUGE), "impossible size"),
    ("huge sizes", put("size", 0, 1 << 40), "impossible size"),
    ("negative file", put("file", 0, -1), "a file that it does not name"),
    ("unnamed file", put("file", 0, 2), "a file that it does not name"),
    ("negative position", put("position", 0, -8), "outside its file"),
    ("position past the end", put("position", 0, 10_000), "outside its file"),
    ("position that overflows", put("position", 0, HUGE), "outside its file"),
    ("same bytes twice", lambda c: put("file", slice(None), 0)(c) or put("position", 1, 68)(c), "same bytes"),
    ("files that disagree", cut("file_size"), "file_size"),
    ("ranks that disagree", cut("file_rank"), "file_rank"),
    ("kinds that disagree", cut("kind"), "kind"),
    ("positions that disagree", cut("position"), "position"),
    ("shapes that disagree", cut("shape"), "shape"),
    ("witnesses that disagree", cut("witness_block"), "witness_block"),
    ("witness of nothing", put("witness_tensor", 0, 99), "witnesses of tensors that it does not list"),
    ("late shard of nothing", put("late_tensor", 0, 99), "late-bound shards that can't be"),
    ("late shard of another", put("late_tensor", 0, 1), "late-bound shards that can't be"),
    ("late axis of nothing", put("late_axis", 0, 9), "late-bound shards that can't be"),
    ("negative late length", put("late_length", 0, -1), "late-bound shards that can't be"),
    ("huge late start", put("late_start", 0, 1 << 60), "late-bound shards that can't be"),
    ("chunk of no late shard", put("chunk_late", 0, 99), "late-bound shards that can't be"),
    ("late columns that disagree", cut("late_axis"), "late_axis"),
    (
        "fingerprints of some chunks",
        lambda c: setattr(c, "fingerprint_first", c.position[1:].astype("<u8")),
        "fingerprint_first",
    ),
    (
        "file above",
        lambda c: c.file_names.__setitem__(0, "../data/x.safetensors"),
        "not inside its data folder",
    ),
    ("absolute file", lambda c: c.file_names.__setitem__(0, "/etc/passwd"), "not inside its data folder"),
    ("file of no name", lambda c: c.file_names.__setitem__(0, ""), "not inside its data folder"),
]


@pytest.mark.parametrize(("change", "words"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_numbers_that_can_not_be_are_corrupt(change: Any, words: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=words):
        everything(lying(change))


def test_the_honest_one_is_read() -> None:
    assert everything(lying(lambda columns: None))


def reseal(data: bytes, edit: Any) -> bytes:
    """Change the JSON header of an index and make its digests right again."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length : -16]
    edit(header)
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    start, stop = header["pages"]["data_offsets"] if "pages" in header else (0, 0)
    raw = len(text).to_bytes(8, "little") + text
    seal = np.asarray([digest(raw), digest_many(np.frombuffer(body[start:stop], "<u8"))], "<u8")
    return raw + body + seal.tobytes()


def entry(name: str, **changes: Any) -> Any:
    return lambda header: header[name].update(changes)


HEADER_LIES: list[tuple[str, Any, str]] = [
    ("another format", lambda h: h["__metadata__"].update(format="holdfast-9"), "'holdfast-9'"),
    ("no format", lambda h: h["__metadata__"].pop("format"), "has format None"),
    ("no about", lambda h: h["__metadata__"].pop("about"), "lacks or garbles 'about'"),
    ("about is no JSON", lambda h: h["__metadata__"].update(about="{"), "lacks or garbles"),
    ("about is a list", lambda h: h["__metadata__"].update(about="[1]"), "not an object"),
    ("about is deep", lambda h: h["__metadata__"].update(about="[" * 100_000), "lacks or garbles"),
    ("dims is text", lambda h: h["__metadata__"].update(dims="x"), "lacks or garbles"),
    ("dims is negative", lambda h: h["__metadata__"].update(dims="-2"), "'dims'"),
    ("dims is zero", lambda h: h["__metadata__"].update(dims="0"), "'dims'"),
    ("dims is huge", lambda h: h["__metadata__"].update(dims=str(1 << 70)), "'dims'"),
    ("dims is wrong", lambda h: h["__metadata__"].update(dims="3"), "column"),
    ("no pages", lambda h: h.pop("pages"), "not an index"),
    ("a column gone", lambda h: h.pop("position"), "'position'"),
    ("dtype column gone", lambda h: h.pop("dtype"), "'dtype'"),
    ("another type", entry("position", dtype="U64"), "column 'position'"),
    ("scalar column", entry("dtype", shape=[]), "lacks or garbles"),
    ("scalar of another", entry("block", shape=[]), "lacks or garbles"),
    ("negative rows", entry("offset", shape=[-5, -2]), "column 'offset'"),
    (
        "nothing times minus five",
        lambda h: h["witness_offset"].update(shape=[0, -5], data_offsets=[0, 0]),
        "column 'witness_offset'",
    ),
    ("a third axis", entry("size", shape=[5, 2, 1]), "column 'size'"),
    ("transposed", entry("size", shape=[2, 5]), "column 'size'"),
    (
        "in the page digests",
        lambda h: h["digests"].update(data_offsets=h["pages"]["data_offsets"], shape=[1]),
        "column 'digests'|digests",
    ),
]


@pytest.mark.parametrize(
    ("edit", "words"), [lie[1:] for lie in HEADER_LIES], ids=[lie[0] for lie in HEADER_LIES]
)
def test_headers_that_can_not_be_are_corrupt(edit: Any, words: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=words):
        everything(reseal(lying(lambda columns: None), edit))


def test_resealing_alone_changes_nothing() -> None:
    data = lying(lambda columns: None)
    assert everything(reseal(data, lambda header: None)) == everything(data)


def test_a_fence_that_lies_is_corrupt() -> None:
    columns = many(3 * FENCE)
    data = bytearray(encode(columns, {}))
    fence, _ = place_of(bytes(data), "fence")
    body_start = read_header(reader(bytes(data)), len(data), "the index").data_start
    pages_low, pages_high = place_of(bytes(data), "pages")
    data[fence + len(columns.names[0])] = ord("z")  # the second name of the fence
    body = bytes(data[body_start:pages_low])
    pages = np.asarray([digest(body[i : i + PAGE]) for i in range(0, len(body), PAGE)], "<u8")
    data[pages_low:pages_high] = pages.tobytes()
    data[-8:] = np.asarray([digest_many(pages)], "<u8").tobytes()
    index = open_bytes(bytes(data))
    with pytest.raises(CorruptCheckpoint, match="fence"):
        index.find_one(columns.names[0])


def test_a_read_that_comes_short_is_corrupt() -> None:
    data = encode(many(5000), {})
    stop = [len(data)]
    index = Index(lambda start, length: data[start : min(start + length, stop[0])], len(data), "the index")
    stop[0] = place_of(data, "names")[0] + 100
    with pytest.raises(CorruptCheckpoint, match="truncated"):
        index.names()


ROWS = st.lists(st.lists(st.integers(-5, 5), max_size=4).map(tuple), max_size=6)


@given(ROWS, st.integers(4, 6), st.integers(0, 1))
def test_pad_and_unpad(values: list[tuple[int, ...]], dims: int, fill: int) -> None:
    padded = pad(values, dims, fill)
    assert padded.shape == (len(values), dims)
    for row, value in zip(padded, values, strict=True):
        assert unpad(row, len(value)) == value
        assert (row[: dims - len(value)] == fill).all()


def test_no_column_is_forgotten_by_these_tests() -> None:
    """`content` must list every field of Columns, or a lost column would go unnoticed."""
    assert len(content(Columns())) == len(dataclasses.fields(Columns))
