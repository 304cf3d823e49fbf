"""Megatron-Bridge's `save_megatron_model`, which NeMo RL's import of Hugging Face weights ends in, on a world
of which only some ranks train."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast._core.protocol.job import Job
from tests.frameworks.megatron.cpu import use_cpu
from tests.frameworks.megatron.models import Layout, Recipe, build, config_of
from tests.support.stand_ins import stand_in_for

SMALL = Recipe(layers=2)


def groups_over(ranks: int, layout: Layout) -> None:
    """Megatron's groups over the first ranks of the world. All ranks of it make them, as `new_group`
    wants."""
    from megatron.core import parallel_state

    whole = dist.get_world_size
    dist.get_world_size = lambda group=None: ranks if group is None else whole(group)  # type: ignore[assignment]
    try:
        parallel_state.initialize_model_parallel(
            layout.tp, layout.pp, expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp
        )
    finally:
        dist.get_world_size = whole  # type: ignore[assignment]


def model_of(layout: Layout, seed: int) -> list[Any]:
    """A model whose configuration Bridge takes for one of its providers."""
    from megatron.bridge.training import model_load_save

    config = config_of(layout, SMALL)
    torch.manual_seed(seed)
    chunks = build(config, layout, SMALL)
    provider = type("Provider", (type(config), model_load_save.ModelProviderMixin), {})
    for chunk in chunks:
        chunk.config.__class__ = provider
    return chunks


def prepare(rank: int, train: int, layout: Layout) -> None:
    os.environ["RANK"] = str(rank)
    logging.disable(logging.WARNING)
    use_cpu()
    torch.cuda.get_rng_state = torch.get_rng_state  # type: ignore[assignment]
    stand_in_for("megatron-bridge")
    groups_over(train, layout)
    from megatron.core import tensor_parallel

    tensor_parallel.get_cuda_rng_tracker().set_states({"model-parallel-rng": torch.get_rng_state()})


def save_and_log(
    rank: int, folder: str, train: int, job: Job, late: float, layout: Layout, changes: str = ""
) -> tuple[str, float, str]:
    """Like `save_of_some` in groups over all ranks; also what this rank logs. The ranks that don't train call
    `late` seconds after the others; never if that is 0.

    changes: "object": add an object to what Megatron saves, as a state of a random generator; "forged": rank 1
    tells the others that the save is made without the last rank, as a stranger in the message store can.
    """
    import io

    import holdfast

    holdfast.install(warm_up=False, session=False, job=job)
    prepare(rank, dist.get_world_size(), layout)
    logging.disable(logging.NOTSET)
    said = io.StringIO()
    logging.getLogger("holdfast").addHandler(logging.StreamHandler(said))
    from megatron.bridge.training import checkpointing, model_load_save

    if changes == "object":
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        whole = checkpointing.generate_state_dict

        def generate(*args: Any, **named: Any) -> Any:
            number, count = dist.get_rank(), dist.get_world_size()
            return whole(*args, **named) | {"own": ShardedObject("own", number, (count,), (number,))}

        checkpointing.generate_state_dict = generate
    if changes == "forged" and rank == 1:
        from holdfast._core.saving.job import SaveJob
        from holdfast.errors import IdleRanks

        write = SaveJob.write

        def forge(*_: Any) -> Any:
            SaveJob.write = write  # type: ignore[method-assign]
            raise IdleRanks("forged", rank=3, details={"idle": [dist.get_world_size() - 1]})

        SaveJob.write = forge  # type: ignore[method-assign]
    model = model_of(layout, 3)
    if rank >= train:
        if not late:
            return "takes no part", 0.0, ""
        time.sleep(late)
    begun = time.monotonic()
    try:
        model_load_save.save_megatron_model(model, folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun, said.getvalue()
    return "saved", time.monotonic() - begun, said.getvalue()


def save_of_some(
    rank: int,
    folder: str,
    train: int,
    absent: int | None,
    job: Job | None,
    limit: float,
    spanned: int | None = None,
) -> tuple[str, float]:
    """What the ranks that train get from `save_megatron_model`.

    job: that of `install`; None: stock, whose own timeout is `limit` seconds. spanned: ranks that Megatron's
    groups contain; default those that train.
    """
    import holdfast

    if job is not None:
        holdfast.install(warm_up=False, session=False, job=job)
    layout = Layout(tp=2, ep=2)
    prepare(rank, spanned or train, layout)
    from megatron.bridge.training import model_load_save

    if job is None or job.timeout == limit:  # ours is never shorter than stock's
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit), dist.group.WORLD)
    if rank >= train or rank == absent:
        return "takes no part", 0.0
    model = model_of(layout, 3)
    begun = time.monotonic()
    try:
        model_load_save.save_megatron_model(model, folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "saved", time.monotonic() - begun
