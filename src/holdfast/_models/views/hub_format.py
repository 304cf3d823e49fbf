"""A folder of safetensors files as the Hugging Face hub publishes models: names, shapes and positions, from
the headers alone.

`model.safetensors` holds all tensors, or else `model.safetensors.index.json` maps tensors to files.
Such a folder has no digests, so its bytes are read unverified. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from holdfast._core.base.values import NO_JSON, shortened
from holdfast._core.format.columns import Columns, ForeignChunk, foreign_columns
from holdfast._core.format.container import HeaderEntry
from holdfast._core.layout.box import whole
from holdfast._core.layout.tensor import CODE_OF, DTYPES, TensorSpec
from holdfast._core.ready import ready
from holdfast.errors import BadInput, CorruptCheckpoint

WEIGHTS = "model.safetensors"
"""The single weights file of a model. If it exists, an index is ignored."""
WEIGHTS_INDEX = "model.safetensors.index.json"
"""The file that maps tensor names to files."""
WEIGHTS_NAMED = "transformers_weights"
"""The configuration key that names another file instead of these two."""
CONFIG = "config.json"
"""The configuration of the model: its type and its sizes."""
ADAPTER_CONFIG = "adapter_config.json"
"""The configuration of an adapter. In a folder that has one, transformers takes the weights of the base model
that it names, whatever else the folder has, if PEFT is installed."""
CONFIG_DTYPES = ("dtype", "torch_dtype")
"""Configuration keys for the dtype of the weights: in transformers 5, and before."""
CARRIED = (".json", ".txt", ".model", ".py", ".jinja", ".md", ".tiktoken")
"""Suffixes of the files that belong to a model besides its weights: configuration, tokenizer, code."""
WEIGHTS_INDEX_BYTES = 256 << 20
"""Maximum size of an index; with 100,000 tensors it has 10 MB."""
CONFIG_BYTES = 64 << 20
MOST_AXES = 32

_CONSTANT = ".rotary_emb.inv_freq"
"""Suffix of constants that old versions of transformers wrote, and that no model reads."""
CODE_OF_TAG = {dtype.tag: code for code, dtype in reversed(list(enumerate(DTYPES))) if dtype.extra == 1} | {
    "F8_E4M3FNUZ": CODE_OF["float8_e4m3fnuz"],
    "F8_E5M2FNUZ": CODE_OF["float8_e5m2fnuz"],
    "F8_E8M0": CODE_OF["float8_e8m0fnu"],
    "C64": CODE_OF["complex64"],
}
"""The dtype code of a safetensors tag. The last four came after Holdfast's own files had others for these."""
TAG_OF_CODE = {code: tag for tag, code in CODE_OF_TAG.items()}
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_BITS |= {tag: 8 * DTYPES[code].size for tag, code in CODE_OF_TAG.items()}
"""Bits per element of every dtype of safetensors."""


T = TypeVar("T")


class Place(NamedTuple):
    """The position of a tensor: file, offset, dtype and shape."""

    name: str
    file: str
    code: int
    shape: tuple[int, ...]
    position: int
    """Bytes from the start of the file."""


class _WeightMap(msgspec.Struct):
    weight_map: dict[str, str]


def decode(data: bytes, kind: type[T], where: str) -> T:
    """Parse a JSON file. CorruptCheckpoint if it is not JSON of this type."""
    try:
        return msgspec.json.decode(data, type=ready(kind))
    except NO_JSON as error:
        raise CorruptCheckpoint(f"{where} can't be read: {shortened(str(error))}.") from None


def read_weight_map(data: bytes, where: str) -> dict[str, str]:
    """Return the file of each tensor, by name. CorruptCheckpoint if a file's name could leave the folder."""
    files = decode(data, _WeightMap, where).weight_map
    for name in set(files.values()):
        if not is_weights_file(name):
            raise CorruptCheckpoint(
                f"{where} points at {name[:200]!r}, which is no safetensors file of its folder.",
                details={"file": name[:200]},
            )
    return files


def is_weights_file(name: str) -> bool:
    """Return whether this is the plain name of a safetensors file, without any folder."""
    return name.endswith(".safetensors") and not {"/", "\\", "\0"} & set(name) and 0 < len(name) <= 255


def check_entries(entries: dict[str, HeaderEntry], room: int, where: str) -> None:
    """Check a header's entries by the rules of the safetensors library: known dtypes, byte lengths that match
    the shapes, and contiguous tensors without gaps or overlaps up to the end of the file.

    room: bytes after the header.
    """
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        bits = _BITS.get(entry.dtype)
        if bits is None:
            raise CorruptCheckpoint(
                f"{where} holds {name!r} in dtype {entry.dtype[:40]!r}, which safetensors does not have.",
                details={"tensor": name},
            )
        shape = entry.shape
        impossible = shape and (len(shape) > MOST_AXES or min(shape) < 0 or max(shape) >= 1 << 60)
        if impossible or bits * math.prod(shape) != 8 * (stop - start):
            raise CorruptCheckpoint(
                f"{where} gives {name!r} a shape that {stop - start} bytes of {entry.dtype} do not have.",
                details={"tensor": name},
            )
    bounds = np.fromiter(
        chain.from_iterable(entry.data_offsets for entry in entries.values()), np.int64, 2 * len(entries)
    ).reshape(-1, 2)
    order = np.lexsort((bounds[:, 1], bounds[:, 0]))
    starts, stops = np.append(bounds[order, 0], room), np.insert(bounds[order, 1], 0, 0)
    if (starts != stops).any():
        place = int(np.minimum(starts, stops)[starts != stops][0])
        raise CorruptCheckpoint(
            f"From byte {place} of its data on, the tensors of {where} overlap or leave a hole.",
            hint="safetensors refuses such a file, too: it is damaged, or something was appended to it.",
        )


def place_of(name: str, entry: HeaderEntry, data_start: int, file: str) -> Place:
    """Return the position of a tensor in a file. BadInput for a dtype that Holdfast does not read."""
    code = CODE_OF_TAG.get(entry.dtype)
    if code is None:
        raise BadInput(
            f"{file} holds {name!r} in {entry.dtype}, whose elements are less than a byte; Holdfast does not "
            f"read it.",
            details={"tensor": name},
        )
    return Place(name, file, code, entry.shape, data_start + entry.data_offsets[0])


def to_columns(chosen: Sequence[Place], sizes: dict[str, int]) -> Columns:
    """Return tensors as index columns, each as one chunk. sizes: of the files, in bytes."""
    tensors, chunks = [], []
    for place in chosen:
        nbytes = math.prod(place.shape) * DTYPES[place.code].size
        tensors.append((TensorSpec(place.name, place.code, place.shape), 1))
        chunks.append(ForeignChunk(whole(place.shape), place.file, place.position, nbytes))
    columns = foreign_columns(tensors, chunks)
    columns.file_size = np.asarray([sizes[name] for name in columns.file_names], "<i8")
    return columns


def is_constant(name: str) -> bool:
    """Return whether this is the name of a constant, which is equal in all models of the same sizes."""
    return name.endswith(_CONSTANT)


def is_carried(name: str) -> bool:
    """Return whether this is the name of a file that belongs to a model besides weights and their indexes."""
    is_other = name.endswith(".index.json") or name.startswith(".") or name == ADAPTER_CONFIG
    return name.endswith(CARRIED) and not is_other
