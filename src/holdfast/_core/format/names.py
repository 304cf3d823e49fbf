"""Every name and constant of the format on disk, and the syntax of names in it. docs/format.md describes
them.

No torch, no NumPy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

FORMAT = "holdfast-1"
"""The format version, in an index and in the header of each data file."""
NARROW = "holdfast-1.1"
"""The version of a checkpoint's index whose integer columns use the narrowest sufficient type."""
SHARED = "holdfast-1.2"
"""The version of an index in which chunks of several tensors share the same bytes (tied weights)."""
REFERRING = "holdfast-1.3"
"""The version of an index that names data files of other steps of its run (`reference`). Chunks of several
tensors may share bytes, too."""

# -- files of a checkpoint ------------------------------------------------------------------------

INDEX = "index.safetensors"
"""A folder with this file is a committed checkpoint."""
DATA = "data"
"""The folder of the data files, inside the checkpoint's folder."""
SLICE = "slice.holdfast"
"""The index of a slice: the part of a checkpoint or a published model that `holdfast fetch` copied. It does
not have a suffix of weight files, so that no other tool takes the folder for a complete model."""
OWNER = ".holdfast-owner.json"
"""In a run folder: the job that saves there."""
LOCAL = ".holdfast-local.json"
"""In the local folder of a run (`Checkpoints(local=)`): whose it is."""
LEFT = ".holdfast-left.json"
"""In a run folder: the steps that the run has left behind by going back to an older one."""
PINS = ".holdfast-pins"
"""In a step's folder, on stores without locks: a folder with a file for each reader of the step, and for each
rank of a later step that names data files of this one."""
REMOVED = ".holdfast-removed"
"""In a run folder, on stores without locks: a folder with a file for each step that is being removed."""
PARTIAL = "partial"
"""The key in an index that tells whether `include=` or `exclude=` of the save selected its names."""
EMBEDDED = "__holdfast__"
"""The entry of a data file that contains the file's own index."""
# `\Z`, because `$` would also match before a newline at the end. Each part begins with a letter, a digit, `_`
# or `-`, and the first with a letter or digit: so no name is hidden, and none contains `..`.
_DATA_FILE = re.compile(DATA + r"/[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*\.safetensors\Z")
# Only into a folder that is named as a step, beside that of the index.
_REFERENCE = re.compile(r"\.\./((?:step-[0-9]{8,18})|(?:iter_[0-9]{7,18}))/(.+)\Z")
# File names from `data_file` and `linked_file` for the attempts of saves and imports. Ranks of 100,000 and
# more have more than five digits. Files of `fetch` have other names: no index lists them, but they are no
# leftovers.
_OWN_FILE = re.compile(
    r"((import-[0-9a-f]{16}-)?[0-9a-f]{12}-r[0-9]{5,}-)*"
    r"(import-[0-9a-f]{16}-)?[0-9a-f]{12}-r[0-9]{5,}(-[0-9]{3,})?\.safetensors\Z"
)
_ATTEMPT = re.compile(r"((?:import-[0-9a-f]{16}-)?[0-9a-f]{12})-r[0-9]{5,}[-.]")

_FETCHED = "fetch-"


class WrittenFile(NamedTuple):
    """A data file that a rank has written, as it reports it to the committer."""

    name: str
    size: int
    index_start: int
    """Position of the embedded index in the file; it has `index_size` bytes."""
    index_size: int
    links: tuple[str, ...] = ()
    """Names of links to files of earlier steps, which this file's index also lists."""


def data_file(attempt: str, rank: int, part: int) -> str:
    """Return the path of a rank's data file. It contains the attempt's name, so that no attempt overwrites
    files of another."""
    suffix = f"-{part:03d}" if part else ""
    return f"{DATA}/{attempt}-r{rank:05d}{suffix}.safetensors"


def attempt_of(path: str) -> str:
    """Return the attempt that wrote a data file, by its name; "" if that does not say."""
    match = _ATTEMPT.match(path.removeprefix(f"{DATA}/"))
    return "" if match is None else match[1]


def linked_file(attempt: str, rank: int, origin: str) -> str:
    """Return the path of a link to a data file of an earlier step. It has the prefix of the rank's own files,
    so that it is swept with them. origin: the name (without folder) under which the file was written."""
    return f"{DATA}/{attempt}-r{rank:05d}-{origin}"


def is_of_other_attempt(path: str, attempt: object) -> bool:
    """Return whether the name of a data file shows that another attempt wrote it. False if the name is not
    that of a save's file, or if the attempt is unknown."""
    if not isinstance(attempt, str) or not is_named_by_save(name := path.removeprefix(f"{DATA}/")):
        return False
    return not is_fetched(name) and not name.startswith(f"{attempt}-r")


def is_link_to(path: str, origin: str) -> bool:
    """Return whether a data file is a link, or a reference, to one that was written under the path
    `origin`."""
    if (referred := split_reference(path)) is not None:
        return referred[1] == origin
    return path.endswith("-" + origin.removeprefix(f"{DATA}/"))


def reference(folder: str, path: str) -> str:
    """Return the name, in the index of a step, of the data file `path` of another step in `folder`."""
    return f"../{folder}/{path}"


def split_reference(name: str) -> tuple[str, str] | None:
    """Return the step's folder and the path of the data file that a reference names; None if it is none."""
    match = _REFERENCE.match(name)
    return (match[1], match[2]) if match is not None and is_data_file(match[2]) else None


def is_data_file(path: str) -> bool:
    """Return whether a data file may have this path in a checkpoint. Other paths could leave the folder."""
    return _DATA_FILE.match(path) is not None


def name_of_fetch(fetch: str, number: int) -> str:
    """Return the name that takes the place of the attempt in the names of a slice's data files. `fetch`
    identifies the content."""
    return f"{_FETCHED}{fetch}-{number:05d}"


def is_fetched(name: str, fetch: str = "") -> bool:
    """Return whether a file name (without folder) is that of a slice's data file, finished or not."""
    return name.removeprefix(".").startswith(_FETCHED + fetch)


def is_named_by_save(name: str) -> bool:
    """Return whether a file name (without folder) is specific to saves and imports of Holdfast."""
    return _OWN_FILE.match(name) is not None


# -- names inside of a checkpoint -----------------------------------------------------------------

_RANK = re.compile(r"@(\d+)(?:\.|\Z)")


def name_of_rank(name: str, rank: int) -> str:
    """Return the name of a value that belongs to one rank (`PerRank`)."""
    return f"{name}@{rank}"


def rank_in_name(name: str) -> int | None:
    """Return the rank that a value belongs to, by its name; None if it is shared."""
    match = _RANK.search(name)
    return None if match is None else int(match[1])


def without_rank(name: str) -> str | None:
    """Return the name of a per-rank value without its rank; None if the value is shared."""
    match = _RANK.search(name)
    return None if match is None else name[: match.start()] + name[match.end(1) :]


def up_to_rank(name: str) -> str | None:
    """Return the name of the whole value that belongs to a rank, with its rank; None if it is shared."""
    match = _RANK.search(name)
    return None if match is None else name[: match.end(1)]


def name_of_chunk(name: str, offset: Sequence[object]) -> str:
    """Return the entry name, in a data file's header, of a part of a tensor that begins at `offset`."""
    return f"{name}@{','.join(map(str, offset))}"


def without_offset(entry: str) -> str:
    """Return the name of the tensor, given the entry name of a part."""
    return entry.partition("@")[0]


IMPORTED_MODEL = "hf"
"""Value of `imported` in the notes of a checkpoint that was imported from a Hugging Face model."""
_NO_WEIGHT = re.compile(r"(optimizer|optim|chained_\d+)\.|rng_state(?![a-z_])|common_state")


def is_weight(name: str) -> bool:
    """Return whether a name in a training checkpoint can be that of a model weight. States of optimizers and
    of random number generators are not."""
    return "_extra_state" not in name and _NO_WEIGHT.match(name) is None


# -- checkpoints of torch DCP and megatron-core ---------------------------------------------------

METADATA = ".metadata"
"""A folder with this file is a checkpoint of torch DCP or megatron-core, unless the file is a marker
(`is_marker`)."""
MARKER = "THIS_IS_A_HOLDFAST_CHECKPOINT__LOAD_IT_WITH_holdfast.dcp.load"
"""The file that the `.metadata` of a Holdfast checkpoint refers to, for tools that look for one
(`holdfast._frameworks.torch_dcp.metadata` writes it); no such file exists."""
MARKER_HEAD = 4096
"""The file name is within this many bytes from the start of a `.metadata`."""
COMMON_FILE = "common.pt"
"""megatron-core's file of the unsharded state."""
INTEGRITY = "integrity.json"
"""megatron-core's list of the SHA-256 of each file, since 0.18."""
COMMON = "common_state"
"""The object with that state in a Holdfast checkpoint; megatron-core 0.19 uses this name."""
COMMON_SHARD = f"{COMMON}/shard_0_1"
"""The object with that state since megatron-core 0.19."""
SHARD = "/shard_"
"""Part of the name of a megatron-core ShardedObject, which megatron-core stores in a list of length 1."""
CONFIG = "metadata.json"
"""The file by which Megatron's frameworks recognize a distributed checkpoint."""
HOLDFAST_CONFIG = {
    "sharded_backend": "holdfast",
    "sharded_backend_version": 1,
    "common_backend": "holdfast",
    "common_backend_version": 1,
}
"""The content of CONFIG in a Holdfast checkpoint."""
TRACKER = "latest_checkpointed_iteration.txt"
"""The file in which Megatron-LM, and frameworks built on it, keep the number of their newest checkpoint."""
TRAINER_STATE = "trainer_state.json"
"""A file in each checkpoint of the Hugging Face Trainer."""


def is_marker(head: bytes) -> bool:
    """Return whether a `.metadata` belongs to a Holdfast checkpoint. head: its first MARKER_HEAD bytes or
    more."""
    return MARKER.encode() in head[:MARKER_HEAD]
