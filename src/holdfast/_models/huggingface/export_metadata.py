"""The metadata of an export: the headers of its files, the index of its weights, and its configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import chain
from typing import TypeAlias

import msgspec
import xxhash

from holdfast._core.format.container import encode_header
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.layout.tensor import DTYPES, FLOATS
from holdfast._core.store.base import Store
from holdfast._models.huggingface.published_tensors import PublishedTensor
from holdfast._models.huggingface.quantizing import configuration
from holdfast._models.views import hub_format as hf
from holdfast._models.views.published_model import QUANTIZATION
from holdfast.errors import BadInput

Files: TypeAlias = "list[tuple[str, list[PublishedTensor]]]"
"""The files of an export, each with its tensors in order."""
_DATA, _SAID = "holdfast.data", b'"holdfast.data":"'
"""The key of the digest of a file's data; what stands before it in a header."""
_UNKNOWN = "0" * 32
"""Stands for a digest that is not known yet, and is as long."""
DataDigest = xxhash.xxh3_128
"""The digest of a file's data, of all its bytes in order: faster than storage."""
_PIECE = 32 << 20
"""Bytes that are read at a time."""
_LEFT_OUT = (QUANTIZATION, hf.WEIGHTS_NAMED)
"""Keys of a configuration that describe files which are not written."""


def file_header(tensors: Sequence[PublishedTensor], identity: str, data: str = _UNKNOWN) -> bytes:
    """Return the header of a file with these tensors. identity: of the checkpoint. data: the digest of what
    follows, when it is known."""
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
    """Return the digest of the data that a file's header says; None if it says anything else than
    `expected`, which has none."""
    start = expected.index(_SAID) + len(_SAID)
    stop = start + len(_UNKNOWN)
    is_it = header[:start] == expected[:start] and header[stop:] == expected[stop:]
    return header[start:stop].decode("latin-1") if is_it else None


def check_data(out: Store, name: str, start: int, said: str, advance: Callable[[int], None]) -> None:
    """Raise BadInput unless a finished file still holds the data whose digest its header says.

    start: where the data begins. advance: called with the numbers of bytes that have been read.
    """
    digest = DataDigest()
    with closing(out.open(name)) as reader:
        while data := reader.read(start, _PIECE):
            digest.update(data)
            start += len(data)
            advance(len(data))
    if digest.hexdigest() != said:
        raise BadInput(
            f"{out.url}/{name} does not hold what an export has written there: it was damaged or changed "
            "since.",
            hint="Delete it, and export again.",
        )


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
