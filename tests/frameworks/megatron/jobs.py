"""What the ranks of a megatron-core world do; importable, as processes need it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast._core.protocol.job import Job
from holdfast.errors import BadInput, HoldfastError, MissingTensors, RankFailed
from tests.frameworks.megatron.cpu import use_cpu, with_a_device
from tests.frameworks.megatron.fused import use_fused_adam
from tests.frameworks.megatron.models import Layout, Recipe, Training, parallel
from tests.support.collectives import counted
from tests.support.waiting import wait_until

JOB, SOON = Job(timeout=60, stall_timeout=30), Job(timeout=60)


@contextlib.contextmanager
def training(layout: Layout, recipe: Recipe, seed: int = 1) -> Iterator[Training]:
    use_cpu()
    if recipe.fused:
        use_fused_adam()
    device = with_a_device() if recipe.offload is not None else contextlib.nullcontext()
    with parallel(layout), device:
        yield Training(layout, recipe, seed)


@contextlib.contextmanager
def children_allowed() -> Iterator[None]:
    """Stock megatron-core saves through child processes and a manager; no rank leaves one behind."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["daemon"] = False
    try:
        yield
    finally:
        config["daemon"] = True
        filesystem_async._results_queue = None
        gc.collect()
        for child in multiprocessing.active_children():
            child.terminate()
            child.join(10)


def storable(metadata: dict[str, Any]) -> dict[str, Any]:
    """What stock megatron-core before 0.16 can pickle of content metadata; Megatron-LM leaves the same
    out."""
    return {key: value for key, value in metadata.items() if key != "dp_cp_group"}


def state_of(run: Training, is_loading: bool = False) -> dict[str, Any]:
    """Model, optimizer and common state as a training loop gives them to `save`."""
    from holdfast import megatron

    model = run.model_state()
    return {
        **model,
        "optimizer": megatron.optimizer_state_dict(run.optimizer, model, is_loading=is_loading),
        "iteration": run.iteration,
        "checkpoint_version": 3.0,
    }


def load_into(run: Training, folder: str, job: Job = JOB) -> dict[str, Any]:
    from holdfast import megatron

    loaded: dict[str, Any] = megatron.load(state_of(run, is_loading=True), folder, job=job)
    run.load_model(loaded)
    megatron.load_optimizer_state_dict(run.optimizer, loaded["optimizer"])
    run.iteration = loaded["iteration"]
    return loaded


def train_and_save(
    rank: int, layout: Layout, recipe: Recipe, folder: str, steps: int = 3, more: int = 2
) -> list[float]:
    """Losses of the steps before and after the save."""
    from holdfast import megatron

    with training(layout, recipe) as run:
        losses = [run.step() for _ in range(steps)]
        megatron.save(state_of(run), folder, content_metadata=run.metadata(), job=JOB)
        return losses + [run.step() for _ in range(more)]


def load_save_train(
    rank: int, layout: Layout, recipe: Recipe, folder: str, again: str, more: int = 2
) -> list[float]:
    """Load into another layout, save what was loaded, and train on."""
    from holdfast import megatron

    with training(layout, recipe, seed=2) as run:
        load_into(run, folder)
        megatron.save(state_of(run), again, content_metadata=run.metadata(), job=JOB)
        dist.barrier()
        return [run.step() for _ in range(more)]


def stock_save_both(
    rank: int, layout: Layout, recipe: Recipe, ours: str, stock: str
) -> tuple[list[str], list[str]]:
    """The same state saved by Holdfast and by stock megatron-core; the collectives that each issued."""
    from megatron.core import dist_checkpointing

    from holdfast import megatron

    with training(layout, recipe) as run:
        for _ in range(2):
            run.step()
        metadata = run.metadata()
        mine = counted(lambda: megatron.save(state_of(run), ours, content_metadata=metadata, job=JOB))
        mine += counted(lambda: load_into(run, ours))
        model = run.model_state()
        state = {
            **model,
            "optimizer": run.optimizer.sharded_state_dict(model, metadata=metadata),
            "iteration": run.iteration,
            "checkpoint_version": 3.0,
        }
        if rank == 0:
            os.makedirs(stock)
        dist.barrier()
        with children_allowed():
            theirs = counted(
                lambda: dist_checkpointing.save(state, stock, content_metadata=storable(metadata))
            )
        return mine, theirs


def stock_load_and_save(rank: int, layout: Layout, recipe: Recipe, folder: str, again: str) -> str:
    """Stock megatron-core loads a checkpoint; Holdfast saves what it loaded."""
    from megatron.core import dist_checkpointing

    from holdfast import megatron

    with training(layout, recipe, seed=5) as run:
        metadata = dist_checkpointing.load_content_metadata(folder)
        sharding = str(metadata["distrib_optim_sharding_type"])
        for _ in range(1):  # stock state_dict() wants a step first where Transformer Engine is absent
            run.step()
        model = run.model_state()
        state = {**model, "optimizer": run.optimizer.sharded_state_dict(model, True, metadata=run.metadata())}
        loaded = dist_checkpointing.load(state, folder)
        run.load_model(loaded)
        run.optimizer.load_state_dict(loaded["optimizer"])
        run.iteration = loaded["iteration"]
        megatron.save(state_of(run), again, job=JOB)
        return sharding


def installed(rank: int, layout: Layout, recipe: Recipe, folder: str, kind: str, alike: bool) -> list[float]:
    """What a framework does, through megatron-core's own names, after `install()`.

    alike: the load is given the metadata of the save, and not those in the checkpoint.
    """
    from megatron.core import dist_checkpointing

    import holdfast

    with training(layout, recipe) as run:
        metadata = run.metadata(distrib_optim_sharding_type=kind)
        run.step()
        original = dist_checkpointing.save
        holdfast.install(job=JOB, warm_up=False, session=False)
        try:
            model = run.model_state()
            state = {
                **model,
                "optimizer": run.optimizer.sharded_state_dict(model, metadata=metadata),
                "iteration": run.iteration,
            }
            dist_checkpointing.save(state, folder, content_metadata=metadata)
            assert dist_checkpointing.check_is_distributed_checkpoint(folder)
            after = [run.step() for _ in range(2)]
            saved = dist_checkpointing.load_content_metadata(folder)
            assert saved is not None
            assert dist_checkpointing.load_common_state_dict(folder)["iteration"] == 1
            model = run.model_state()
            asked = run.optimizer.sharded_state_dict(model, True, metadata=metadata if alike else saved)
            loaded, *keys = dist_checkpointing.load(
                {**model, "optimizer": asked}, folder, strict="return_all"
            )
            assert keys == [set(), set()]
            run.load_model(loaded)
            run.optimizer.load_state_dict(loaded["optimizer"])
            run.iteration = loaded["iteration"]
            again = [run.step() for _ in range(2)]
        finally:
            holdfast.uninstall()
        assert dist_checkpointing.save is original
        assert after == again
        return again


def save_by_some(rank: int, ranks: tuple[int, ...], folder: str, absent: int | None) -> str:
    """Ranks outside of `ranks` never call; one of them may be absent, too."""
    from holdfast import megatron

    use_cpu()
    from megatron.core.dist_checkpointing import ShardedTensor

    if rank not in ranks or rank == absent:
        return "never called"
    place = ranks.index(rank)
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((4, 3), float(rank)), (0, place, len(ranks)))
    }
    try:
        megatron.save(state, folder, job=Job(participants=ranks, timeout=30, stall_timeout=2.0))
    except RankFailed as error:
        return f"RankFailed {error.rank}"
    return "saved"


def save_slowly(rank: int, folder: str, slow: int, seconds: float) -> float:
    """One rank's storage takes a second for each of its many parts; returns the seconds that the save
    took."""
    from holdfast import events, megatron

    use_cpu()
    from megatron.core.dist_checkpointing import ShardedTensor

    begun, moved = time.monotonic(), {0}

    def wait(event: events.Event) -> None:
        done = event.fields.get("bytes_done", 0)
        if event.name == "save.writing" and done > max(moved) and len(moved) <= seconds:
            moved.add(done)
            time.sleep(1.0)

    state = {
        f"w{part}": ShardedTensor.from_rank_offsets(
            f"w{part}", torch.full((2, 2_000_000), float(rank)), (0, rank, 8)
        )
        for part in range(int(seconds))
    }
    stop = events.subscribe(wait) if rank == slow else lambda: None
    try:
        megatron.save(state, folder, job=Job(timeout=120, stall_timeout=4.0))
    finally:
        stop()
    return time.monotonic() - begun


def queue_of_requests(rank: int, folder: str) -> tuple[list[Any], list[str]]:
    """Megatron's loop around asynchronous saves, after `install()`; the collectives that it issued."""
    use_cpu()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    import holdfast

    seen: list[Any] = []
    calls = AsyncCallsQueue()

    def loop() -> None:
        for number in range(3):
            state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((2,), float(rank)), (0, rank, 8))}
            request = dist_checkpointing.save(state, f"{folder}/{number}", async_sharded_save=True)
            request.add_finalize_fn(lambda number=number: seen.append(f"finalized {number}"))
            seen.append(calls.schedule_async_request(request))
            seen.append(calls.maybe_finalize_async_calls(blocking=True))
            assert dist_checkpointing.check_is_distributed_checkpoint(f"{folder}/{number}")
        calls.close()
        seen.append(calls.get_num_unfinalized_calls())

    holdfast.install(job=JOB, warm_up=False, session=False)
    try:
        return seen, counted(loop)
    finally:
        holdfast.uninstall()


def iterations(rank: int, run: str) -> list[Any]:
    """A run folder, as Megatron-LM lays it out: what is newest, and what its tracker file says, over time."""
    use_cpu()
    from megatron.core.dist_checkpointing import ShardedTensor

    from holdfast import megatron

    checkpoints = megatron.Checkpoints(run, keep=2, job=SOON)

    def state(value: float) -> dict[str, Any]:
        return {
            "w": ShardedTensor.from_rank_offsets("w", torch.full((2, 3), value), (0, rank, 8)),
            "n": value,
        }

    def told() -> Any:
        dist.barrier()
        tracker = Path(run, "latest_checkpointed_iteration.txt")
        text = tracker.read_text() if tracker.exists() else None
        found = text, checkpoints.steps(), sorted(name for name in os.listdir(run) if name.startswith("iter"))
        dist.barrier()
        return found

    if rank == 0:
        os.makedirs(run)
    found: list[Any] = [checkpoints.load(state(-1.0)), told()]
    for iteration in (10, 20, 30):
        checkpoints.save(iteration, state(float(iteration)))
        checkpoints.close()
        found.append(told())
    try:
        checkpoints.save(40, {**state(40.0), "lock": threading.Lock()})
        checkpoints.close()
    except BadInput as error:
        found.append("common_state['lock']" in str(error))
    # The last rank to delete its files takes the folder away, beside what it does next.
    wait_until(lambda: not os.path.exists(f"{run}/iter_0000040"))
    found.append(told())
    loaded = checkpoints.load(state(-1.0))
    found.append((loaded["n"], loaded["w"].unique().tolist()))
    loaded = checkpoints.load(state(-1.0), 20)
    found.append((loaded["n"], loaded["w"].unique().tolist()))
    dist.barrier()
    if rank == 0:
        damage(os.path.join(run, "iter_0000030"))
    dist.barrier()
    found.append(checkpoints.load(state(-1.0))["n"])
    return found


def damage(folder: str) -> None:
    """Flip a bit of the first tensor in each data file."""
    for name in os.listdir(f"{folder}/data"):
        with open(f"{folder}/data/{name}", "r+b") as file:
            at = 8 + int.from_bytes(file.read(8), "little") + 3
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))


def strict_modes(rank: int, folder: str) -> dict[str, Any]:
    """What each strict mode gives where the checkpoint lacks one key and has one more."""
    from holdfast import megatron

    use_cpu()
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    def shard(key: str, value: float) -> Any:
        return ShardedTensor.from_rank_offsets(key, torch.full((2, 3), value), (0, rank, 8))

    made = {
        "a": shard("a", float(rank)),
        "more": {"b": shard("b", 1.0)},
        "rng": ShardedObject("rng", {"seed": rank}, (8,), (rank,)),
        "args": {"lr": 0.1},
    }
    megatron.save(made, folder, content_metadata={"version": 2}, job=SOON)

    def wanted() -> dict[str, Any]:
        return {
            "a": shard("a", -1.0),
            "c": shard("c", -1.0) if rank == 3 else None,
            "rng": ShardedObject("rng", None, (8,), (rank,)),
        }

    found: dict[str, Any] = {"common": megatron.load_common_state_dict(folder)}
    for mode in (
        "return_all",
        "return_unexpected",
        "ignore_all",
        "log_all",
        "raise_all",
        "assume_ok_unexpected",
    ):
        try:
            loaded = megatron.load(wanted(), folder, strict=mode, job=SOON)
        except MissingTensors as error:
            found[mode] = str(error)
            continue
        state, *keys = loaded if isinstance(loaded, tuple) else (loaded,)
        assert torch.equal(state["a"], torch.full((2, 3), float(rank)))
        assert state["rng"] == {"seed": rank}
        assert state["args"] == {"lr": 0.1}
        found[mode] = [sorted(some) for some in keys]
    found["metadata"] = {
        key: item.global_shape for key, item in megatron.load_sharded_metadata(folder).items()
    }
    found["plain"] = {
        key: tuple(value.shape) for key, value in megatron.load_plain_tensors(folder, job=SOON).items()
    }
    return found


def broken_factory(rank: int, folder: str, strict: str) -> tuple[str, float]:
    """One rank's state dict can't be taken apart, in a load."""
    from holdfast import megatron

    use_cpu()
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        if rank == 3:
            raise ArithmeticError("gate and up don't divide")
        return ShardedTensor.from_rank_offsets(key, data, (0, dist.get_rank(), 8))

    state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, rank, 8))}
    megatron.save(state, folder, job=SOON)
    wanted = {"w": ShardedTensorFactory("w", torch.zeros(2, 3), build, lambda loaded: loaded)}
    begun = time.monotonic()
    try:
        megatron.load(wanted, folder, strict=strict, job=JOB)
    except HoldfastError as error:
        return str(error), time.monotonic() - begun
    return "loaded", 0.0


def other_vocabulary(rank: int, folder: str) -> tuple[list[float], list[float]]:
    """An embedding that is padded to another size, and another dtype."""
    from holdfast import megatron

    use_cpu()
    from megatron.core.dist_checkpointing import ShardedTensor

    rows = torch.arange(8.0)[:, None].expand(8, 2).contiguous() + 10 * rank  # 64 rows in all

    def table(data: torch.Tensor) -> dict[str, Any]:
        return {"e": ShardedTensor.from_rank_offsets("e", data, (0, rank, 8), allow_shape_mismatch=True)}

    megatron.save(table(rows), folder, job=SOON)
    smaller = megatron.load(table(torch.full((7, 2), -1.0, dtype=torch.bfloat16)), folder, job=SOON)["e"]
    larger = megatron.load(table(torch.full((10, 2), -1.0)), folder, job=SOON)["e"]
    return smaller[:, 0].tolist(), larger[:, 0].tolist()


def stock_buckets_save(rank: int, layout: Layout, recipe: Recipe, ours: str, stock: str) -> None:
    """The same state saved by Holdfast, and by stock megatron-core as buckets (`dp_reshardable`)."""
    from megatron.core import dist_checkpointing

    from holdfast import megatron

    with training(layout, recipe) as run:
        for _ in range(2):
            run.step()
        megatron.save(state_of(run), ours, job=JOB)
        metadata = run.metadata(distrib_optim_sharding_type="dp_reshardable")
        model = run.model_state()
        optimizer = run.optimizer.sharded_state_dict(model, metadata=metadata)
        state = {**model, "optimizer": optimizer, "iteration": run.iteration, "checkpoint_version": 3.0}
        if rank == 0:
            os.makedirs(stock)
        dist.barrier()
        with children_allowed():
            dist_checkpointing.save(state, stock, content_metadata=storable(metadata))


def installed_loads_buckets(rank: int, layout: Layout, recipe: Recipe, stock: str, again: str) -> str:
    """After `install()`, a framework resumes from what it saved before; then Holdfast saves it."""
    from megatron.core import dist_checkpointing

    import holdfast

    with training(layout, recipe, seed=5) as run:
        run.step()
        holdfast.install(job=JOB, warm_up=False, session=False)
        try:
            metadata = dist_checkpointing.load_content_metadata(stock)
            assert metadata is not None
            model = run.model_state()
            state = {**model, "optimizer": run.optimizer.sharded_state_dict(model, True, metadata=metadata)}
            loaded = dist_checkpointing.load(state, stock)
            run.load_model(loaded)
            run.optimizer.load_state_dict(loaded["optimizer"])
            run.iteration = loaded["iteration"]
            dist_checkpointing.save(state_of(run), again)
        finally:
            holdfast.uninstall()
        return str(metadata["distrib_optim_sharding_type"])


def stock_save_of_a_chain(
    rank: int, layout: Layout, recipe: Recipe, folder: str, more: int = 2
) -> list[float]:
    """Stock's save, with the number of each optimizer of the chain before its names; losses after it."""
    from megatron.core import dist_checkpointing

    with training(layout, recipe) as run:
        run.step()
        metadata = run.metadata(chained_optim_avoid_prefix=False)
        model = run.model_state()
        state = {
            **model,
            "optimizer": run.optimizer.sharded_state_dict(model, metadata=metadata),
            "iteration": run.iteration,
            "checkpoint_version": 3.0,
        }
        if rank == 0:
            os.makedirs(folder)
        dist.barrier()
        with children_allowed():
            dist_checkpointing.save(state, folder, content_metadata=storable(metadata))
        return [run.step() for _ in range(more)]


def load_as_buckets(rank: int, layout: Layout, recipe: Recipe, folder: str) -> str:
    """The optimizer's state asked for as megatron-core describes it if it is told dp_reshardable."""
    from holdfast import megatron

    with training(layout, recipe) as run:
        model = run.model_state()
        megatron.save(state_of(run), folder, content_metadata=run.metadata(), job=JOB)
        how = run.metadata(distrib_optim_sharding_type="dp_reshardable")
        asked = run.optimizer.sharded_state_dict(model, is_loading=True, metadata=how)
        try:
            megatron.load({**model, "optimizer": asked}, folder, job=JOB)
        except BadInput as error:
            return str(error)
        return "loaded"


def save_without_memory(rank: int, folder: str, described_before: bool) -> str:
    """What is said, after `install()`, of an optimizer whose memory was released, as frameworks of
    reinforcement learning do while they generate."""
    from megatron.core import dist_checkpointing

    import holdfast

    with training(Layout(), Recipe(layers=2)) as run:
        run.step()
        model, metadata = run.model_state(), run.metadata()
        optimizers = getattr(run.optimizer, "chained_optimizers", [run.optimizer])
        states = [values for part in optimizers for values in part.optimizer.state.values()]

        def release() -> None:
            for key in ("exp_avg", "exp_avg_sq"):
                for values in states:
                    values[key].untyped_storage().resize_(0)

        holdfast.install(job=JOB, warm_up=False, session=False)
        try:
            if not described_before:
                release()
            state = {**model, "optimizer": run.optimizer.sharded_state_dict(model, metadata=metadata)}
            release()
            dist_checkpointing.save(state, folder, content_metadata=metadata)
        except BadInput as error:
            return str(error)
        finally:
            holdfast.uninstall()
        return ""
