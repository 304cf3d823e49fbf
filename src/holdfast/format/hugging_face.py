"""A folder of safetensors files as the Hugging Face hub publishes models: names, shapes and positions, from
the headers alone.

`model.safetensors.index.json` says which file holds which tensor; a model of one file has none. Such a folder
has no digests, so its bytes are read unverified. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.errors import CorruptCheckpoint
from holdfast.format.columns import ITEMSIZE, Columns, pad
from holdfast.format.container import Entry
from holdfast.layout.tensor import DTYPES

WEIGHTS_INDEX = "model.safetensors.index.json"
"""The file that maps tensor names to files."""
WEIGHTS = "model.safetensors"
"""The single weights file of a model without that index."""
CONFIG = "config.json"
"""What the model is: its type and its sizes."""
SUFFIX = ".safetensors"
CARRIED = (".json", ".txt", ".model", ".py", ".jinja", ".md", ".tiktoken")
"""Suffixes of the files that belong to a model besides its weights: configuration, tokenizer, code."""
WEIGHTS_INDEX_BYTES = 256 << 20
"""More than the index of any model: with 100,000 tensors it has 10 MB."""
CONFIG_BYTES = 64 << 20
MOST_AXES = 32
BLOCK = 4 << 20
"""Bytes per read."""

SCALES = "_scale_inv"
"""Suffix of the tensor that holds a quantized tensor's scales, one per block: elements are multiplied by
it."""
_CONSTANT = ".rotary_emb.inv_freq"
"""Suffix of constants that old versions of transformers wrote, and that no model reads."""
CODE_OF_TAG = {dtype.tag: code for code, dtype in reversed(list(enumerate(DTYPES))) if dtype.extra == 1}
"""The dtype code of a safetensors tag. Dtypes without a tag of their own are stored as bytes."""


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


def read_weight_map(data: bytes, where: str) -> dict[str, str]:
    """Return the file of each tensor, by name. CorruptCheckpoint if a file's name could leave the folder."""
    try:
        files = msgspec.json.decode(data, type=_WeightMap).weight_map
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"{where} can't be read: {str(error)[:200]}.") from None
    for name in set(files.values()):
        if not is_weights_file(name):
            raise CorruptCheckpoint(
                f"{where} points at {name[:200]!r}, which is no safetensors file of its folder.",
                details={"file": name[:200]},
            )
    return files


def is_weights_file(name: str) -> bool:
    """Return whether this is the plain name of a safetensors file, without any folder."""
    return name.endswith(SUFFIX) and not {"/", "\\", "\0"} & set(name) and 0 < len(name) <= 255


def places(entries: dict[str, Entry], data_start: int, file: str, where: str) -> list[Place]:
    """Return the tensors that a file's header lists; check that each has as many bytes as its shape
    requires."""
    tensors = []
    for name, entry in entries.items():
        code = CODE_OF_TAG.get(entry.dtype)
        if code is None:
            raise CorruptCheckpoint(
                f"{where} holds {name!r} in dtype {entry.dtype[:40]!r}, which Holdfast does not read.",
                details={"tensor": name},
            )
        if len(entry.shape) > MOST_AXES or any(not 0 <= side < 1 << 60 for side in entry.shape):
            raise CorruptCheckpoint(
                f"{where} gives {name!r} a shape that no tensor has.", details={"tensor": name}
            )
        start, stop = entry.data_offsets
        nbytes = int(ITEMSIZE[code])
        for side in entry.shape:
            nbytes *= side
        if nbytes != stop - start:
            raise CorruptCheckpoint(
                f"{where} says that {name!r} has shape {list(entry.shape)} and dtype {entry.dtype}, but "
                f"gives it {stop - start} bytes.",
                details={"tensor": name},
            )
        tensors.append(Place(name, file, code, entry.shape, data_start + start))
    return tensors


def to_columns(chosen: Sequence[Place], sizes: dict[str, int]) -> Columns:
    """Return tensors as index columns, each as one chunk without a digest. sizes: of the files, in bytes."""
    files = sorted({place.file for place in chosen})
    number = {name: index for index, name in enumerate(files)}
    shapes = [place.shape for place in chosen]
    dims = max(map(len, shapes), default=1) or 1
    code = np.asarray([place.code for place in chosen], "u1")
    shape = pad(shapes, dims, 1)
    nbytes = np.prod(shape, axis=1) * ITEMSIZE[code]
    count = len(chosen)
    return Columns(
        names=[place.name for place in chosen],
        dtype=code,
        kind=np.zeros(count, "u1"),
        ndim=np.asarray([len(one) for one in shapes], "u1"),
        shape=shape,
        chunk_end=np.arange(1, count + 1, dtype="<i8"),
        offset=np.zeros((count, dims), "<i8"),
        size=shape,
        file=np.asarray([number[place.file] for place in chosen], "<i4"),
        position=np.asarray([place.position for place in chosen], "<i8"),
        block=np.clip(nbytes, 1, BLOCK),
        digest_end=np.zeros(count, "<i8"),
        digests=np.zeros(0, "<u8"),
        file_names=files,
        file_size=np.asarray([sizes[name] for name in files], "<i8"),
        file_rank=np.zeros(len(files), "<i4"),
    )


def is_weight(name: str) -> bool:
    """Return whether this is the name of a weight, not of scales or of a constant."""
    return not name.endswith((SCALES, "_scales")) and not is_constant(name)


def is_constant(name: str) -> bool:
    """Return whether this is the name of a constant, which is equal in all models of the same sizes."""
    return name.endswith(_CONSTANT)


def weights_files(names: Iterable[str]) -> list[str]:
    """Return the safetensors files among the names in a folder, sorted."""
    return sorted(name for name in names if is_weights_file(name))


def carried_files(names: Iterable[str]) -> list[str]:
    """Return the files that belong to a model besides weights and their index, among the names in a
    folder."""
    return [
        name
        for name in names
        if name.endswith(CARRIED) and not name.endswith(".index.json") and not name.startswith(".")
    ]
