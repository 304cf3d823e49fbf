"""Read the archives of torch.save: zip files with uncompressed members, so a tensor's elements are
contiguous.

An archive consists of members, each a local header and its bytes; the directory, one entry per member; and
end records, which give the directory's position. All numbers are little-endian. A reader begins at the end.

The reader accepts only what torch writes. It refuses:
- a directory that does not lie directly before the end records, or end records that disagree;
- members that are compressed, share a name (ignoring case), or are together longer than the archive.

So an archive has one meaning: torch's reader finds the same members, and no member is larger in memory than
on disk. `zipfile` accepts more (bytes before the first member, end records that disagree). In such files it
finds other members than torch's reader.

Source: torch/csrc's inline_container (PyTorch 1.6 to 2.13), PKWARE's APPNOTE.TXT 6.3.10, whose section
numbers the comments cite.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from holdfast._core.format.container import Read

DIRECTORY_BYTES = 128 << 20
"""Limit of a directory, which is read whole: enough for a million members."""
_TAIL = 4096
"""Bytes read at once from the end. In a small archive they include the whole directory."""
_LOCAL_BYTES, _ENTRY_BYTES, _END_BYTES, _LOCATOR_BYTES, _END64_BYTES = 30, 46, 22, 20, 56
"""Sizes of the records, without names, extra fields and comments."""
_LOCAL, _ENTRY = b"PK\x03\x04", b"PK\x01\x02"
_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_WIDE = 0xFFFFFFFF
"""Placeholder for a number that does not fit into 32 bits; the number is in the zip64 extra field."""
_EntryFields = struct.Struct("<4s6xH4xIIIHHH8xI")
"""4.3.12: signature, method, crc, packed and unpacked size, lengths of name, extra and comment, offset."""


class BadArchive(ValueError):
    """An archive is damaged, or torch did not write it. The message says why."""


class Member(NamedTuple):
    """A file in an archive. `local` is the position of its local header."""

    local: int
    nbytes: int
    crc: int
    """0 where none was computed (`torch.serialization.set_crc32_options(False)`)."""


class Archive:
    """An archive of `length` bytes, at position `start` of the file that `read` reads.

    `members` maps full names to members; `folder` is the folder that torch puts all of them into. Raises
    BadArchive if torch would not write such an archive.
    """

    def __init__(self, read: Read, start: int, length: int) -> None:
        self._read, self._start, self.length = read, start, length
        self._tail = read(start + max(length - _TAIL, 0), min(length, _TAIL))
        if len(self._tail) != min(length, _TAIL):
            raise BadArchive("it ends too early")
        self._directory, self.members = self._list()
        self.folder = next(iter(self.members)).partition("/")[0]

    def find(self, name: str) -> Member:
        """Return a member by its name inside the archive's folder."""
        try:
            return self.members[f"{self.folder}/{name}"]
        except KeyError:
            raise BadArchive(f"it has no {name[:200]!r}") from None

    def content(self, member: Member) -> int:
        """Return the position of a member's bytes in the file that `read` reads."""
        head = self._bytes(member.local, _LOCAL_BYTES)
        if head[:4] != _LOCAL:
            raise BadArchive("a member is not where its directory says")
        # 4.3.7: the lengths of the name and of the extra field, which torch uses to align the bytes. The rest
        # of the local header is ignored: the directory repeats it, and torch's reader uses the directory.
        begin: int = member.local + _LOCAL_BYTES + sum(struct.unpack_from("<HH", head, 26))
        if begin + member.nbytes > self._directory:
            raise BadArchive("a member overlaps its directory")
        return self._start + begin

    def load(self, name: str, limit: int) -> bytes:
        """Read a whole small member, and check its CRC."""
        member = self.find(name)
        if member.nbytes > limit:
            raise BadArchive(f"its {name} has {member.nbytes} bytes, more than {limit}")
        data = self._read(self.content(member), member.nbytes)
        if len(data) != member.nbytes or member.crc not in (0, zlib.crc32(data)):
            raise BadArchive(f"its {name} is not what was written")
        return data

    def damaged(self) -> str | None:
        """Return the name of the first member whose bytes do not match their CRC, or None."""
        for name, member in self.members.items():
            data = self._read(self.content(member), member.nbytes)
            if member.crc not in (0, zlib.crc32(data)):
                return name
        return None

    def _bytes(self, position: int, size: int) -> bytes:
        """Return bytes of the archive, usually from the part that was read with its end."""
        place = position - (self.length - len(self._tail))
        if place >= 0:
            return self._tail[place : place + size]
        return self._read(self._start + position, size) if position >= 0 else b""

    def _list(self) -> tuple[int, dict[str, Member]]:
        """Return the position of the directory, and the members that it lists."""
        count, size, begin = self._end()
        # An entry has a minimum size, so the bytes that exist bound the loop below, not a stored count.
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
            # With overlapping members a small archive could expand to a large one.
            room += member.nbytes + _LOCAL_BYTES
            members[name] = member
            known.add(name.lower())  # torch's reader ignores case
        if offset != size or len(known) != count or room > begin:
            raise BadArchive("its directory lists members that can't all be there")
        return begin, members

    def _end(self) -> tuple[int, int, int]:
        """Return (members, bytes, position) of the directory, from the records that end an archive."""
        record_start = self.length - _END_BYTES
        record = self._bytes(record_start, _END_BYTES)
        # 4.3.16; the last two bytes are the length of a comment, which could contain another end record.
        if len(record) != _END_BYTES or record[:4] != _END or record[20:] != b"\0\0":
            raise BadArchive("no zip archive ends there")
        count, size, begin = struct.unpack_from("<HII", record, 10)
        locator = self._bytes(record_start - _LOCATOR_BYTES, _LOCATOR_BYTES)
        if locator[:4] == _LOCATOR:  # 4.3.15: then a record with 64-bit numbers (4.3.14) is valid instead
            record_start -= _LOCATOR_BYTES + _END64_BYTES
            record = self._bytes(record_start, _END64_BYTES)
            stated = struct.unpack_from("<Q", locator, 8)[0]
            if len(record) != _END64_BYTES or record[:4] != _END64 or stated != record_start:
                raise BadArchive("the records at its end do not agree")
            count, size, begin = struct.unpack_from("<QQQ", record, 32)
        # Bytes before the first member move the end records, but not the positions in them. zipfile corrects
        # for that; this reader refuses it.
        if begin + size != record_start:
            raise BadArchive("its directory is not at its end")
        return count, size, begin


def _entry(listing: bytes, offset: int) -> tuple[str, Member, int]:
    """Return a directory entry's name, its member, and the offset of the next entry."""
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
    """Replace placeholders by the 64-bit numbers of extra field 1 (4.5.3), which lists only these, in
    order."""
    offset = 0
    while offset + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, offset)
        if kind == 1:
            fields = list(struct.unpack_from(f"<{size // 8}Q", extra, offset + 4))
            return tuple(fields.pop(0) if value == _WIDE and fields else value for value in values)
        offset += 4 + size
    return values
