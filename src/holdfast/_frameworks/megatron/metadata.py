"""Common state, metadata and format of the checkpoint in a folder, ours or stock megatron-core's."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from holdfast._core.base.reporting import warn_once
from holdfast._core.format import objects, plain_objects
from holdfast._core.format.names import (
    COMMON,
    COMMON_FILE,
    COMMON_SHARD,
    CONFIG,
    HOLDFAST_CONFIG,
    INDEX,
    METADATA,
    SHARD,
)
from holdfast._core.format.torch_dist import only_one
from holdfast._core.format.torch_objects import allowing
from holdfast._core.io.open_checkpoint import open_source
from holdfast._core.io.small_files import read_file
from holdfast._core.layout.tensor import OBJECT
from holdfast._core.state.leaf import Flat
from holdfast._core.state.memory import torch_dtype
from holdfast._core.store.base import Store, replace_file
from holdfast._core.store.local import open_store
from holdfast._frameworks.arguments import taking_those_of
from holdfast._frameworks.foreign_errors import raising
from holdfast._frameworks.megatron import mcore
from holdfast._frameworks.megatron.errors import of_megatron
from holdfast._frameworks.torch_dcp import metadata as dcp_metadata
from holdfast._frameworks.torch_dcp.stored_object import read_object
from holdfast.errors import BadInput, HoldfastError

log = logging.getLogger("holdfast")


@raising(of_megatron)
@taking_those_of(mcore.stock("load_common_state_dict"))
def load_common_state_dict(checkpoint_dir: str | os.PathLike[str]) -> mcore.StateDict:
    """Read everything in a checkpoint that isn't sharded; reads no other data, and waits for no rank."""
    return read_common(open_store(os.fspath(checkpoint_dir)))


def read_common(store: Store) -> mcore.StateDict:
    # In one of three places: our object, stock's own file, or stock's object since 0.19.
    with allowing(mcore.safe_types(stock=True)):
        common = read_object(store, COMMON)
        if common is None and (data := read_file(store, COMMON_FILE)) is not None:
            common = objects.decode(plain_objects.TORCH + data, COMMON_FILE)
        elif common is None and (shard := read_object(store, COMMON_SHARD)) is not None:
            common = only_one(shard, COMMON_SHARD)
    return common if isinstance(common, dict) else {}


def is_stock(store: Store) -> bool:
    config = read_file(store, CONFIG)
    # megatron-core's configuration is a JSON object; anything else is not its own.
    with suppress(ValueError, AttributeError, RecursionError):
        return config is not None and json.loads(config).get("sharded_backend") == "torch_dist"
    return False


@raising(of_megatron)
@taking_those_of(mcore.stock("load_content_metadata"))
def load_content_metadata(
    checkpoint_dir: str | os.PathLike[str] | None = None,
    *,
    preloaded_state_dict: mcore.StateDict | None = None,
) -> mcore.StateDict | None:
    """Return the content_metadata that `save` was given, or None; from a folder, or from its common state."""
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise BadInput("Give checkpoint_dir or preloaded_state_dict.")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(mcore.CONTENT_METADATA)


@raising(of_megatron)
@taking_those_of(mcore.stock("load_tensors_metadata"))
def load_tensors_metadata(
    checkpoint_dir: str | os.PathLike[str], sharded_strategy: object = None
) -> mcore.StateDict:
    """Return every tensor of a checkpoint as an unsharded ShardedTensor without data, by key."""
    note_strategies(sharded_strategy)
    return {
        key: item
        for key, item in load_sharded_metadata(checkpoint_dir).items()
        if isinstance(item, mcore.ShardedTensor)
    }


@raising(of_megatron)
@taking_those_of(mcore.stock("load_sharded_metadata"))
def load_sharded_metadata(
    checkpoint_dir: str | os.PathLike[str], sharded_strategy: object = None, common_strategy: object = None
) -> mcore.StateDict:
    """Return the result of `load_tensors_metadata`, with every ShardedObject added."""
    note_strategies(sharded_strategy, common_strategy)
    entries: mcore.StateDict = {}
    with open_source(open_store(os.fspath(checkpoint_dir))) as index:
        columns = index.select()
    for name, code, shape, kind in columns.specs():
        if kind == OBJECT:
            if SHARD in name:
                entries[name] = mcore.ShardedObject.empty_from_unique_key(name)
            continue
        # On the meta device, because a checkpoint's tensors may not fit into one process.
        data = torch.empty(shape, dtype=torch_dtype(code), device="meta")
        entries[name] = mcore.ShardedTensor.from_rank_offsets(name, data).without_data()
    return entries


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Return whether the folder has a committed checkpoint of Holdfast or in a format of megatron-core.

    A Holdfast checkpoint with `.metadata`, but without `metadata.json`, was saved through DCP's functions,
    and does not count: frameworks distinguish their two formats by this.
    """
    if not checkpoint_dir:
        return False
    # The index, not the configuration, makes a folder a checkpoint of ours.
    if Path(checkpoint_dir, INDEX).exists():
        return Path(checkpoint_dir, CONFIG).exists() or not Path(checkpoint_dir, METADATA).exists()
    config = mcore.maybe_load_config(os.fspath(checkpoint_dir))
    # Our configuration without an index is no checkpoint.
    return config is not None and config.sharded_backend != HOLDFAST_CONFIG["sharded_backend"]


def strategies(
    stock: Callable[..., object],
    checkpoint_dir: str,
    sharded_strategy: object = None,
    common_strategy: object = None,
) -> object:
    """Return strategies also for a Holdfast folder: some frameworks ask for them before they call `load`.

    megatron-core has none for it, so its own are returned; they are not used.
    """
    config = mcore.maybe_load_config(checkpoint_dir)
    if config is not None and config.sharded_backend == HOLDFAST_CONFIG["sharded_backend"]:
        return mcore.load_strategies()
    return stock(checkpoint_dir, sharded_strategy, common_strategy)


def note_strategies(*strategies: object) -> None:
    """Warn once of each strategy that is not megatron-core's own, and of each hint: they have no effect."""
    for strategy in strategies:
        kind = type(strategy)
        # Frameworks pass None, names, and stock strategies, which do not express a wish of the caller.
        if not kind.__module__.startswith(("builtins", "megatron.core")):
            warn_once(
                f"The strategy {kind.__module__}.{kind.__qualname__} has no effect: Holdfast saves and loads "
                f"in one way."
            )
        inner = getattr(strategy, "base_strategy", strategy)  # inside FullyParallelSaveStrategyWrapper
        hint = getattr(inner, "separation_hint", None)
        if hint is not None:
            warn_once(
                f"separation_hint={hint!r} has no effect: each rank writes one file, whatever the keys in it."
            )


MARKS = (CONFIG, METADATA)
"""The files that `mark` writes."""


def mark(store: Store) -> None:
    """Write the files by which frameworks, and tools of torch DCP, recognise a distributed checkpoint.
    Holdfast looks for the index."""
    # `.metadata` alone would mark a save through DCP's functions.
    if write_after_commit(store, CONFIG, json.dumps(HOLDFAST_CONFIG)):
        dcp_metadata.mark(store, Flat(), save_id="")


def write_after_commit(store: Store, name: str, text: str) -> bool:
    """Replace a small file, and return whether it is written; only warn if that fails, because the checkpoint
    is committed."""
    try:
        replace_file(store, name, text.encode())
    except HoldfastError as error:
        log.warning("%s could not be written in %s: %s", name, store.url, error)
        return False
    return True
