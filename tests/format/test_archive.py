"""Archives of torch.save: read as torch writes them, and in no other way."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast._core.format.archive import Archive, BadArchive


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def opened(data: bytes, before: bytes = b"") -> Archive:
    whole = before + data + b"what comes after"
    return Archive(lambda at, length: whole[at : at + length], len(before), len(data))


VALUE = {"a": torch.arange(5000.0), "b": [torch.zeros(0), torch.ones(3, dtype=torch.int8)], "c": "text"}


@pytest.mark.parametrize("before", [0, 1, 12345])
@pytest.mark.parametrize("count", [0, 3, 200])
def test_members_are_where_zipfile_finds_them(count: int, before: int) -> None:
    data = saved(VALUE | {str(at): torch.full((at,), 1.0) for at in range(count)})
    found = opened(data, b"x" * before)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert list(found.members) == archive.namelist()
        for name, member in found.members.items():
            start = found.content(member) - before
            assert data[start : start + member.nbytes] == archive.read(name)
            assert member.crc == archive.getinfo(name).CRC
    assert found.damaged() is None


def test_a_member_over_4_gib_has_its_numbers_in_an_extra_field() -> None:
    """As torch writes it, but that the numbers are small."""
    data = saved(VALUE)
    begin, at = directory(data)
    named, _, _ = struct.unpack_from("<HHH", data, at + 28)
    local, size = struct.unpack_from("<I", data, at + 42)[0], struct.unpack_from("<I", data, at + 24)[0]
    entry = bytearray(data[at : at + 46 + named])
    struct.pack_into("<II", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<H", entry, 30, 36)
    struct.pack_into("<I", entry, 42, 0xFFFFFFFF)
    extra = struct.pack("<HHI", 7, 4, 0) + struct.pack("<HHQQQ", 1, 24, size, size, local)
    changed = data[:at] + bytes(entry) + extra + data[at + 46 + named : -98]
    place, length = len(changed), len(changed) - begin
    record = data[-98:-42][:40] + struct.pack("<QQ", length, begin)
    locator = data[-42:-34] + struct.pack("<Q", place) + data[-26:-22]
    changed += record + locator + data[-22:-10] + struct.pack("<II", length, begin) + b"\0\0"
    assert opened(changed).members == opened(data).members


def directory(data: bytes) -> tuple[int, int]:
    """Where the directory begins, and its entry of the largest member."""
    begin = struct.unpack_from("<I", data, len(data) - 6)[0]
    return begin, data.index(b"PK\x01\x02", data.index(b"archive/byteorder", begin))


def test_a_flipped_bit_in_a_member_is_found() -> None:
    data = bytearray(saved(VALUE))
    member = opened(bytes(data)).find("data/0")
    data[opened(bytes(data)).content(member) + 77] ^= 4
    assert opened(bytes(data)).damaged() == "archive/data/0"
    with pytest.raises(BadArchive, match="is not what was written"):
        opened(bytes(data)).load("data/0", 1 << 20)


def rezipped(**kind: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **kind) as archive:
        archive.writestr("a/data.pkl", b"x" * 1000)
        archive.writestr("a/data/0", b"y" * 1000)
    return buffer.getvalue()


def commented() -> bytes:
    buffer = io.BytesIO(rezipped())
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = b"a comment"
    return buffer.getvalue()


def patched(at: int, code: str, *values: int) -> Callable[[], bytes]:
    """An archive of torch with other numbers at a place that is counted from its end."""

    def build() -> bytes:
        data = bytearray(saved(VALUE))
        struct.pack_into(code, data, len(data) + at, *values)
        return bytes(data)

    return build


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: b"", "no zip archive"),
        (lambda: b"garbage" * 100, "no zip archive"),
        (lambda: saved(VALUE)[:-1], "no zip archive"),
        (lambda: saved(VALUE) + b"\0", "no zip archive"),
        (commented, "no zip archive"),
        (lambda: rezipped(compression=zipfile.ZIP_DEFLATED), "'a/data.pkl' is compressed"),
        (lambda: b"before" + rezipped(), "not at its end"),
        (patched(-34, "<Q", 5), "do not agree"),
        (patched(-98, "<I", 0), "do not agree"),
        (patched(-50, "<Q", 5), "not at its end"),
        (patched(-66, "<Q", 1 << 60), "members in"),
        (patched(-66, "<Q", 1), "can't all be there"),
        (patched(-66, "<Q", 0), "0 members"),
        (lambda: saved(VALUE).replace(b"PK\x01\x02", b"PK\x01\x03"), "directory is damaged"),
    ],
)  # fmt: skip
def test_what_torch_does_not_write_is_refused(build: Callable[[], bytes], words: str) -> None:
    with pytest.raises(BadArchive, match=words):
        opened(build())


@pytest.mark.parametrize("name", [b"a/data/0", b"a/DATA/0"])
def test_names_that_torch_takes_for_one_are_refused(name: bytes) -> None:
    """Its reader does not tell case apart; zipfile does, and takes the last of two that are equal."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/data/0", b"first")
        archive.writestr("a/other0", b"second")
    with pytest.raises(BadArchive, match="can't all be there"):
        opened(buffer.getvalue().replace(b"a/other0", name))


def test_a_member_that_reaches_into_the_directory_is_refused() -> None:
    data = bytearray(rezipped())
    begin = data.rindex(b"PK\x03\x04")
    struct.pack_into("<H", data, begin + 28, 60_000)
    archive = opened(bytes(data))
    with pytest.raises(BadArchive, match="overlaps its directory"):
        archive.content(archive.find("data/0"))
