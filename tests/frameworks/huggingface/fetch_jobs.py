"""What ranks do with what was fetched for them; importable by spawned processes."""

from __future__ import annotations

from typing import Any

import torch

from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import TENSOR
from holdfast._core.protocol.job import Job
from holdfast.errors import HoldfastError
from tests.frameworks.huggingface.jobs import load_into
from tests.frameworks.huggingface.models import TINY
from tests.frameworks.megatron.cpu import use_cpu
from tests.frameworks.megatron.jobs import state_of
from tests.frameworks.megatron.models import Layout, Training, build, config_of, parallel

Wanted = dict[str, list[Box]]


def wanted(rank: int, name: str, folder: str, layout: Layout) -> Wanted:
    """The boxes of published tensors that a real load of this rank reads."""
    from holdfast._core.loading import plan

    use_cpu()
    found: Wanted = {}
    original = plan.rows_of

    def seen(*arguments: Any) -> Any:
        rows = original(*arguments)
        for spec, box in zip(rows.table.specs, rows.table.boxes, strict=True):
            if spec.kind == TENSOR:
                found.setdefault(spec.name, []).append(box)
        return rows

    recipe = TINY[name].recipe
    plan.rows_of = seen
    try:
        with parallel(layout):
            load_into(build(config_of(layout, recipe), layout, recipe), folder)
    finally:
        plan.rows_of = original
    return found


def load_local(rank: int, name: str, folders: list[str], layout: Layout) -> tuple[str, dict[str, str]]:
    """Load from the folder of this rank's host: the same path everywhere, another disk on each. What the
    load says, and a digest of each parameter."""
    from holdfast._core.store.local import LocalStore
    from holdfast._frameworks.megatron import checkpointing

    use_cpu()
    recipe = TINY[name].recipe

    def on_this_host(place: object) -> LocalStore:
        store = LocalStore(folders[rank])
        store.url = "/local/model"
        return store

    original = checkpointing.open_store
    checkpointing.open_store = on_this_host
    try:
        with parallel(layout):
            chunks = build(config_of(layout, recipe), layout, recipe)
            try:
                load_into(chunks, "/local/model")
            except HoldfastError as error:
                return f"{type(error).__name__}: {error}", {}
            return "loaded", digests(chunks)
    finally:
        checkpointing.open_store = original


def digests(chunks: list[Any]) -> dict[str, str]:
    from holdfast._core.format.digest import digest, hex_digest

    found = {}
    for number, chunk in enumerate(chunks):
        for key, value in chunk.state_dict().items():
            if isinstance(value, torch.Tensor):
                data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                found[f"{number} {key}"] = hex_digest(digest(data))
    return found


def train_and_save(rank: int, layout: Layout, out: str) -> None:
    """A checkpoint of a model and its distributed optimizer, after a step."""
    from holdfast import megatron

    use_cpu()
    with parallel(layout):
        training = Training(layout, TINY["qwen3_moe"].recipe)
        training.step()
        megatron.save(
            state_of(training),
            out,
            content_metadata=training.metadata(),
            job=Job(timeout=60, stall_timeout=30),
        )


def resume(rank: int, layout: Layout, folders: list[str], weights_only: bool) -> tuple[str, dict[str, str]]:
    """Load a model, and its optimizer, from the folder of this rank's host. Digests are of what was
    loaded."""
    from holdfast import megatron
    from holdfast._core.format.digest import digest, hex_digest
    from holdfast._core.store.local import LocalStore
    from holdfast._frameworks.megatron import checkpointing

    use_cpu()

    def on_this_host(place: object) -> LocalStore:
        store = LocalStore(folders[rank])
        store.url = "/local/step"
        return store

    original = checkpointing.open_store
    checkpointing.open_store = on_this_host
    found: dict[str, str] = {}

    def look(value: object, path: str) -> None:
        if isinstance(value, torch.Tensor):
            data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[path] = hex_digest(digest(data))
        elif isinstance(value, dict):
            for key, inner in value.items():
                look(inner, f"{path}.{key}")
        elif isinstance(value, list | tuple):
            for at, inner in enumerate(value):
                look(inner, f"{path}[{at}]")

    try:
        with parallel(layout):
            training = Training(layout, TINY["qwen3_moe"].recipe, seed=7)
            state = training.model_state() if weights_only else state_of(training, is_loading=True)
            try:
                look(
                    megatron.load(state, "/local/step", job=Job(timeout=60, stall_timeout=30)),
                    "",
                )
            except HoldfastError as error:
                return f"{type(error).__name__}: {error}", {}
            return "loaded", found
    finally:
        checkpointing.open_store = original
