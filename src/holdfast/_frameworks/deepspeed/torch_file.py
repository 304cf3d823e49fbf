"""A file of torch.save: values are read as plain values, tensors as locations in the file.

Nothing is imported, called or unpickled: an instance of any class becomes an inert `Record`, and the elements
of tensors are read only on demand.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import cached_property

from holdfast._core.format.archive import Archive, BadArchive
from holdfast._core.format.limits import METADATA_BYTES, bounded_memory
from holdfast._core.format.pickle_reader import BadPickle, Global, first
from holdfast._core.format.tensor_archive import STORAGES, PickledTensor, TensorPickle, locate_in
from holdfast._core.layout.tensor import CODE_OF, DTYPES
from holdfast._core.store.base import Store
from holdfast.errors import CorruptCheckpoint

_STEP = 16 << 20
"""Bytes that `check` reads at once."""


class DtypeName(str):
    """The name of a dtype in a pickle; a class of its own, to tell it from stored text."""


class TorchFileTensor:
    """A tensor of a `TorchFile`."""

    def __init__(self, file: TorchFile, tensor: PickledTensor) -> None:
        self._file, self._tensor = file, tensor
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.numel = math.prod(tensor.shape)

    @cached_property
    def size(self) -> int:
        """Bytes of its elements."""
        return self.numel * self._itemsize

    @cached_property
    def _itemsize(self) -> int:
        if self.dtype not in CODE_OF:
            raise CorruptCheckpoint(f"{self._file.where} has a tensor of {self.dtype}, which is no dtype.")
        return DTYPES[CODE_OF[self.dtype]].size

    @cached_property
    def _position(self) -> int:
        archive = self._file.archive
        try:
            return locate_in(archive, self._tensor, self.shape, self.dtype, self._itemsize).position
        except BadArchive as error:
            raise CorruptCheckpoint(f"A tensor of {self._file.where} can't be read: {error}.") from None

    def locate(self) -> int:
        """Return the position of its first byte in the file. Raises CorruptCheckpoint if its elements exceed
        the file, or are not row-major."""
        return self._position

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with its bytes, row-major. Raises CorruptCheckpoint if there are fewer."""
        wanted = sum(map(len, buffers))
        there = start + wanted <= self.size
        if not there or self._file.reader.read_into(self.locate() + start, buffers) != wanted:
            raise CorruptCheckpoint(
                f"{self._file.where} has a tensor of {self.numel} elements where more are expected."
            )


class TorchFile:
    """An open file of torch.save. `value` is the saved value."""

    def __init__(self, store: Store, name: str) -> None:
        """Raises NotFound, StorageError; CorruptCheckpoint if it can't be read."""
        self.where = f"{store.url}/{name}"
        self.reader = store.open(name)
        try:
            with bounded_memory(self.where):
                self.archive = Archive(self.reader.read, 0, self.reader.size)
                self.value = _Values(self.archive.load("data.pkl", METADATA_BYTES), self).read()
        except (BadArchive, BadPickle) as error:
            self.close()
            raise CorruptCheckpoint(f"{self.where} can't be read: {error}.") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.reader.close()

    def check(self) -> None:
        """Raise CorruptCheckpoint if some member's bytes do not match their CRC."""
        for name, member in self.archive.members.items():
            try:
                position, crc = self.archive.content(member), 0
            except BadArchive as error:
                raise CorruptCheckpoint(f"{self.where} is damaged: {error}.") from None
            for start in range(0, member.nbytes, _STEP):
                data = self.reader.read(position + start, min(_STEP, member.nbytes - start))
                crc = zlib.crc32(data, crc)
            if member.crc not in (0, crc):
                raise CorruptCheckpoint(f"{self.where} is damaged: its {name} does not match its CRC-32.")


class _Values(TensorPickle):
    """Reads a pickle of any values. Names of classes stay names."""

    def __init__(self, data: bytes, file: TorchFile) -> None:
        super().__init__(data)
        self._file = file

    def resolve(self, module: str, name: str) -> object:
        if (module, name) in _MADE:
            return Global(module, name, _MADE[module, name])
        try:
            known = super().resolve(module, name)
        except BadPickle:
            return Global(module, name)
        return DtypeName(known) if isinstance(known, str) and name not in STORAGES else known

    def call(self, kind: object, args: object) -> object:
        made = super().call(kind, args)
        return TorchFileTensor(self._file, made) if type(made) is PickledTensor else made


def _of_type(args: tuple[object, ...]) -> object:
    """Return the tensor of a call of `_rebuild_from_type_v2` (function, type, arguments, attributes)."""
    made, _, inner, *_ = args if len(args) == 4 else (None,) * 4
    if type(made) is not Global or made.make in (None, _of_type) or type(inner) is not tuple:
        raise BadPickle("it makes a tensor of other values")
    assert made.make is not None
    return made.make(inner)


_MADE = {("torch", "Size"): first, ("torch._tensor", "_rebuild_from_type_v2"): _of_type}
