"""Check an archive of torch.save before torch's weights-only unpickler reads it.

That unpickler calls only what is allowed, but it builds as much as a pickle asks for: it decompresses
members, takes tensors from storages that are too short, hashes keys of any depth, and prints what it refuses.
This module executes the same opcodes without building anything. It counts the parts that torch would hash,
copy or print, shared parts each time they occur. Their number may be at most WORTH times the length of the
pickle.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.format.archive import Archive, BadArchive
from holdfast.format.known_calls import check_call, check_state
from holdfast.format.limits import OBJECT_BYTES
from holdfast.format.pickle_reader import BadPickle, Global, Reader, Record
from holdfast.layout.tensor import DTYPES

WORTH = 8
"""Parts that a pickle may use per byte of its length; a shared part counts each time."""
SOME = 4_000_000
"""Parts that any pickle may use; counting them takes a second."""
DEPTH = 1000
"""Nesting of containers that are hashed, copied or printed: Python's own recursion limit."""
_ITEMSIZE = {  # bytes per element, by the names of storages; 1 for others
    "DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2,
    "LongStorage": 8, "IntStorage": 4, "ShortStorage": 2,
    "ComplexFloatStorage": 8, "ComplexDoubleStorage": 16, "QInt32Storage": 4,
}  # fmt: skip
_ITEMSIZE |= {dtype.name: dtype.size for dtype in DTYPES}


def check(data: bytes) -> None:
    """Raise BadArchive or BadPickle if torch must not read this."""
    archive = Archive(lambda start, length: data[start : start + length], 0, len(data))
    _Check(archive, archive.load("data.pkl", OBJECT_BYTES)).read()


class _Check(Reader):
    """Reads `data.pkl`. A dict's items are kept under their number, so that no key is hashed."""

    def __init__(self, archive: Archive, data: bytes) -> None:
        super().__init__(data)
        self._archive = archive
        self._left = SOME + WORTH * len(data)
        self._hashes: dict[int, tuple[object, dict[int, int]]] = {}
        """By `id` of a dict: the dict, which keeps the `id` unique, and its number of keys per hash."""

    def resolve(self, module: str, name: str) -> Global:
        return Global(module, name)  # torch decides

    def call(self, kind: object, args: object) -> object:
        if not isinstance(kind, Global) or not isinstance(args, tuple):
            return super().call(kind, args)  # which refuses it
        self._charge(args)
        check_call(kind, args)
        # torch writes an OrderedDict for each state dict, and for the hooks of each tensor. As a dict, its
        # items are kept, and charged for wherever it is used again.
        is_ordered_dict = (kind.module, kind.name) == ("collections", "OrderedDict")
        return {} if is_ordered_dict and not args else Record(kind, args)

    def build(self, target: object, state: object) -> None:
        self._charge(state)
        if isinstance(target, Record):
            check_state(target, state)
        super().build(target, state)

    def put(self, target: object, items: list[object]) -> None:
        if not isinstance(target, dict | Record) or len(items) % 2:
            raise BadPickle("it puts items into what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                self._key(target, key)
            if type(target) is dict:
                target[len(target)] = (key, value)

    def persistent(self, about: object) -> Record:
        """Return a storage, if the archive contains all of it."""
        kinds = (str, Global, str, str, int)
        if type(about) is not tuple or len(about) != 5 or tuple(map(type, about)) != kinds:
            raise BadPickle("it refers to a storage by what is none")
        _, kind, key, _, count = about
        if count:
            stored = self._archive.find(f"data/{key}").nbytes
            if not 0 < count * _ITEMSIZE.get(kind.name, 1) <= stored:
                raise BadArchive(f"its storage {key[:200]!r} has {stored} bytes, fewer than {count} elements")
        return Record(kind, ())

    def _key(self, target: object, key: object) -> None:
        """Charge for hashing a key, and for comparing it with the keys of equal hash in its dict."""
        # Before hash(), which recurses in C: deep nesting, refused here, would crash the process.
        self._charge(key)
        try:
            hashed = hash(key)
        except TypeError:
            raise BadPickle("a key in it can't be one") from None
        _, counts = self._hashes.setdefault(id(target), (target, {}))
        counts[hashed] = counts.get(hashed, 0) + 1
        self._spend(counts[hashed])

    def _spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise BadPickle("it says more than its length can pay for, by sharing or nesting its parts")

    def _charge(self, value: object) -> None:
        """Charge for all parts of a value, each time they occur."""
        # Level by level, not by recursion, because the file determines the depth.
        level = [value]
        for _ in range(DEPTH):
            below: list[object] = []
            for item in level:
                parts = _parts(item)
                self._spend(1 + len(parts))
                if not isinstance(parts, str | bytes):
                    below.extend(parts)
            if not below:
                return
            level = below
        raise BadPickle(f"it is nested more than {DEPTH} deep")


def _parts(value: object) -> Sequence[object]:
    """Return the direct parts of a value; text and bytes unchanged."""
    if isinstance(value, dict):
        return [part for pair in value.values() for part in pair]
    if isinstance(value, Record):
        return value.args, value.state
    return value if isinstance(value, tuple | list | str | bytes) else ()
