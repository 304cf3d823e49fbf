"""A folder of the Hugging Face hub as a source of loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from functools import cached_property
from threading import Lock

import numpy as np

from holdfast._core.base.values import Message
from holdfast._core.format.columns import ITEMSIZE, Array, Columns
from holdfast._core.format.container import Header, parse_header, raw_header
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.format.limits import bounded_memory, check_size
from holdfast._core.io.small_files import read_file
from holdfast._core.io.source import Rows
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.store.base import Kind, NotFound, Store
from holdfast._models.views import hub_format as hf
from holdfast._models.views.published_model import PublishedModel, read_config
from holdfast.errors import BadInput, CorruptCheckpoint

SMALL = 1 << 30
"""Limit of a tensor that is read whole, such as scales: one per 16,384 elements."""


class LoadedModel(PublishedModel):
    """A published model that a load reads, under the names and shapes of a state."""

    def translate(self, table: ShardTable, owner: Sequence[int]) -> Rows:
        # Here: it imports torch, which commands that only list a model do not.
        from holdfast._models.views.published import see_published

        return see_published(self, table, owner)


def weights_file(store: Store) -> str | None:
    """Return the name of the file by which transformers finds a model's weights: the single weights file, or
    the index of several. None if there is none. BadInput if the configuration names an invalid file.

    This is the only place that decides which of a folder's files are its weights.
    """
    named = (read_config(store) or {}).get(hf.WEIGHTS_NAMED)
    names = [hf.WEIGHTS, hf.WEIGHTS_INDEX]
    if named is not None:
        if not (isinstance(named, str) and hf.is_weights_file(named.removesuffix(".index.json"))):
            raise BadInput(
                f"{store.url}/{hf.CONFIG} says that {hf.WEIGHTS_NAMED} is {str(named)[:200]!r}, which is no "
                f"safetensors file of its folder, nor the index of such files."
            )
        names = [named]
    entries = ((name, store.stat(name)) for name in names)
    # A folder of the hub's cache has links.
    return next((name for name, entry in entries if entry and entry.kind in (Kind.FILE, Kind.LINK)), None)


class HuggingFaceFolder(LoadedModel):
    """A folder of safetensors files with the hub's names. Headers are read once; a selection opens only the
    files of its tensors."""

    object_prefix = b""
    fetched_for = ""

    def __init__(self, store: Store, file: str) -> None:
        """file: the result of `weights_file`. It is parsed on first access to names: a load also opens the
        folder just to check that it is unchanged."""
        super().__init__(store)
        self.where = f"{store.url}/{file}"
        self.about: Message = {"step": None}
        self.bytes_read = 0
        self._file = file
        self._headers: dict[str, Header] = {}
        """Headers read so far, by file."""
        self._sizes: dict[str, int] = {}
        self._data = self._raw_header(file) if self._is_single else self._read_index()
        self.identity = hex_digest(digest(self._data))
        if self.adapter is not None:
            self.identity = self.adapter.identity_with(self.identity)
        self._lock = Lock()

    @property
    def _is_single(self) -> bool:
        return hf.is_weights_file(self._file)

    @cached_property
    def _files(self) -> dict[str, str]:
        """The file of each tensor, the adapter's included, which come last."""
        if not self._is_single:
            files = hf.read_weight_map(self._data, self.where)
        else:
            self._headers[self._file] = header = self._parse(self._file, self._data)
            files = dict.fromkeys(header.entries, self._file)
        return files if self.adapter is None else files | self.adapter.files()

    @cached_property
    def _names(self) -> list[str]:
        own = self.adapter.files() if self.adapter is not None else {}
        return [*sorted(self._files.keys() - own.keys()), *sorted(own)]

    @cached_property
    def _row(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self._names)}

    @property
    def tensors(self) -> int:
        return len(self.names())

    @staticmethod
    def at(store: Store) -> HuggingFaceFolder | None:
        """Open the published model in a folder; None if there is none that Holdfast reads."""
        file = weights_file(store)
        return None if file is None else HuggingFaceFolder(store, file)

    def has(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        merged = len(self.adapter.files()) if self.adapter is not None and not self.is_wrapped else 0
        return self._names[: len(self._names) - merged]

    def find(self, wanted: Sequence[str]) -> Array:
        return np.fromiter(map(self.find_one, wanted), np.int64, len(wanted))

    def find_one(self, name: str) -> int:
        return self._row.get(name, -1)

    def select(self, rows: Array | None = None) -> Columns:
        names = self.names() if rows is None else [self._names[row] for row in rows.tolist()]
        return hf.to_columns([self._place(name) for name in names], self._sizes)

    def identity_of_files(self) -> str:
        """Return a digest of the names, sizes and headers of all files."""
        lines = [self.identity]
        for file in sorted(set(self._files.values())):
            header = self._header(file)
            lines.append(f"{file} {self._sizes[file]} {hex_digest(digest(header.raw))}")
        return hex_digest(digest("\n".join(lines).encode()))

    def place(self, name: str) -> hf.Place | None:
        return self._place(name) if name in self._files else None

    def read_rows(self, name: str, rows: tuple[int, int] | None = None) -> bytes:
        place = self._place(name)
        row = math.prod(place.shape[-1:]) * int(ITEMSIZE[place.code])
        first, count = rows or (0, math.prod(place.shape[:-1]))
        where = f"{name!r} of {self._store.url}"
        check_size(where, count * row, SMALL)  # a sparse file of any size costs nothing to create
        with closing(self._store.open(place.file)) as reader, bounded_memory(where):
            data = reader.read(place.position + first * row, count * row)
        if len(data) != count * row:
            raise CorruptCheckpoint(f"{self._store.url}/{place.file} ends before {name!r} does.")
        with self._lock:
            self.bytes_read += len(data)
        return data

    def _place(self, name: str) -> hf.Place:
        file = self._files[name]
        header = self._header(file)
        entry = header.entries.get(name)
        if entry is None:
            raise self._mixed(f"{self.where} says that {file} holds {name!r}, which it does not.", file, name)
        return hf.place_of(name, entry, header.data_start, file)

    def _header(self, file: str) -> Header:
        """Return a file's header, which is read and checked once."""
        if file in self._headers:
            return self._headers[file]
        header = self._parse(file, self._raw_header(file))
        for name in header.entries:
            # transformers takes all tensors of the files that an index names, and of one name the last.
            if self._files.get(name) != file:
                there = self._files.get(name, "no file")
                says = f"holds {name!r}, which {self.where} says is in {there}"
                raise self._mixed(f"{self._store.url}/{file} {says}.", file, name)
        self._headers[file] = header
        return header

    def _raw_header(self, file: str) -> bytes:
        try:
            reader = self._store.open(file)
        except NotFound:
            if self._is_single:
                raise
            raise NotFound(
                f"{self.where} names {file}, which is not there.",
                hint="Copy that file, too, or download the model again.",
                details={"file": file},
            ) from None
        with closing(reader):
            self._sizes[file] = reader.size
            raw = raw_header(reader.read, reader.size, f"{self._store.url}/{file}")
        self.bytes_read += len(raw)
        return raw

    def _parse(self, file: str, raw: bytes) -> Header:
        where = f"{self._store.url}/{file}"
        header = parse_header(raw, self._sizes[file], where)
        hf.check_entries(header.entries, self._sizes[file] - header.data_start, where)
        return header

    def _read_index(self) -> bytes:
        data = read_file(self._store, self._file, hf.WEIGHTS_INDEX_BYTES)
        if data is None:
            raise NotFound(f"{self.where} was removed meanwhile.")
        self.bytes_read += len(data)
        return data

    def _mixed(self, sentence: str, file: str, name: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            sentence,
            hint="Files of two versions of the model may be mixed; copy the folder again.",
            details={"file": file, "tensor": name},
        )
