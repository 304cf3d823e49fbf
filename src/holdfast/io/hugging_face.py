"""A folder of the Hugging Face hub as a source of loads."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from functools import cached_property
from threading import Lock
from typing import Any

import msgspec
import numpy as np

from holdfast.errors import CorruptCheckpoint
from holdfast.format import hugging_face as hf
from holdfast.format.columns import ITEMSIZE, Array, Columns
from holdfast.format.container import read_header
from holdfast.format.digest import digest, hex_digest
from holdfast.format.limits import bounded_memory, check_size
from holdfast.io.small_files import read_file
from holdfast.layout.tensor import Dims
from holdfast.store.base import Store
from holdfast.views.family import View, families, view_of

SMALL = 1 << 30
"""Limit of a tensor that is read whole, such as scales: one per 16,384 elements."""


class PublishedModel(ABC):
    """A published model, complete or in part, and its configuration."""

    where: str

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read_as: dict[str, Dims] = {}

    @abstractmethod
    def place(self, name: str) -> hf.Place | None:
        """Return the position, dtype and shape of a tensor; None if there is none of that name."""

    @abstractmethod
    def read_rows(self, name: str, rows: tuple[int, int] | None = None) -> bytes:
        """Return the bytes of a small tensor, or of the `(first, count)` of its rows along the last axis.
        Thread-safe."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""

    @cached_property
    def config(self) -> dict[str, object]:
        """Content of `config.json`; empty if there is none."""
        return read_config(self._store) or {}

    @cached_property
    def view(self) -> View:
        """The model in the names and shapes of megatron-core. BadInput if the model is unknown."""
        return view_of(self.config, f"{self._store.url}/{hf.CONFIG}", self.has)

    @property
    def view_if_known(self) -> View | None:
        """The view; None if no table contains the model, or it has no configuration."""
        inner = self.config.get("text_config")
        kinds = [self.config.get("model_type"), inner.get("model_type") if isinstance(inner, dict) else None]
        return self.view if any(isinstance(kind, str) and kind in families() for kind in kinds) else None

    def is_scaled(self, name: str) -> bool:
        """Return whether there are scales by which a tensor's elements must be multiplied."""
        return self.has(name + hf.SCALES)

    def read_as(self, name: str, shape: Dims) -> None:
        """Reshape a tensor in later selections; its elements and their order stay the same."""
        self._read_as[name] = shape


class HuggingFaceFolder(PublishedModel):
    """A folder of safetensors files with the hub's names. Headers are read once; a selection opens only the
    files of its tensors."""

    object_prefix = b""
    fetched_for = ""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        data = read_file(store, hf.WEIGHTS_INDEX, hf.WEIGHTS_INDEX_BYTES)
        self.where = f"{store.url}/{hf.WEIGHTS_INDEX if data is not None else hf.WEIGHTS}"
        self.about: dict[str, Any] = {"step": None}
        self.bytes_read = len(data or b"")
        self._places: dict[str, dict[str, hf.Place]] = {}
        """By file, after its header was read."""
        self._sizes: dict[str, int] = {}
        if data is not None:
            self._files = hf.read_weight_map(data, self.where)
        else:
            data = self._header(hf.WEIGHTS)
            self._files = dict.fromkeys(self._places[hf.WEIGHTS], hf.WEIGHTS)
        self.identity = hex_digest(digest(data))
        self._lock = Lock()
        self._names = sorted(self._files)
        self._row = {name: row for row, name in enumerate(self._names)}
        self.tensors = len(self._names)

    @staticmethod
    def is_one(store: Store) -> bool:
        """Return whether the folder contains weights of the hub, or their index."""
        return any(store.stat(name) is not None for name in (hf.WEIGHTS_INDEX, hf.WEIGHTS))

    def has(self, name: str) -> bool:
        return name in self._row

    def names(self) -> list[str]:
        return list(self._names)

    def find(self, wanted: Sequence[str]) -> Array:
        return np.fromiter((self._row.get(name, -1) for name in wanted), np.int64, len(wanted))

    def find_one(self, name: str) -> int:
        return self._row.get(name, -1)

    def select(self, rows: Array | None = None) -> Columns:
        names = self._names if rows is None else [self._names[row] for row in rows.tolist()]
        chosen = [self._place(name) for name in names]
        chosen = [place._replace(shape=self._read_as.get(place.name, place.shape)) for place in chosen]
        return hf.to_columns(chosen, self._sizes)

    def identity_of_files(self) -> str:
        """Return a digest of the names, sizes and headers of all files."""
        lines = [self.identity]
        for file in sorted(set(self._files.values())):
            header = self._header(file)
            lines.append(f"{file} {self._sizes[file]} {hex_digest(digest(header))}")
        return hex_digest(digest("\n".join(lines).encode()))

    def place(self, name: str) -> hf.Place | None:
        return self._place(name) if name in self._row else None

    def read_rows(self, name: str, rows: tuple[int, int] | None = None) -> bytes:
        place = self._place(name)
        row = math.prod(place.shape[-1:]) * int(ITEMSIZE[place.code])
        first, count = rows or (0, math.prod(place.shape[:-1]))
        where = f"{name!r} of {self._store.url}"
        check_size(where, count * row, SMALL)
        with closing(self._store.open(place.file)) as reader, bounded_memory(where):
            data = reader.read(place.position + first * row, count * row)
        if len(data) != count * row:
            raise CorruptCheckpoint(f"{self._store.url}/{place.file} ends before {name!r} does.")
        with self._lock:
            self.bytes_read += len(data)
        return data

    def _place(self, name: str) -> hf.Place:
        file = self._files[name]
        if file not in self._places:
            self._header(file)
        try:
            return self._places[file][name]
        except KeyError:
            raise CorruptCheckpoint(
                f"{self.where} says that {file} holds {name!r}, which it does not.",
                hint="Files of two versions of the model may be mixed; copy the folder again.",
                details={"file": file, "tensor": name},
            ) from None

    def _header(self, file: str) -> bytes:
        """Read a file's header, and return its bytes."""
        where = f"{self._store.url}/{file}"
        with closing(self._store.open(file)) as reader:
            header = read_header(reader.read, reader.size, where)
            self._sizes[file] = reader.size
        places = hf.places(header.entries, header.data_start, file, where)
        self._places[file] = {place.name: place for place in places}
        self.bytes_read += len(header.raw)
        return header.raw


def read_config(store: Store) -> dict[str, object] | None:
    """Return the content of a folder's `config.json`; None if there is none."""
    data = read_file(store, hf.CONFIG, hf.CONFIG_BYTES)
    try:
        return None if data is None else msgspec.json.decode(data, type=dict[str, object])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        where = f"{store.url}/{hf.CONFIG}"
        raise CorruptCheckpoint(f"{where} can't be read: {str(error)[:200]}.") from None
