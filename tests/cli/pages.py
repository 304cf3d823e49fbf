"""Checkpoints to look at: a run of eight ranks, and the index of 1,024 ranks with 5,000 tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast
from holdfast._core.format.columns import Columns, pad
from holdfast._core.format.index_layout import encode
from holdfast._core.format.names import data_file
from holdfast._core.layout.tensor import dtype_code
from holdfast._core.roster.memory import MemoryRoster
from tests.support.threads import on_ranks

HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror=document.title="owned">'


def small_state(rank: int, step: int, layers: int, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Rank `rank` of eight: two pipeline stages of four ranks, one expert a rank, the rest cut in four."""
    stage, part = divmod(rank, 4)
    state: dict[str, Any] = {"step": step, **(more or {})}
    for layer in range(stage, layers, 2):
        for kind, dtype in (("model", torch.bfloat16), ("optimizer.exp_avg", torch.float32)):
            name = f"{kind}.layers.{layer}"
            value = torch.full((64, 256), float(step), dtype=dtype)
            state[f"{name}.attention.qkv.weight"] = holdfast.Shard(value, (256, 256), (64 * part, 0))
            expert = torch.full((1, 96, 256), float(step), dtype=dtype)
            state[f"{name}.mlp.experts.weight"] = holdfast.Shard(expert, (4, 96, 256), (part, 0, 0))
            state[f"{name}.norm.weight"] = holdfast.Shard(
                torch.ones(256, dtype=dtype), (256,), (0,), replica=(part, 4)
            )
    if stage == 0:
        table = torch.full((512, 256), float(step), dtype=torch.bfloat16)
        state["model.embedding.weight"] = holdfast.Shard(table, (2048, 256), (512 * part, 0))
    return state


def small_run(folder: Path, more: dict[str, Any] | None = None) -> Path:
    """Eleven saves of eight ranks, of which some stay; the model grows on the way."""

    def train(roster: MemoryRoster) -> None:
        job = holdfast.Job(roster=roster, timeout=60, grid=holdfast.Grid(8, pp=2, ep=4))
        with holdfast.Checkpoints(
            folder, keep=3, keep_every=500, best="loss", best_mode="min", asynchronous=False, job=job
        ) as run:
            for i, step in enumerate(range(100, 1300, 100)):
                loss = 3.0 - 0.25 * i if step <= 700 else 1.6 + 0.01 * i
                run.save(
                    step,
                    small_state(roster.rank, step, 12 if step < 900 else 14, more),
                    metrics={"loss": round(loss, 3)},
                    notes={"commit": "1f3c9ab", "data": "mix-7"},
                    expected=None,
                )

    on_ranks(8, train)
    return folder


def large_index(folder: Path, ranks: int = 1024) -> Path:
    """The index of a run of `ranks` ranks in eight pipeline stages, with about 5,000 tensors; no data."""
    stages, layers, experts = 8, 64, 36
    per = ranks // stages
    rows: list[tuple[str, str, tuple[int, ...], list[int]]] = []
    for layer in range(layers):
        first = layer * stages // layers * per
        everyone = list(range(first, first + per))
        for kind, dtype in (("model", "bfloat16"), ("optimizer.exp_avg", "float32")):
            name = f"{kind}.decoder.layers.{layer}"
            rows.append((f"{name}.self_attention.linear_qkv.weight", dtype, (6144, 4096), everyone))
            rows.append((f"{name}.self_attention.linear_proj.weight", dtype, (4096, 4096), everyone))
            rows.append((f"{name}.input_layernorm.weight", dtype, (4096,), [first + layer % per]))
            for expert in range(experts):
                group = [first + (expert * per // experts + k) % per for k in range(4)]
                rows.append((f"{name}.mlp.experts.linear_fc1.weight{expert}", dtype, (3072, 4096), group))
    rows.append(("model.embedding.word_embeddings.weight", "bfloat16", (131072, 4096), list(range(per))))
    rows.append(("model.output_layer.weight", "bfloat16", (131072, 4096), list(range(ranks - per, ranks))))
    rows.sort()
    shapes, ends, boxes, sizes, files = [], [], [], [], []
    for _, _, shape, owners in rows:
        shapes.append(shape)
        cuts = [shape[0] * k // len(owners) for k in range(len(owners) + 1)]
        for low, high, owner in zip(cuts, cuts[1:], owners, strict=False):
            boxes.append((low, *[0] * (len(shape) - 1)))
            sizes.append((high - low, *shape[1:]))
            files.append(owner)
        ends.append(len(files))
    dtype = np.asarray([dtype_code(name, "") for _, name, _, _ in rows], "u1")
    counts = np.diff(ends, prepend=0)
    size, file = pad(sizes, 2, 1), np.asarray(files, "<i4")
    nbytes = size.prod(axis=1) * np.repeat(np.where(dtype == dtype_code("bfloat16", ""), 2, 4), counts)
    position, filled = np.zeros(len(file), "<i8"), np.zeros(ranks, "<i8")
    for i, (owner, length) in enumerate(zip(files, nbytes.tolist(), strict=True)):
        position[i] = filled[owner]
        filled[owner] += length
    block = 4 << 20
    columns = Columns(
        names=[name for name, *_ in rows],
        dtype=dtype,
        kind=np.zeros(len(rows), "u1"),
        ndim=np.asarray([len(shape) for shape in shapes], "u1"),
        shape=pad(shapes, 2, 1),
        chunk_end=np.asarray(ends, "<i8"),
        offset=pad(boxes, 2, 0),
        size=size,
        file=file,
        position=position,
        block=np.full(len(file), block, "<i8"),
        digest_end=np.cumsum(-(-nbytes // block), dtype="<i8"),
        digests=np.zeros(int((-(-nbytes // block)).sum()), "<u8"),
        file_names=[data_file("0123456789ab", rank, 0) for rank in range(ranks)],
        file_size=filled,
        file_rank=np.arange(ranks, dtype="<i4"),
    )
    about: dict[str, Any] = {"step": 24000, "ranks": ranks, "created": 1795490000.0}
    about["grid"] = {"world": ranks, "pp": stages, "ep": 32, "tp": 4}
    about["versions"] = {"python": "3.12.4", "holdfast": "0.1.0", "torch": "2.9.1", "numpy": "2.3.0"}
    folder.mkdir(parents=True)
    (folder / "index.safetensors").write_bytes(encode(columns, about, narrow=True))
    return folder
