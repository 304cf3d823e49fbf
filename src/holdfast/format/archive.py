"""The archives of torch.save: zip files whose members are stored as they are, so a tensor's elements lie in
one piece.

Read by hand, and only as torch writes them: the directory is the last thing but for its end records, which
agree, its members are not compressed, do not share a name and are together no longer than the archive. So
there is one way to read one, torch's reader finds the same members, and nothing can grow when it is read.
`zipfile` takes more (bytes before the first member, end records that disagree), in which it and torch's
reader find different members.

Source: torch/csrc's inline_container (PyTorch 1.6 to 2.13), PKWARE's APPNOTE.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from holdfast.format.container import Read

DIRECTORY_BYTES = 128 << 20
"""Of an archive with a million members."""
_TAIL = 4096
_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_WIDE = 0xFFFFFFFF
_EntryFields = struct.Struct("<4s6xH4xIIIHHH8xI")


class BadArchive(ValueError):
    """What is wrong with an archive."""


class Member(NamedTuple):
    """A file in an archive. `local` is where its own header begins."""

    local: int
    nbytes: int
    crc: int
    """0 where none was computed (`torch.serialization.set_crc32_options(False)`)."""


class Archive:
    """An archive that begins at `start` of what `read` reads, and has `length` bytes."""

    def __init__(self, read: Read, start: int, length: int) -> None:
        self._read, self._start, self.length = read, start, length
        self._tail = read(start + max(length - _TAIL, 0), min(length, _TAIL))
        if len(self._tail) != min(length, _TAIL):
            raise BadArchive("it ends too early")
        self._directory, self.members = self._list()
        self.folder = next(iter(self.members)).partition("/")[0]

    def find(self, name: str) -> Member:
        """A member by its name inside the archive's folder."""
        try:
            return self.members[f"{self.folder}/{name}"]
        except KeyError:
            raise BadArchive(f"it has no {name[:200]!r}") from None

    def content(self, member: Member) -> int:
        """Where a member's bytes begin, as `read` counts."""
        head = self._bytes(member.local, 30)
        if head[:4] != b"PK\x03\x04":
            raise BadArchive("a member is not where its directory says")
        begin: int = member.local + 30 + sum(struct.unpack_from("<HH", head, 26))
        if begin + member.nbytes > self._directory:
            raise BadArchive("a member overlaps its directory")
        return self._start + begin

    def load(self, name: str, limit: int) -> bytes:
        """All of a small member, if its CRC is right."""
        member = self.find(name)
        if member.nbytes > limit:
            raise BadArchive(f"its {name} has {member.nbytes} bytes, more than {limit}")
        data = self._read(self.content(member), member.nbytes)
        if len(data) != member.nbytes or member.crc not in (0, zlib.crc32(data)):
            raise BadArchive(f"its {name} is not what was written")
        return data

    def damaged(self) -> str | None:
        """The first member whose bytes do not match their CRC."""
        for name, member in self.members.items():
            data = self._read(self.content(member), member.nbytes)
            if member.crc not in (0, zlib.crc32(data)):
                return name
        return None

    def _bytes(self, at: int, size: int) -> bytes:
        """Bytes of the archive; mostly they were read with its end."""
        place = at - (self.length - len(self._tail))
        if place >= 0:
            return self._tail[place : place + size]
        return self._read(self._start + at, size) if at >= 0 else b""

    def _list(self) -> tuple[int, dict[str, Member]]:
        """Where the directory begins, and the members that it lists."""
        count, size, begin = self._end()
        if size > DIRECTORY_BYTES or not 0 < count <= size // 46:
            raise BadArchive(f"its directory says {count} members in {size} bytes")
        listing = self._bytes(begin, size)
        members: dict[str, Member] = {}
        known: set[str] = set()
        at = room = 0
        for _ in range(count):
            try:
                name, member, at = _entry(listing, at)
            except struct.error:
                raise BadArchive("its directory ends too early") from None
            room += member.nbytes + 30
            members[name] = member
            known.add(name.lower())
        if at != size or len(known) != count or room > begin:
            raise BadArchive("its directory lists members that can't all be there")
        return begin, members

    def _end(self) -> tuple[int, int, int]:
        """Members, bytes and begin of the directory, from the records that end an archive."""
        at = self.length - 22
        record = self._bytes(at, 22)
        if len(record) != 22 or record[:4] != _END or record[20:] != b"\0\0":
            raise BadArchive("no zip archive ends there")
        count, size, begin = struct.unpack_from("<HII", record, 10)
        locator = self._bytes(at - 20, 20)
        if locator[:4] == _LOCATOR:
            at -= 76
            record = self._bytes(at, 56)
            if len(record) != 56 or record[:4] != _END64 or struct.unpack_from("<Q", locator, 8)[0] != at:
                raise BadArchive("the records at its end do not agree")
            count, size, begin = struct.unpack_from("<QQQ", record, 32)
        if begin + size != at:
            raise BadArchive("its directory is not at its end")
        return count, size, begin


def _entry(listing: bytes, at: int) -> tuple[str, Member, int]:
    """An entry of a directory, and where the next begins."""
    mark, method, crc, packed, nbytes, named, more, comment, local = _EntryFields.unpack_from(listing, at)
    if mark != b"PK\x01\x02":
        raise BadArchive("its directory is damaged")
    start = at + 46
    name = listing[start : start + named].decode("utf-8", "surrogateescape")
    if _WIDE in (packed, nbytes, local):
        extra = listing[start + named : start + named + more]
        nbytes, packed, local = _wide(extra, (nbytes, packed, local))
    if method != 0 or packed != nbytes:
        raise BadArchive(f"its member {name[:200]!r} is compressed")
    return name, Member(local, nbytes, crc), start + named + more + comment


def _wide(extra: bytes, values: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers over 4 GiB stand in an extra field of the entry, in this order."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            fields = list(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            return tuple(fields.pop(0) if value == _WIDE and fields else value for value in values)
        at += 4 + size
    return values
