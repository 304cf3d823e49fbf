"""FSDP2 models with Adam against torch DCP, and metadata of uneven shards against Megatron-FSDP's gathers.

Eight ranks hold a mixture of experts of 2 GB (weights and two moments in float32), sharded by `fully_shard`. Both sides save the same state
dict; both load it into the layouts named, in place. Both fsync their files.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import GB, Bench, Rank, attempt, main, run_ranks, scratch

RANKS = 8
FASTER_SAVE, FASTER_LOAD, AMPLIFICATION, FASTER_METADATA = 1.5, 1.5, 1.05, 50.0
TENSORS, GATHERED = 20_000, 1_000
"""Described by ours, and by Megatron-FSDP, which gathers once a tensor: its time is multiplied."""
Sizes = tuple[int, int]
"""Layers, and width of the model."""


def build(
    rank: Rank, sizes: Sizes, ranks: tuple[int, ...], shape: tuple[int, ...], seed: int
) -> dict[str, Any]:
    """Model and optimizer states on a mesh of these ranks, as `get_state_dict` gives them; {} on other ranks."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    import holdfast

    layers, wide = sizes
    names = ("replicas", "shards") if len(shape) == 2 else ("shards",)
    mesh = DeviceMesh("cpu", torch.arange(len(ranks)).reshape(shape), mesh_dim_names=names)
    if rank.index not in ranks:
        return {}
    torch.manual_seed(seed)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, size in {
                "q": (wide, wide),
                "k": (wide, wide),
                "v": (wide, wide),
                "o": (wide, wide),
            }.items():
                setattr(self, name, nn.Parameter(torch.empty(size)))
            for name, size in {"w1": (24, wide // 2, wide), "w2": (24, wide, wide // 2)}.items():
                setattr(self, name, nn.Parameter(torch.empty(size)))
            self.norm = nn.Parameter(torch.ones(wide))

    model = nn.ModuleList(Layer() for _ in range(layers))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.data._local_tensor.uniform_()  # type: ignore[attr-defined]
        moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        for moment in moments.values():
            moment._local_tensor.uniform_()  # type: ignore[attr-defined]
        optimizer.state[parameter] = {"step": torch.tensor(10.0), **moments}
    model_state, optim_state = holdfast.get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optim_state}


def locals_of(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [found for value in state.values() for found in locals_of(value)]
    return [state._local_tensor] if hasattr(state, "_local_tensor") else []


def save_and_load(rank: Rank, sizes: Sizes, root: str, reps: int) -> dict[str, list[Any]]:
    """Seconds of each call on this rank, by side; for loads also bytes needed and read."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import holdfast

    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    everyone = tuple(range(rank.world))
    state = build(rank, sizes, everyone, (rank.world,), 1)
    found: dict[str, list[Any]] = {"bytes": [sum(part.nbytes for part in locals_of(state))]}
    sums = [float(part.double().sum()) for part in locals_of(state)]

    def keep(key: str, value: Any, rep: int) -> None:
        found.setdefault(key if rep else f"first {key}", []).append(value)

    for rep in range(reps + 1):
        for side in ("ours", "DCP") if rep % 2 else ("DCP", "ours"):
            path = Path(root, f"{side}-{rep}")
            call = (
                (lambda: holdfast.save(state, path))  # noqa: B023
                if side == "ours"
                else (lambda: dcp.save(state, checkpoint_id=path))  # type: ignore[attr-defined]  # noqa: B023
            )
            sample, _ = rank.together(call)
            keep(f"save {side}", sample.wall, rep)
            if rank.index == 0 and rep < reps:
                shutil.rmtree(path)
    for name, ranks, shape in (
        (f"the same {rank.world}", everyone, (rank.world,)),
        (f"HSDP 2 x {rank.world // 2}", everyone, (2, rank.world // 2)),
        (f"{rank.world - 2} ranks", everyone[:-2], (rank.world - 2,)),
    ):
        del state
        state = build(rank, sizes, ranks, shape, 2)
        group = dist.new_group(list(ranks))
        needed = sum(part.nbytes for part in locals_of(state))
        for rep in range(reps + 1):
            for side in ("ours", "DCP") if rep % 2 else ("DCP", "ours"):
                for part in locals_of(state):
                    part.zero_()
                path = Path(root, f"{side}-{reps}")
                report: list[Any] = []

                def load() -> None:
                    if rank.index not in ranks:  # noqa: B023
                        return
                    if side == "ours":  # noqa: B023
                        report.append(holdfast.load(state, path, job=holdfast.Job(participants=ranks)))  # noqa: B023
                    else:
                        dcp.load(state, checkpoint_id=path, process_group=group)  # type: ignore[attr-defined]  # noqa: B023

                sample, _ = rank.together(load)
                keep(f"load {name} {side}", (sample.wall, needed, sample.rchar), rep)
                if report:
                    keep(f"report {name} {side}", (report[0].bytes_needed, report[0].bytes_read), rep)
                if len(ranks) == rank.world and shape == (rank.world,):
                    assert [float(part.double().sum()) for part in locals_of(state)] == sums, side
                assert all(bool(part.any()) for part in locals_of(state) if part.numel()), (side, name)
        dist.destroy_process_group(group)
    return found


def metadata(rank: Rank, tensors: int, reps: int) -> dict[str, list[float]]:
    """Seconds to know where this rank's parts of so many uneven tensors lie, by side."""
    import torch
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from holdfast._core.base.collector import collector_paused
    from holdfast._core.layout.deferred_offset import place
    from holdfast._core.state.dtensor import CHUNKS
    from holdfast._core.state.flatten import build_shard_table, flatten
    from holdfast.megatron_fsdp import preprocess_state_dict_for_uneven_dtensor

    mesh = init_device_mesh("cpu", (rank.world,), mesh_dim_names=("dp_cp",))
    lengths = np.random.default_rng(0).integers(0, 5, (tensors, rank.world))
    begins = np.cumsum(lengths, axis=1) - lengths
    model, state = torch.nn.ParameterDict(), {}
    for at in range(tensors):
        shape = (int(lengths[at].sum()), 4)
        local = torch.zeros(int(lengths[at, rank.index]), 4)
        value = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(4, 1)
        )
        name = f"w{at}"
        state[name] = value
        model[name] = torch.nn.Parameter(value)
        begin = int(begins[at, rank.index]) * 4
        model[name].megatron_fsdp_slice = slice(begin, begin + local.numel())  # type: ignore[attr-defined]
    found: dict[str, list[float]] = {"gathers": [], "slices": [], "open": [], "added up": []}

    def forget() -> None:
        for value in state.values():
            for name in (CHUNKS, "__create_write_items__"):
                value._local_tensor.__dict__.pop(name, None)

    def check(those: dict[str, Any]) -> None:
        for at, value in enumerate(those.values()):
            assert (
                value._local_tensor.__create_chunk_list__()[0].offsets[0] == begins[at, rank.index]
                or not value._local_tensor.numel()
            )

    everyone = tuple(range(rank.world))
    some = dict(list(state.items())[:GATHERED])

    def describe() -> None:
        with collector_paused():  # as in a save
            build_shard_table(flatten(state, rank.index).leaves, rank.index, everyone)

    for _ in range(reps):
        forget()
        if len(found["gathers"]) < 3:
            sample, _ = rank.together(lambda: uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(some))
            check(some)
            found["gathers"].append(sample.wall * len(state) / len(some))
            forget()
        sample, _ = rank.together(lambda: preprocess_state_dict_for_uneven_dtensor({"model": state}, model))
        check(state)
        found["slices"].append(sample.wall)
        forget()
        sample, _ = rank.together(describe)
        found["open"].append(sample.wall)
        if rank.index == 0:  # what the commit does once for all ranks
            rows = np.asarray(
                [
                    (at, 0, 0, position, lengths[at, position], -1, lengths[at].sum())
                    for position in range(rank.world)
                    for at in range(tensors)
                ]
            )
            from bench.harness import measure

            sample, placed = measure(lambda: place(*rows.T))  # noqa: B023
            found_at = placed.shift.reshape(rank.world, tensors).T
            assert (found_at == begins)[lengths > 0].all()  # what is empty is nowhere
            found["added up"].append(sample.wall)
    return found


def slowest(results: list[dict[str, list[Any]]], key: str) -> list[float]:
    """Of each repetition, the slowest rank."""
    columns = [found[key] for found in results if found.get(key)]
    return [
        max(value[0] if isinstance(value, tuple) else value for value in row)
        for row in zip(*columns, strict=True)
    ]


def run(bench: Bench) -> None:
    sizes = (2, 256) if bench.quick else (6, 1024)
    with scratch("tmpfs") as folder:
        results = attempt(
            bench,
            "save and load",
            lambda: run_ranks(save_and_load, RANKS, (sizes, str(folder), bench.reps), limit_s=900),
        )
    if results:
        size = sum(found["bytes"][0] for found in results) / GB
        bench.compare(
            f"save {size:.2f} GB, FSDP2 over {RANKS} / DCP",
            slowest(results, "save ours"),
            slowest(results, "save DCP"),
            "s",
            limit=FASTER_SAVE,
            first=slowest(results, "first save ours")[0],
            peer_first=slowest(results, "first save DCP")[0],
        )
        names = [key[5:-5] for key in results[0] if key.startswith("load") and key.endswith("ours")]
        for number, name in enumerate(names):
            ours, theirs = f"load {name} ours", f"load {name} DCP"
            bench.compare(
                f"load {size:.2f} GB, FSDP2 over {RANKS} -> {name} / DCP",
                slowest(results, ours),
                slowest(results, theirs),
                "s",
                limit=FASTER_LOAD if number else None,
                first=slowest(results, f"first {ours}")[0],
                peer_first=slowest(results, f"first {theirs}")[0],
            )
            reports = [found[f"report {name} ours"] for found in results if f"report {name} ours" in found]
            read = [
                sum(row[1] for row in rep) / sum(row[0] for row in rep) for rep in zip(*reports, strict=True)
            ]
            chars = [found[theirs] for found in results]
            counted = [
                sum(row[2] for row in rep) / sum(row[1] for row in rep) for rep in zip(*chars, strict=True)
            ]
            bench.compare(
                f"load {size:.2f} GB, FSDP2 over {RANKS} -> {name}: bytes read / needed / DCP",
                read,
                counted,
                "x",
            )
            bench.target(
                f"load {size:.2f} GB, FSDP2 over {RANKS} -> {name}: bytes read / needed",
                read,
                AMPLIFICATION,
                "x",
            )
    tensors = 500 if bench.quick else TENSORS
    found = attempt(
        bench, "metadata", lambda: run_ranks(metadata, RANKS, (tensors, bench.reps), limit_s=1200)
    )
    if found:
        gathers = slowest(found, "gathers")
        opened = [a + b for a, b in zip(slowest(found, "open"), slowest(found, "added up"), strict=True)]
        what = f"offsets of {tensors:,} uneven tensors, {RANKS} ranks"
        gathered = f"Megatron-FSDP over {min(tensors, GATHERED):,} tensors, times {tensors / min(tensors, GATHERED):g}"
        note = f"all that a save does to describe its state, and what its commit adds up once; {gathered}"
        bench.compare(
            f"{what}: by their lengths, at the commit / Megatron-FSDP",
            opened,
            gathers,
            "s",
            limit=FASTER_METADATA,
            note=note,
        )
        bench.compare(
            f"{what}: from megatron_fsdp_slice / Megatron-FSDP",
            slowest(found, "slices"),
            gathers,
            "s",
            limit=FASTER_METADATA,
        )


if __name__ == "__main__":
    raise SystemExit(main("fsdp", run))
