"""What ranks do with a published model; importable by spawned processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from holdfast._core.protocol.job import Job
from holdfast.errors import HoldfastError
from tests.frameworks.huggingface.models import TINY, WORDS
from tests.frameworks.megatron.cpu import use_cpu
from tests.frameworks.megatron.models import LENGTH, Layout, build, config_of, describe, metadata, parallel


def load_into(chunks: list[Any], folder: Any) -> None:
    """Through `holdfast.megatron.load`, into weights that were something else."""
    from holdfast import megatron

    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(7)
    loaded = megatron.load(describe(chunks), folder, job=Job(timeout=60, stall_timeout=30))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}" if len(chunks) > 1 else "model"], strict=False)


def logits(rank: int, name: str, folder: str, out: str = "") -> tuple[float, float]:
    """The largest difference between the logits of transformers and of megatron-core, and the largest
    logit. out: where to save megatron-core's model."""
    from holdfast import megatron

    use_cpu()
    recipe = TINY[name].recipe
    published = TINY[name].auto.from_pretrained(folder, attn_implementation="eager").eval()
    with parallel(Layout()):
        chunks = build(config_of(Layout(), recipe), Layout(), recipe)
        load_into(chunks, folder)
        tokens = torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(3))
        places = torch.arange(LENGTH)[None].expand(2, -1)
        mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
        with torch.no_grad():
            ours = chunks[0](tokens, places, mask)[..., :WORDS]
            theirs = published(tokens).logits
        if out:
            megatron.save(describe(chunks), out, content_metadata=metadata(), job=Job(timeout=60))
    return float((ours - theirs).abs().max()), float(theirs.abs().max())


def load_and_save(
    rank: int,
    name: str,
    folder: str,
    layout: Layout,
    out: str,
    fingerprint: bool = False,
    adapter: str = "",
) -> int:
    """Into a layout of eight ranks, and from there into a checkpoint. Returns how many bytes this rank has of
    the model. adapter: a folder, to be merged."""
    from holdfast import Options, huggingface, megatron

    use_cpu()
    recipe = TINY[name].recipe
    with parallel(layout):
        chunks = build(config_of(layout, recipe), layout, recipe)
        load_into(chunks, huggingface.merged(folder, adapter) if adapter else folder)
        megatron.save(
            describe(chunks),
            out,
            content_metadata=metadata(),
            job=Job(timeout=60, stall_timeout=30, options=Options(fingerprint=fingerprint)),
        )
        return sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())


def fingerprints(rank: int, name: str, folder: str, layout: Layout) -> Any:
    """Those of a model that was loaded from a folder."""
    from holdfast import megatron
    from tests.support.collectives import counted

    use_cpu()
    recipe = TINY[name].recipe
    with parallel(layout):
        chunks = build(config_of(layout, recipe), layout, recipe)
        load_into(chunks, folder)
        state, found = describe(chunks), []
        assert (
            counted(lambda: found.append(megatron.fingerprint(state, job=Job(timeout=60, stall_timeout=30))))
            == []
        )
        return found[0]


def fingerprints_with_a_stale_copy(rank: int, name: str, folder: str, layout: Layout, stale: int) -> str:
    """The error, where one rank has one other element in a parameter that all data-parallel ranks have."""
    from holdfast import megatron
    from holdfast.errors import HoldfastError

    use_cpu()
    recipe = TINY[name].recipe
    with parallel(layout):
        chunks = build(config_of(layout, recipe), layout, recipe)
        load_into(chunks, folder)
        if rank == stale:
            spoiled = next(
                parameter
                for name, parameter in chunks[0].named_parameters()
                if "self_attention.linear_proj" in name
            )
            with torch.no_grad():
                spoiled.view(-1)[3] += 1
        try:
            megatron.fingerprint(describe(chunks), job=Job(timeout=60, stall_timeout=30))
        except HoldfastError as error:
            return f"{type(error).__name__}: {error.message}"
        return "told nothing"


def train_and_export(
    rank: int, name: str, folder: str, layout: Layout, run: str, out: str
) -> tuple[list[float], int]:
    """A published model, a step of training, a save with the optimizer's state, and an export of it, without
    a collective. Returns the losses, and the bytes that this rank has exported."""
    from holdfast import megatron
    from tests.frameworks.megatron.jobs import state_of, training
    from tests.support.collectives import counted

    with training(layout, TINY[name].recipe) as job:
        load_into(job.chunks, folder)
        job.optimizer.reload_model_params()
        losses = [job.step() for _ in range(2)]
        exported: list[int] = []
        with megatron.Checkpoints(run, job=Job(timeout=60, stall_timeout=30)) as checkpoints:
            checkpoints.save(2, state_of(job), content_metadata=job.metadata())

            def export() -> None:
                exported.append(checkpoints.export_hf(2, out, like=folder).bytes_written)

            assert counted(export) == []
        return losses, exported[0]


def try_to_load(rank: int, name: str, folders: list[str]) -> list[str]:
    """What a load of each folder says."""
    use_cpu()
    recipe = TINY[name].recipe
    said = []
    with parallel(Layout()):
        chunks = build(config_of(Layout(), recipe), Layout(), recipe)
        for folder in folders:
            try:
                load_into(chunks, folder)
                said.append("loaded")
            except HoldfastError as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def load_strictly(rank: int, name: str, folder: str, layout: Layout, strict: str) -> tuple[str, Any]:
    """What a load with this `strict` says, and what it returns beside the state dict."""
    from holdfast import megatron

    use_cpu()
    recipe = TINY[name].recipe
    with parallel(layout):
        chunks = build(config_of(layout, recipe), layout, recipe)
        asked = describe(chunks)
        if strict == "raise_unexpected":
            from megatron.core.dist_checkpointing import ShardedTensor

            asked["model"]["more"] = ShardedTensor.from_rank_offsets("decoder.more", torch.ones(2))
        try:
            loaded = megatron.load(asked, folder, strict=strict, job=Job(timeout=60, stall_timeout=30))
        except HoldfastError as error:
            return f"{type(error).__name__}: {error}", None
        return "loaded", loaded[1:] if isinstance(loaded, tuple) else None


def save_some(rank: int, name: str, folder: str, out: str) -> None:
    """A checkpoint of a published model, on one rank."""
    load_and_save(rank, name, folder, Layout(), out)
    assert (Path(out) / "index.safetensors").exists()


def export_together(rank: int, step: str, out: str, like: str, absent: int, steps: list[str]) -> str:
    """All ranks but one export; `steps` are checkpoints by rank, or the same for all."""
    from holdfast.huggingface import export
    from tests.support.collectives import counted

    if rank == absent:
        return ""
    said: list[str] = []

    def run() -> None:
        try:
            report = export(
                steps[rank] if steps else step,
                out,
                like=like,
                file_bytes=20_000,
                job=Job(timeout=60, stall_timeout=3.0),
            )
            said.append(f"{report.bytes_written} bytes, {report.tensors} tensors, {report.files} files")
        except HoldfastError as error:
            said.append(f"{type(error).__name__}: {error}")

    assert counted(run) == []
    return said[0]


def export_until(rank: int, step: str, out: str, like: str, quarters: int) -> tuple[int, int]:
    """An export that is killed after so many quarters, or with 0 never: its files, and the bytes written."""
    from holdfast.huggingface import export

    def stop(done: int, total: int) -> None:
        if quarters and done >= total * quarters // 4:
            os.kill(os.getpid(), signal.SIGKILL)

    report = export(step, out, like=like, file_bytes=40_000, job=Job(no_dist=True), progress=stop)
    return report.files, report.bytes_written


def import_until(rank: int, folder: str, out: str, share: float) -> None:
    """An import that is killed after a share."""
    from holdfast.huggingface import import_

    def stop(done: int, total: int) -> None:
        if done > share * total:
            os.kill(os.getpid(), signal.SIGKILL)

    import_(folder, out, job=Job(no_dist=True), progress=stop)


def save_sharded_adapter(rank: int, folder: str, adapter: str, out: str) -> list[str]:
    """A model that PEFT has wrapped and FSDP2 has sharded: filled from both folders, not merged, changed, and
    saved. Returns the names of tensors that were not filled rightly."""
    from peft import PeftModel
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    import holdfast
    from holdfast import huggingface

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    right = {key: value.clone() for key, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data.fill_(7)
    fully_shard(model)
    holdfast.load(model.state_dict(), huggingface.merged(folder, adapter), job=Job(timeout=60))
    state: dict[str, Any] = model.state_dict()
    wrong = [key for key, value in state.items() if not torch.equal(value.full_tensor(), right[key])]
    with torch.no_grad():
        for key, value in state.items():
            if "lora_" in key:
                value.mul_(2)
    holdfast.save(state, out, job=Job(timeout=60))
    return wrong
