"""The metadata of an export: the headers of its files, the index of its weights, and its configuration."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeAlias

import msgspec

from holdfast._core.base.values import Buffer
from holdfast._core.format.container import encode_header
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.format.fingerprint import box_sums, nothing, text_of
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import DTYPES, FLOATS
from holdfast._core.store.base import Reader
from holdfast._models.huggingface.published_tensors import PublishedTensor
from holdfast._models.huggingface.quantizing import configuration
from holdfast._models.views import hub_format as hf
from holdfast._models.views.published_model import QUANTIZATION

Files: TypeAlias = "list[tuple[str, list[PublishedTensor]]]"
"""The files of an export, each with its tensors in order."""
_DATA, _SAID = "holdfast.data", b'"holdfast.data":"'
"""The key of the fingerprint of a file's data; what stands before it in a header."""
_UNKNOWN = "0" * 32
"""Stands for a fingerprint that is not known yet, and is as long."""
_LEFT_OUT = (QUANTIZATION, hf.WEIGHTS_NAMED)
"""Keys of a configuration that describe files which are not written."""


def file_header(tensors: Sequence[PublishedTensor], identity: str, data: str = _UNKNOWN) -> bytes:
    """Return the header of a file with these tensors. identity: of the checkpoint. data: the fingerprint of
    what follows, when it is known."""
    rows, start = [], 0
    for tensor in chain.from_iterable(tensor.stored() for tensor in tensors):
        stop = start + tensor.nbytes
        rows.append((tensor.name, hf.TAG_OF_CODE[tensor.code], tensor.shape, start, stop))
        start = stop
    # Also a digest of the pieces: a rerun with another configuration must not keep these files.
    made = hex_digest(digest(repr([tensor.pieces for tensor in tensors]).encode()))
    said = {"format": "pt", "holdfast.source": identity, "holdfast.pieces": made, _DATA: data}
    return encode_header(rows, said)


def data_said(header: bytes, expected: bytes) -> str | None:
    """Return the fingerprint of the data that a file's header says; None if it says anything else than
    `expected`, which has none."""
    start = expected.index(_SAID) + len(_SAID)
    stop = start + len(_UNKNOWN)
    is_it = header[:start] == expected[:start] and header[stop:] == expected[stop:]
    return header[start:stop].decode("latin-1") if is_it else None


class DataSums:
    """The sums of a file's data; threads add parts of it in any order."""

    def __init__(self) -> None:
        self._sums, self._lock = nothing(), threading.Lock()

    def add(self, position: int, buffers: Sequence[Buffer]) -> int:
        """Add parts that follow each other, the first from `position` in the data on; return their bytes."""
        mine, size = nothing(), 0
        for data in buffers:
            mine += box_sums(data, 1, Box((position + size,), (len(data),)))
            size += len(data)
        with self._lock:
            self._sums += mine
        return size

    def fingerprint(self) -> str:
        return text_of(self._sums)


def fingerprint_of(reader: Reader, start: int, step: int, advance: Callable[[int], None]) -> str:
    """Return the fingerprint of a file's data, which begins at `start`. It reads `step` bytes at a time, and
    calls `advance` with their number."""
    sums, position = DataSums(), 0
    while data := reader.read(start + position, step):
        position += sums.add(position, [data])
        advance(len(data))
    return sums.fingerprint()


def weights_index(files: Files) -> bytes:
    """Return the content of `model.safetensors.index.json`."""
    where = {one.name: name for name, tensors in files for each in tensors for one in each.stored()}
    total = sum(tensor.nbytes for _, tensors in files for tensor in tensors)
    value = {"metadata": {"total_size": total}, "weight_map": where}
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def exported_config(config: dict[str, object], files: Files) -> dict[str, object]:
    """Return the configuration for the export: with its dtype and quantization, without file names."""
    nbytes = Counter[int]()
    all_tensors = [*chain.from_iterable(tensors for _, tensors in files)]
    for tensor in all_tensors:
        if tensor.code in FLOATS:
            nbytes[tensor.code] += tensor.nbytes
    changed = {key: _without(value, _LEFT_OUT[0]) for key, value in config.items() if key not in _LEFT_OUT}
    for code, _ in nbytes.most_common(1):
        changed |= {key: DTYPES[code].name for key in hf.CONFIG_DTYPES if isinstance(config.get(key), str)}
    if (quantization := configuration(all_tensors)) is not None:
        changed[QUANTIZATION] = quantization
    return changed


def _without(value: object, key: str) -> object:
    """Return a part of a configuration, such as that of a language model, without a key."""
    return {name: one for name, one in value.items() if name != key} if isinstance(value, dict) else value
