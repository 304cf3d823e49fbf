"""What ranks do with a framework's own functions that load and save published weights; importable by spawned
processes.

Models are megatron-core's with the layers of Transformer Engine, whose names the frameworks know, made by the
framework. Only those layers' kernels are missing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from holdfast._core.protocol.job import Job
from tests.frameworks.megatron.cpu import use_cpu
from tests.frameworks.megatron.models import Layout
from tests.frameworks.megatron_bridge.jobs import groups_over
from tests.support.collectives import counted
from tests.support.stand_ins import stand_in_for
from tests.support.transformer_engine import use_layers

JOB = Job(timeout=60, stall_timeout=30)
WRONG = 7.0


@dataclass
class Model:
    """A model of a framework, and the functions of the framework that load and save it."""

    chunks: list[Any]
    load: Callable[[str], Any]
    save: Callable[[str], Any]
    bridge: Any = None

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            f"{number}.{name}": value.clone()
            for number, chunk in enumerate(self.chunks)
            for name, value in chunk.state_dict().items()
            if "_extra_state" not in name
        }

    def spoil(self) -> None:
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(WRONG)


def of_mbridge(folder: str, layout: Layout) -> Model:
    from mbridge import AutoBridge

    bridge = AutoBridge.from_pretrained(folder, dtype=torch.float32, make_vocab_size_divisible_by=8)
    bridge.hf_config.rope_theta = 10000.0  # transformers 5 keeps it elsewhere, where mbridge does not look
    chunks = bridge.get_model(None, bf16=False)
    return Model(
        chunks,
        lambda source: bridge.load_weights(chunks, source),
        lambda out: bridge.save_weights(chunks, out),
        bridge,
    )


def of_megatron_bridge(folder: str, layout: Layout, load: bool = False) -> Model:
    """load: when the model is made, as NeMo RL and verl do it."""
    stand_in_for("megatron-bridge weights")
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    scatter = MegatronParamMapping.scatter_to_tp_ranks

    def scatter_contiguous(self: Any, splits: Any, *args: Any, **named: Any) -> Any:
        return scatter(self, splits and [part.contiguous() for part in splits], *args, **named)

    # The copy to a GPU makes these parts contiguous. On the CPU there is none, and gloo takes them for that.
    MegatronParamMapping.scatter_to_tp_ranks = scatter_contiguous
    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider(load_weights=load)
    provider.tensor_model_parallel_size = layout.tp
    provider.pipeline_model_parallel_size = layout.pp
    provider.expert_model_parallel_size = layout.ep
    provider.expert_tensor_parallel_size = layout.etp
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.bf16 = provider.gradient_accumulation_fusion = False
    provider.finalize()
    chunks = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None, bf16=False
    )
    return Model(
        chunks,
        lambda source: bridge.load_hf_weights(chunks, source),
        lambda out: bridge.save_hf_pretrained(chunks, out),
        bridge,
    )


def of_mcore_bridge(folder: str, layout: Layout) -> Model:
    """As ms-swift makes it."""
    stand_in_for("mcore-bridge")
    import peft

    peft.__version__ = "0.19.0"
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from transformers import AutoConfig

    config = ModelConfig(
        **hf_to_mcore_config(AutoConfig.from_pretrained(folder)),
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    chunks = get_mcore_model(config)

    def save(out: str) -> None:
        config.bridge.save_weights(chunks, out)
        if dist.get_rank() == 0:  # ms-swift does it, which has a tokenizer at hand
            config.hf_config.save_pretrained(out)

    return Model(chunks, lambda source: config.bridge.load_weights(chunks, source), save, config.bridge)


MAKERS = {
    "mbridge": of_mbridge,
    "megatron-bridge": of_megatron_bridge,
    "mcore-bridge": of_mcore_bridge,
}


def prepare(ranks: int, layout: Layout) -> None:
    """Megatron's groups over the first ranks of the world."""
    logging.disable(logging.INFO)
    # As torchrun sets it: without it mcore-bridge takes every rank for the one that writes.
    os.environ["RANK"] = str(dist.get_rank())
    use_layers()
    use_cpu()
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        groups_over(ranks, layout)


@functools.cache
def model_of(framework: str, folder: str, layout: Layout) -> Model:
    """Made once a process: tests share it, and load into it before they look."""
    prepare(dist.get_world_size(), layout)
    return MAKERS[framework](folder, layout)


@contextlib.contextmanager
def installed(job: Job = JOB) -> Iterator[None]:
    import holdfast

    holdfast.install(warm_up=False, session=False, job=job)
    try:
        yield
    finally:
        holdfast.uninstall()


@contextlib.contextmanager
def warnings_of_holdfast() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("holdfast")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def load_and_save(
    rank: int, framework: str, folder: str, layout: Layout, stock: str, ours: str
) -> tuple[int, list[str], list[str]]:
    """Both ways, as stock and after `install()`. Returns the number of weights on this rank, those that stock
    and Holdfast load differently, and the collectives that Holdfast's load and save issued."""
    model = model_of(framework, folder, layout)
    model.spoil()
    model.load(folder)
    expected = model.weights()
    model.save(stock)
    dist.barrier()
    with installed():
        model.spoil()
        issued = counted(lambda: model.load(folder))
        found = model.weights()
        differ = [name for name, value in expected.items() if not torch.equal(value, found[name])]
        issued += counted(lambda: model.save(ours))
        # A second time, over what is there, as a trainer that repeats a step does.
        issued += counted(lambda: model.save(ours))
    return len(expected), differ, issued


def go_without(
    rank: int, framework: str, folder: str, layout: Layout, out: str, absent: int, installs: bool
) -> tuple[str, float]:
    """What the ranks get from a load, or with `out` from a save, that one rank never comes to."""
    model = model_of(framework, folder, layout)
    if out:
        model.load(folder)
    dist.barrier()  # making a model takes longer on one rank than on another
    if rank == absent:
        return "takes no part", 0.0
    if not installs:
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
    begun = time.monotonic()
    with installed(replace(JOB, stall_timeout=6)) if installs else contextlib.nullcontext():
        try:
            model.save(out) if out else model.load(folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "done", time.monotonic() - begun


def left(rank: int, framework: str, folder: str, other: str, layout: Layout, out: str) -> list[str]:
    """The warnings of a load and a save that are left to the framework, whose own functions then do it."""
    model = model_of(framework, folder, layout)
    model.load(folder)
    expected = model.weights()
    with installed(), warnings_of_holdfast() as said:
        model.spoil()
        model.load(other)
        assert all(torch.equal(value, expected[name]) for name, value in model.weights().items())
        model.save(out)
    return said


def refused(rank: int, framework: str, folders: list[str], layout: Layout) -> tuple[list[str], list[str]]:
    """What loads of folders say, and warnings."""
    model = model_of(framework, folders[0], layout)
    said = []
    with installed(), warnings_of_holdfast() as warned:
        for folder in folders:
            try:
                model.load(folder)
                said.append("loaded")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said, warned


def import_of_some(
    rank: int,
    folder: str,
    out: str,
    layout: Layout,
    train: int,
    absent: int | None,
    installs: bool,
    whole: bool,
) -> tuple[str, list[str]]:
    """What the ranks that train get from NeMo RL's import, which makes a Megatron checkpoint of a published
    model with Megatron-Bridge; and the collectives that its load issued. The others do something else.

    whole: with all that `install()` adds on its own account.
    """
    import holdfast

    os.environ["RANK"] = str(rank)
    limit = 4.0
    use_layers()  # which imports anew what `install` is to find
    if installs:
        job = Job(timeout=300, stall_timeout=limit if absent is not None else 60)
        holdfast.install() if whole else holdfast.install(warm_up=False, session=False, job=job)
    prepare(train, layout)
    torch.cuda.get_rng_state = torch.get_rng_state  # type: ignore[assignment]
    if rank < train:
        from megatron.core import tensor_parallel

        tensor_parallel.get_cuda_rng_tracker().set_states({"model-parallel-rng": torch.get_rng_state()})
        model = of_megatron_bridge(folder, layout)
    dist.barrier()  # making a model takes longer on one rank than on another
    if not installs:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit), dist.group.WORLD)
    if rank >= train or rank == absent:
        return "takes no part", []
    try:
        issued = counted(lambda: model.load(folder))
        from megatron.bridge.training.model_load_save import save_megatron_model

        save_megatron_model(model.chunks, out)
    except Exception as error:
        return f"{type(error).__name__}: {error}", []
    return "imported", issued if installs else []


def through_verl(
    rank: int, framework: str, folder: str, layout: Layout, steps: str, absent: int | None
) -> tuple[str, list[str]]:
    """What verl's manager says of a step with `hf_model` in it, which it saves and loads; and weights that are
    not as before."""
    import holdfast

    use_layers()
    holdfast.install(
        warm_up=False, session=False, job=replace(JOB, stall_timeout=30 if absent is None else 8)
    )
    prepare(dist.get_world_size(), layout)
    model = MAKERS[framework](folder, layout)
    dist.barrier()  # making a model takes longer on one rank than on another
    model.load(folder)
    expected = model.weights()
    manager = verl_manager(model, vanilla=framework == "mbridge")
    dist.barrier()
    if rank == absent:
        return "takes no part", []
    try:
        manager.save_checkpoint(steps, global_step=1)
    except Exception as error:
        return f"{type(error).__name__}: {error}", []
    model.spoil()
    manager.load_checkpoint(steps)
    found = model.weights()
    return "saved", [name for name, value in expected.items() if not torch.equal(value, found[name])]


def verl_manager(model: Model, vanilla: bool) -> Any:
    from tests.frameworks.verl.jobs import CONFIG, import_verl

    made = import_verl().MegatronCheckpointManager
    from verl.trainer.config import CheckpointConfig

    contents = ["hf_model"]
    hf_config = model.bridge.hf_config if vanilla else model.bridge.hf_pretrained.config
    return made(
        config=CONFIG,
        checkpoint_config=CheckpointConfig(save_contents=contents, load_contents=contents, async_save=False),
        model_config=None,
        transformer_config=model.chunks[0].config,
        role="actor",
        model=model.chunks,
        arch="Qwen3MoeForCausalLM",
        hf_config=hf_config,
        param_dtype=torch.float32,
        share_embeddings_and_output_weights=False,
        processing_class=None,
        optimizer=None,
        optimizer_scheduler=None,
        use_distributed_optimizer=True,
        bridge=model.bridge,
        provider=None if vanilla else SimpleNamespace(),
    )


def values(rank: int, folder: str, layout: Layout) -> tuple[list[str], list[str], float]:
    """A critic of verl, in 16 bits and wrapped for training. Returns the weights that stock and Holdfast load
    differently, the collectives of Holdfast's load, and the largest difference to what its output was."""
    prepare(dist.get_world_size(), layout)
    from mbridge import AutoBridge
    from mbridge.utils.post_creation_callbacks import make_value_model

    bridge = AutoBridge.from_pretrained(folder, dtype=torch.bfloat16, make_vocab_size_divisible_by=8)
    bridge.hf_config.rope_theta = 10000.0
    chunks = bridge.get_model(
        None,
        wrap_with_ddp=True,
        post_model_creation_callbacks=[make_value_model],
        ddp_config={"overlap_grad_reduce": False},
    )
    model = Model(chunks, lambda source: bridge.load_weights(chunks, source), lambda out: None, bridge)
    model.spoil()
    model.load(folder)
    expected = model.weights()
    model.spoil()
    with installed():
        issued = counted(lambda: model.load(folder))
    found = model.weights()
    assert len(expected) > 10
    differ = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    kept = [value for name, value in found.items() if name.endswith("output_layer.weight")]
    assert all(value.shape[0] == 1 for value in kept)
    return differ, issued, max([float((value - WRONG).abs().max()) for value in kept], default=0.0)
