"""`save` and `load` with the arguments of `megatron.core.dist_checkpointing`, without a collective."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from holdfast._core.background.queue import LANE, queue_of_this_thread
from holdfast._core.base.options import Options
from holdfast._core.base.threads import within
from holdfast._core.format.names import COMMON, SHARD
from holdfast._core.format.torch_objects import allowing
from holdfast._core.io.open_checkpoint import TorchDist, open_source
from holdfast._core.io.source import Source
from holdfast._core.layout.tensor import listed
from holdfast._core.loading.job import run_load
from holdfast._core.loading.request import LoadRequest
from holdfast._core.protocol.call import Call, begin_call
from holdfast._core.protocol.consensus import StepConsensus
from holdfast._core.protocol.job import Job, job_of
from holdfast._core.protocol.operation import agree, read_state
from holdfast._core.saving.job import SaveJob
from holdfast._core.state.leaf import Flat, Leaf
from holdfast._core.store.base import Folder, Store
from holdfast._core.store.local import open_store
from holdfast._core.store.run_folder import step_of
from holdfast._frameworks.arguments import taking_those_of
from holdfast._frameworks.foreign_errors import raising
from holdfast._frameworks.megatron import mcore, steps
from holdfast._frameworks.megatron.errors import of_megatron
from holdfast._frameworks.megatron.integrity import check_integrity
from holdfast._frameworks.megatron.metadata import (
    is_stock,
    load_tensors_metadata,
    mark,
    note_strategies,
    read_common,
)
from holdfast._frameworks.megatron.optimizer import as_we_save
from holdfast._frameworks.megatron.per_rank import nearest
from holdfast._frameworks.megatron.queue import Committed
from holdfast._frameworks.megatron.saving import own_containers, read_state_dict, save_at_once
from holdfast._frameworks.megatron.shards import take_data, to_load
from holdfast._models.views.published_model import PublishedModel
from holdfast.errors import BadInput, MissingTensors

log = logging.getLogger("holdfast")
AT_ONCE = 8
"""Maximum number of asynchronous saves in flight for a thread; a memory budget may allow fewer."""


@raising(of_megatron)
@taking_those_of(mcore.stock("save"))
def save(
    sharded_state_dict: mcore.StateDict,
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: object = None,
    common_strategy: object = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[mcore.StateDict], mcore.StateDict] | None = None,
    content_metadata: mcore.StateDict | None = None,
    *,
    async_strategy: object = None,
    verify_integrity: bool = False,
    expected: str | Iterable[str] | None = None,
    job: Job | None = None,
) -> mcore.AsyncRequest | None:
    """Save a sharded state dict as `megatron.core.dist_checkpointing.save` does, and commit it.

    By position it takes the arguments that the installed megatron-core takes there; the order differs between
    versions.

    The state dict may hold mcore's ShardedTensor, ShardedTensorFactory, ShardedObject and
    LocalNonpersistentObject; everything else is common state, taken from the lowest participant. Strategies,
    which select a writer in stock megatron-core, have no effect. Coverage is always checked, every byte has a
    digest, whatever `verify_integrity` says, and the checkpoint is durable when this returns. `expected` and
    `job` are as in `holdfast.save`.

    async_sharded_save: copy the state and save it in the background. The returned request is finalized once
        the save is committed; errors are raised then, on all ranks. Several saves are written in order, and
        starting one does not wait for those before it.

    Returns None, or with async_sharded_save an AsyncRequest. Raises `HoldfastError`s.
    """
    note_strategies(sharded_strategy, common_strategy, async_strategy)
    store = open_store(os.fspath(checkpoint_dir))
    # megatron-core's arguments have no step, but the folder's name usually contains it.
    step = step_of(Path(checkpoint_dir).name)
    job = job_of(job)

    def make(call: Call, without: tuple[int, ...] = ()) -> SaveJob:
        return read_state_dict(
            store,
            sharded_state_dict,
            call,
            content_metadata=content_metadata,
            compares=validate_access_integrity,
            preprocess=preprocess_common_before_consistancy_check,
            without=without,
            step=step,
            expected=expected,
            options=job.options,
            # After the commit, because frameworks take a folder with this file for a checkpoint.
            mark=lambda: mark(store),
        )

    if not async_sharded_save:
        save_at_once(make, begin_call(job))
        return None
    pending = queue_of_this_thread().save(
        lambda: make(begin_call(job).lane(LANE)), store.url, step, AT_ONCE, job.options.host_memory_budget
    )
    title = f"choice of the call that finalizes the save of {store.url}"
    # On a lane of its own, because it runs in the background while training makes other calls.
    consensus = StepConsensus(title, f"{store.url}|finalize", lambda: begin_call(job).lane("finalize"))
    return mcore.AsyncRequest(None, (), [Committed(pending, consensus)])


@raising(of_megatron)
@taking_those_of(mcore.stock("load"))
def load(
    sharded_state_dict: mcore.StateDict,
    checkpoint_dir: Folder,
    sharded_strategy: object = None,
    common_strategy: object = None,
    validate_access_integrity: bool = True,
    strict: mcore.StrictHandling | str = mcore.StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    verify_integrity: bool = False,
    process_group: ProcessGroup | None = None,
    job: Job | None = None,
) -> mcore.Loaded:
    """Load what a sharded state dict asks for, as `megatron.core.dist_checkpointing.load` does. By position
    it takes the arguments of the installed version, as `save`.

    Tensors are read from any layout into the memory of the state dict's ShardedTensors, and converted to
    their dtype. Every byte of a Holdfast checkpoint is verified; `torch_dist` checkpoints also load, but have
    no digests.

    validate_access_integrity: has no effect: each rank reads what it asks for, whoever else asks for it.
    verify_integrity: of a checkpoint that stock megatron-core saved with it, compare every file with the
        list in `integrity.json` first. Of a Holdfast checkpoint, a load verifies what it reads in any case.
    process_group: whose ranks take part, instead of the job's participants.
    strict: a `StrictHandling` or its value. Unexpected keys are those that this rank asks for and the
        checkpoint does not have; missing keys are in the checkpoint, and no participant asks for them.

    Returns the state dict with loaded values and common state; for RETURN_UNEXPECTED and RETURN_ALL a tuple
    of it, the missing and the unexpected keys. Raises `HoldfastError`s.
    """
    note_strategies(sharded_strategy, common_strategy)
    store, job = open_store(checkpoint_dir), job_of(job)
    if process_group is not None:
        job = replace(job, participants=process_group)
    call = begin_call(job)
    if verify_integrity:
        check_integrity(store, call)
    return load_state(store, sharded_state_dict, strict, call, job.options)


def load_state(
    store: Store,
    sharded_state_dict: mcore.StateDict,
    strict: mcore.StrictHandling | str,
    call: Call,
    options: Options | None = None,
    left_out: frozenset[str] = frozenset(),
    may_be_left: Callable[[str], bool] | None = None,
    left_together: Callable[[str], bool] = lambda name: False,
) -> mcore.Loaded:
    """Load from a store; otherwise as `load`.

    left_out, may_be_left, left_together: as in `LoadRequest`; None: according to `strict`.
    """
    options = options or Options()
    request = _Request(store, mcore.parse_strict_flag(strict), options.nearest_rng)
    rank, limit = call.rank, call.deadline.left()

    def prepare() -> None:
        # The protocol bounds everything after it; before it, `within` bounds the time for storage.
        request.take_apart(sharded_state_dict)
        within(limit, f"looking into {store.url}", request.look)
        if request.lacks_buckets:
            request.take_apart(as_we_save(sharded_state_dict))
            within(limit, f"looking into {store.url}", request.look)
        request.check_buckets()

    trouble = read_state(prepare, rank)
    # Also on a rank with an error: the others wait for its keys here, and get the error in the load.
    missing = request.missing(call)
    common: list[mcore.StateDict] = []

    def collect(rank: int) -> Flat:
        if trouble is not None:
            raise trouble
        request.refuse(missing)
        leaves = to_load(request.asked, request.unexpected, request.is_stock, request.stored_as)
        # Optional: stock megatron-core stores common state in a file of its own, which `look` has read.
        return Flat([*leaves, Leaf(COMMON, None, common.append, optional=True, private=True)])

    refuses = request.mode == mcore.StrictHandling.RAISE_ALL
    with allowing(mcore.safe_types()):
        load = LoadRequest(
            store=store,
            collect=collect,
            call=call,
            options=options,
            signature=request.mode.value,
            left_out=left_out,
            tells_rest=False,  # `request.missing` does
            may_be_left=may_be_left or (lambda name: not refuses),
            left_together=left_together,
            lenient="strict='log_unexpected'",
        )
        report = run_load(load)
    loaded = request.give(common[0] if common else request.common)
    if mcore.StrictHandling.requires_returning_mismatch_keys(request.mode):
        return loaded, missing | set(report.unasked), request.unexpected
    return loaded


BUCKETS = "optimizer.distributed.dp_group_idx_"
"""Part of the keys in megatron-core's dp_reshardable description of an optimizer, bucket by bucket."""


class _Request:
    """The state dict that one rank loads, split into its parts and merged again as in megatron-core."""

    def __init__(self, store: Store, mode: mcore.StrictHandling, nearest_rng: bool) -> None:
        self.store, self.mode, self.nearest_rng = store, mode, nearest_rng
        self.stored_as: dict[str, str] = {}
        """The stored name for a key or a rank's object, where it differs."""
        self.asked: list[mcore.ShardedTensor] = []
        self.unexpected: set[str] = set()
        """Keys that are asked for and not in the checkpoint; filled only if the mode needs them."""
        self.is_stock = False
        """Is the checkpoint stock megatron-core's, with each object in a list of one?"""
        self.lacks_buckets = False
        """Is an optimizer's state requested in a stock format that the checkpoint does not have?"""
        self.common: mcore.StateDict = {}
        """The common state of a stock checkpoint."""
        self._have: set[str] = set()
        """Keys in the checkpoint; filled only if the mode needs them."""
        self._steps: object = None
        """The note of optimizers' steps in the index."""

    def take_apart(self, sharded_state_dict: mcore.StateDict) -> None:
        # As stock does: loaded values must not be quantized before the main parameters are set from them.
        mcore.force_all_tensors_to_non_fp8(sharded_state_dict)
        # A copy of the containers, because the calls below change them in place.
        state = own_containers(sharded_state_dict)
        self._factories, _ = mcore.extract_matching_values(
            state, lambda value: isinstance(value, mcore.ShardedTensorFactory), return_lists_as_dicts=True
        )
        mcore.apply_factories(state)
        self._local, state = mcore.extract_nonpersistent(state)
        mcore.dict_list_map_inplace(lambda value: value.unwrap(), self._local)
        self._state, _ = mcore.extract_sharded_base(state)
        self.asked = list(mcore.nested_values(self._state))

    def look(self) -> None:
        """Read names, notes and common state from the checkpoint before the load."""
        asked = {item.key for item in self.asked}
        with open_source(self.store) as source:
            names = set(source.names())
            notes = source.about.get("notes")
            self._steps = notes.get(steps.NOTE) if isinstance(notes, dict) else None
            if isinstance(source, TorchDist):
                self.is_stock, self.common = is_stock(self.store), read_common(self.store)
            self.stored_as = nearest(self.asked, names, self.store.url, self.nearest_rng)
            self.stored_as |= _in_chains(asked, names)
            if mcore.StrictHandling.requires_explicit_ckpt_mismatch_check(self.mode):
                self._have = self._keys(source)
                self.unexpected = {key for key in asked if self.stored_as.get(key, key) not in self._have}
        buckets = {key for key in asked if BUCKETS in key}
        self.lacks_buckets = bool(buckets) and buckets.isdisjoint(map(_key, names))

    def check_buckets(self) -> None:
        """Raise BadInput if the checkpoint lacks the requested format of an optimizer's state."""
        if self.lacks_buckets:
            raise BadInput(
                f"The optimizer's state is asked for as megatron-core's dp_reshardable; "
                f"{self.store.url} holds it as fully_reshardable, whatever the save was told.",
                hint="Give optimizer.sharded_state_dict() the checkpoint's own metadata, "
                "load_content_metadata(folder), or none.",
            )

    def _keys(self, index: Source) -> set[str]:
        """Return the keys in a checkpoint; for a published model, this rank's keys that it can provide. The
        load itself detects published weights that no rank requests."""
        keys = {_key(name) for name in index.names()} - {COMMON}
        if not isinstance(index, PublishedModel):
            return keys
        view, asked = index.view_if_known, {item.key for item in self.asked}
        made = {key for key in asked if view is not None and view.knows(key)}
        # Transformer Engine's extra state: published models don't have it, and loads don't need it.
        return (asked & keys) | made | {key for key in asked if "_extra_state" in key}

    def missing(self, call: Call) -> set[str]:
        """Return the keys that no rank asks for, if the mode needs them."""
        if not mcore.StrictHandling.requires_global_app_metadata(self.mode):
            return set()

        def unasked(asked: dict[int, list[str]]) -> list[str]:
            return sorted(self._have.difference(*asked.values()))

        title = f"comparison of the keys in {self.store.url}"
        # Only keys of the checkpoint: others can't be missing.
        mine = sorted({self.stored_as.get(item.key, item.key) for item in self.asked} & self._have)
        place = f"{self.store.url}|{self.mode.value}"
        return set(agree(title, place, unasked, call, mine))

    def refuse(self, missing: set[str]) -> None:
        """Raise or log the differences, as the mode says."""
        strict = mcore.StrictHandling
        differences = [
            f"{len(names)} {what}: {listed(sorted(names))}"
            for names, what in (
                (self.unexpected, "are asked for and not in the checkpoint"),
                (missing, "are in the checkpoint and no rank asks for them"),
            )
            if names
        ]
        if not differences:
            return
        text = f"The keys of the state dict and of {self.store.url} differ: {'; '.join(differences)}."
        if self.mode in (strict.LOG_UNEXPECTED, strict.LOG_ALL):
            log.warning(text)
        elif self.mode in (strict.RAISE_UNEXPECTED, strict.RAISE_ALL):
            raise MissingTensors(
                text, details={"missing": sorted(missing)[:100], "unexpected": sorted(self.unexpected)[:100]}
            )

    def give(self, loaded: mcore.StateDict) -> mcore.StateDict:
        """Merge common state, local objects and loaded values into the whole state dict."""

        def is_unexpected(value: mcore.ShardedTensor) -> bool:
            return value.key in self.unexpected

        _, state = mcore.extract_matching_values(self._state, is_unexpected)
        _, factories = mcore.extract_matching_values(
            self._factories, is_unexpected, return_lists_as_dicts=True
        )
        mcore.dict_list_map_inplace(take_data, state)
        # In megatron-core's order: the rest is merged into common state, and factories come last, because
        # they join what was loaded in parts.
        steps.complete(loaded, self._steps)
        mcore.merge(loaded, self._local)
        mcore.merge(loaded, state)
        mcore.apply_factory_merges(loaded, factories)
        return loaded


@raising(of_megatron)
@taking_those_of(mcore.stock("load_plain_tensors"))
def load_plain_tensors(
    checkpoint_dir: str | os.PathLike[str], *, verify_integrity: bool = False, job: Job | None = None
) -> mcore.StateDict:
    """Load every tensor of a checkpoint, whole, by key. verify_integrity, job: as for `load`."""
    asked = load_tensors_metadata(checkpoint_dir)
    loaded: mcore.StateDict = load(asked, checkpoint_dir, verify_integrity=verify_integrity, job=job)
    return {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}


def _key(name: str) -> str:
    """Return the key of a ShardedObject from its unique name; other names are keys already."""
    return name.partition(SHARD)[0]


def _in_chains(asked: set[str], names: set[str]) -> dict[str, str]:
    """Map keys of optimizers to stored names with the prefix `chained_<number>.`, or without it: stock writes
    the prefix for a chain of optimizers without `chained_optim_avoid_prefix`, and for a part of the state
    with dp_reshardable. Each parameter is in only one optimizer of the chain."""
    chained = {name.partition(".")[2]: name for name in names if name.startswith("chained_")}
    bare = {key: key.partition(".")[2] for key in asked - names if key.startswith("chained_")}
    return {
        **{key: chained[key] for key in (asked - names) & chained.keys()},
        **{key: name for key, name in bare.items() if name in names},
    }
