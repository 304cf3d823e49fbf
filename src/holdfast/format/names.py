"""Every name and constant of the format on disk, and the syntax of names inside of it. docs/format.md
describes them.

No torch, no NumPy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

FORMAT = "holdfast-1"
"""The version that an index and each data file's header name."""

# -- files of a checkpoint ------------------------------------------------------------------------

INDEX = "index.safetensors"
"""A folder that holds it is a committed checkpoint."""
DATA = "data"
"""The folder of the data files, inside of a checkpoint's."""
SLICE = "slice.holdfast"
"""The index of what `holdfast fetch` took of a checkpoint or a published model. No other tool takes a folder
that holds it for a whole one, so its name ends like that of no weights."""
OWNER = ".holdfast-owner.json"
"""In a run folder: which job saves there."""
EMBEDDED = "__holdfast__"
"""The entry of a data file under which it carries an index of itself."""
# `\Z`, because `$` would also match before a newline at the end. Each part begins with a letter, a digit, `_`
# or `-`, and the first with a letter or digit: so no name is hidden, and none has `..` in it.
_DATA_FILE = re.compile(DATA + r"/[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*\.safetensors\Z")
# What `data_file` gives. Ranks of 100,000 and more have more than five digits.
_OWN_FILE = re.compile(r"[A-Za-z0-9_-]+-r\d{5,}(-\d+)?\.safetensors\Z")

_FETCHED = "fetch-"


def data_file(attempt: str, rank: int, part: int) -> str:
    """The path of a rank's data file. It holds the attempt's name, so that no attempt touches the bytes of
    another."""
    suffix = f"-{part:03d}" if part else ""
    return f"{DATA}/{attempt}-r{rank:05d}{suffix}.safetensors"


def is_data_file(path: str) -> bool:
    """Is a path inside of a checkpoint one that a data file may have? Others could lead out of the folder."""
    return _DATA_FILE.match(path) is not None


def name_of_fetch(fetch: str, number: int) -> str:
    """Stands for the attempt in the names of a slice's data files. `fetch` says what was fetched."""
    return f"{_FETCHED}{fetch}-{number:05d}"


def is_fetched(name: str, fetch: str = "") -> bool:
    """Is a file's name, without its folder, that of a data file of a slice, finished or not?"""
    return name.removeprefix(".").startswith(_FETCHED + fetch)


def is_named_by_save(name: str) -> bool:
    """Is a file's name, without its folder, one that a save gives? Others are not swept."""
    return _OWN_FILE.match(name) is not None


# -- names inside of a checkpoint -----------------------------------------------------------------

_RANK = re.compile(r"@(\d+)(?:\.|\Z)")


def name_of_rank(name: str, rank: int) -> str:
    """The name of a value that is one rank's own (`PerRank`)."""
    return f"{name}@{rank}"


def rank_in_name(name: str) -> int | None:
    """Whose own a value is, by its name; None if it is shared."""
    match = _RANK.search(name)
    return None if match is None else int(match[1])


def name_of_chunk(name: str, offset: Sequence[object]) -> str:
    """The entry of a data file's header for a part of a tensor; `offset` is where the part begins."""
    return f"{name}@{','.join(map(str, offset))}"


def without_offset(entry: str) -> str:
    """The name in the entry of a part."""
    return entry.partition("@")[0]


IMPORTED_MODEL = "hf"
"""What the notes of a checkpoint say that was made of a model that Hugging Face publishes."""
_NO_WEIGHT = re.compile(r"(optimizer|optim|chained_\d+)\.|rng_state(?![a-z_])|common_state|.*_extra_state")


def is_weight(name: str) -> bool:
    """Can it be one of a model's weights, by its name in a training checkpoint? State of optimizers is none,
    nor that of random numbers."""
    return _NO_WEIGHT.match(name) is None


# -- checkpoints of torch DCP and megatron-core ---------------------------------------------------

METADATA = ".metadata"
"""A folder that holds it is a checkpoint of torch DCP or megatron-core, unless it is a marker
(`format.marker`)."""
COMMON_FILE = "common.pt"
"""Where megatron-core keeps what isn't sharded."""
COMMON = "common_state"
"""The object that holds it in a Holdfast checkpoint; megatron-core 0.19's name for it."""
COMMON_SHARD = f"{COMMON}/shard_0_1"
"""Where megatron-core keeps it since 0.19."""
SHARD = "/shard_"
"""In the name of a ShardedObject of megatron-core, which stores it in a list of one."""
CONFIG = "metadata.json"
"""By which Megatron's frameworks know a distributed checkpoint."""
HOLDFAST_CONFIG = {
    "sharded_backend": "holdfast",
    "sharded_backend_version": 1,
    "common_backend": "holdfast",
    "common_backend_version": 1,
}
"""The content of CONFIG in a Holdfast checkpoint."""
TRACKER = "latest_checkpointed_iteration.txt"
"""By which Megatron-LM, and frameworks that are built on it, find their newest checkpoint."""
TRAINER_STATE = "trainer_state.json"
"""In each checkpoint of the Hugging Face Trainer."""
