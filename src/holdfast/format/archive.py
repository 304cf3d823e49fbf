"""The archives of torch.save: zip files whose members are stored as they are, so a tensor's elements lie in
one piece.

An archive is: members, each a local header and its bytes; the directory, an entry a member; end records,
which say where the directory is. All numbers are little-endian. A reader begins at the end.

Read by hand, and only as torch writes them. Refused is what torch does not write:
- a directory that is not the last thing before the end records, or end records that disagree;
- members that are compressed, share a name (also in another case), or are together longer than the archive.

So there is one way to read an archive, torch's reader finds the same members, and nothing can grow when it is
read. `zipfile` takes more (bytes before the first member, end records that disagree), in which it and torch's
reader find different members.

Source: torch/csrc's inline_container (PyTorch 1.6 to 2.13), PKWARE's APPNOTE.TXT 6.3.10, whose sections the
comments name.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from holdfast.format.container import Read

DIRECTORY_BYTES = 128 << 20
"""Of a directory, which is read whole: an archive with a million members has as much."""
_TAIL = 4096
"""Bytes that are read at once from the end: of a small archive that is all of the directory."""
_LOCAL_BYTES, _ENTRY_BYTES, _END_BYTES, _LOCATOR_BYTES, _END64_BYTES = 30, 46, 22, 20, 56
"""Of records, without names, extra fields and comments."""
_LOCAL, _ENTRY = b"PK\x03\x04", b"PK\x01\x02"
_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_WIDE = 0xFFFFFFFF
"""Stands where a number does not fit into 32 bits: it is in the zip64 extra field."""
_EntryFields = struct.Struct("<4s6xH4xIIIHHH8xI")
"""4.3.12: signature, method, crc, packed and unpacked size, lengths of name, extra and comment, offset."""


class BadArchive(ValueError):
    """What is wrong with an archive."""


class Member(NamedTuple):
    """A file in an archive. `local` is where its own header begins."""

    local: int
    nbytes: int
    crc: int
    """0 where none was computed (`torch.serialization.set_crc32_options(False)`)."""


class Archive:
    """An archive that begins at `start` of what `read` reads, and has `length` bytes.

    `members` are by their full names; `folder` is the one that torch puts all of them into. Raises BadArchive
    for what torch would not write.
    """

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
        head = self._bytes(member.local, _LOCAL_BYTES)
        if head[:4] != _LOCAL:
            raise BadArchive("a member is not where its directory says")
        # 4.3.7: the lengths of the name and of the extra field, with which torch aligns the bytes. Nothing
        # else of the local header counts: the directory says it, too, and torch's reader believes the
        # directory.
        begin: int = member.local + _LOCAL_BYTES + sum(struct.unpack_from("<HH", head, 26))
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

    def _bytes(self, position: int, size: int) -> bytes:
        """Bytes of the archive; mostly they were read with its end."""
        place = position - (self.length - len(self._tail))
        if place >= 0:
            return self._tail[place : place + size]
        return self._read(self._start + position, size) if position >= 0 else b""

    def _list(self) -> tuple[int, dict[str, Member]]:
        """Where the directory begins, and the members that it lists."""
        count, size, begin = self._end()
        # An entry has at least so many bytes, so the loop below is bounded by what is there, not by a number.
        if size > DIRECTORY_BYTES or not 0 < count <= size // _ENTRY_BYTES:
            raise BadArchive(f"its directory says {count} members in {size} bytes")
        listing = self._bytes(begin, size)
        members: dict[str, Member] = {}
        known: set[str] = set()
        offset = room = 0
        for _ in range(count):
            try:
                name, member, offset = _entry(listing, offset)
            except struct.error:
                raise BadArchive("its directory ends too early") from None
            # Members that overlap would let a small file be read as a large one, over and over.
            room += member.nbytes + _LOCAL_BYTES
            members[name] = member
            known.add(name.lower())  # torch's reader looks for names without regard to case
        if offset != size or len(known) != count or room > begin:
            raise BadArchive("its directory lists members that can't all be there")
        return begin, members

    def _end(self) -> tuple[int, int, int]:
        """Members, bytes and begin of the directory, from the records that end an archive."""
        record_start = self.length - _END_BYTES
        record = self._bytes(record_start, _END_BYTES)
        # 4.3.16; the last two bytes are the length of a comment, in which another end record could hide.
        if len(record) != _END_BYTES or record[:4] != _END or record[20:] != b"\0\0":
            raise BadArchive("no zip archive ends there")
        count, size, begin = struct.unpack_from("<HII", record, 10)
        locator = self._bytes(record_start - _LOCATOR_BYTES, _LOCATOR_BYTES)
        if locator[:4] == _LOCATOR:  # 4.3.15: there is a record with wide numbers (4.3.14), which count
            record_start -= _LOCATOR_BYTES + _END64_BYTES
            record = self._bytes(record_start, _END64_BYTES)
            stated = struct.unpack_from("<Q", locator, 8)[0]
            if len(record) != _END64_BYTES or record[:4] != _END64 or stated != record_start:
                raise BadArchive("the records at its end do not agree")
            count, size, begin = struct.unpack_from("<QQQ", record, 32)
        # Bytes before the first member move the end, but not the numbers in it. zipfile makes up for them;
        # here they are refused.
        if begin + size != record_start:
            raise BadArchive("its directory is not at its end")
        return count, size, begin


def _entry(listing: bytes, offset: int) -> tuple[str, Member, int]:
    """An entry of a directory, and where the next begins."""
    mark, method, crc, packed, nbytes, named, more, comment, local = _EntryFields.unpack_from(listing, offset)
    if mark != _ENTRY:
        raise BadArchive("its directory is damaged")
    start = offset + _ENTRY_BYTES
    name = listing[start : start + named].decode("utf-8", "surrogateescape")
    if _WIDE in (packed, nbytes, local):
        extra = listing[start + named : start + named + more]
        nbytes, packed, local = _wide(extra, (nbytes, packed, local))
    if method != 0 or packed != nbytes:
        raise BadArchive(f"its member {name[:200]!r} is compressed")
    return name, Member(local, nbytes, crc), start + named + more + comment


def _wide(extra: bytes, values: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers over 4 GiB: 4.5.3, they stand in extra field 1 of the entry, in this order, and only they."""
    offset = 0
    while offset + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, offset)
        if kind == 1:
            fields = list(struct.unpack_from(f"<{size // 8}Q", extra, offset + 4))
            return tuple(fields.pop(0) if value == _WIDE and fields else value for value in values)
        offset += 4 + size
    return values
