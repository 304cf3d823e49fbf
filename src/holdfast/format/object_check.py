"""Looks through an archive of torch.save before torch's weights-only unpickler does.

That unpickler calls nothing but what is allowed, but it builds as much as a pickle says: it decompresses
members, takes tensors from storages that are shorter, hashes keys however deep, and prints what it refuses.
Here the same operations are gone through with nothing built. What torch would hash, copy or print is charged
for: all that it says, shared parts as often as they are said, may be WORTH times as long as the pickle.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.format.archive import Archive, BadArchive
from holdfast.format.known_calls import check_call, check_state
from holdfast.format.limits import OBJECT_BYTES
from holdfast.format.pickle_reader import BadPickle, Global, Reader, Record
from holdfast.layout.tensor import DTYPES

WORTH = 8
"""Parts that a pickle may say for each of its bytes, if parts that are shared count each time."""
SOME = 4_000_000
"""Parts that any pickle may say; it takes a second to look at."""
DEPTH = 1000
"""Containers in containers, of what is to be hashed, copied or printed: Python's own limit of recursion."""
_ITEMSIZE = {  # bytes an element, by the names of storages; of others a byte is taken
    "DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2,
    "LongStorage": 8, "IntStorage": 4, "ShortStorage": 2,
    "ComplexFloatStorage": 8, "ComplexDoubleStorage": 16, "QInt32Storage": 4,
}  # fmt: skip
_ITEMSIZE |= {dtype.name: dtype.size for dtype in DTYPES}


def check(data: bytes) -> None:
    """Raise BadArchive or BadPickle if torch should not see this."""
    archive = Archive(lambda start, length: data[start : start + length], 0, len(data))
    _Check(archive, archive.load("data.pkl", OBJECT_BYTES)).read()


class _Check(Reader):
    """Goes through `data.pkl`. A dict's items are kept in their order, by number: no key is hashed."""

    def __init__(self, archive: Archive, data: bytes) -> None:
        super().__init__(data)
        self._archive = archive
        self._left = SOME + WORTH * len(data)
        self._hashes: dict[int, tuple[object, dict[int, int]]] = {}
        """How many keys of each hash a dict has, by the dict's identity, with the dict so that it keeps
        it."""

    def resolve(self, module: str, name: str) -> Global:
        return Global(module, name)  # torch decides

    def call(self, kind: object, args: object) -> object:
        if not isinstance(kind, Global) or not isinstance(args, tuple):
            return super().call(kind, args)  # which refuses it
        self._charge(args)
        check_call(kind, args)
        # torch writes one for each state dict, and for the hooks of each tensor. As a dict its items are
        # kept, and charged for where it is used again.
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
        """A storage, if the archive has all of it."""
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
        """Charge for hashing a key, and for the keys of its dict that it will be compared with."""
        # First: it refuses what is nested too deep. hash() recurses in C, and would end the process.
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
        """Charge for everything that is in a value, as often as it is there."""
        # Level by level, not by recursion: how deep it is, the file says.
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
    """What is in a value; text and bytes as they are."""
    if isinstance(value, dict):
        return [part for pair in value.values() for part in pair]
    if isinstance(value, Record):
        return value.args, value.state
    return value if isinstance(value, tuple | list | str | bytes) else ()
