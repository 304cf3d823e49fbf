"""Planning at the size of Qwen3-30B-A3B: as many tensors, each of a few bytes, saved through both adapters.

48 layers of 128 experts under Megatron's homogeneous keys (all layers and experts of fc1 are one global
tensor), weight, main parameter and two moments: what verl 2238 saves, without its bytes. Eight ranks, EP 8 (each
has 16 experts) and EP 1 (each has all, as one of eight copies). The peer plans pairwise: it is run with fewer layers
and its growth exponent is fitted; where a figure is extrapolated, the row says so.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from bench.harness import Bench, Rank, attempt, main, measure, run_ranks, scratch
from bench.peers import mcore_on_cpu
from bench.scale import large_in_a_process
from holdfast._core.protocol.job import Job

RANKS, EXPERTS, LAYERS = 8, 128, 48
CLASSES = ("", "optimizer.state.param.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
FASTER = 100.0
MEMORY_MIB = 100.0
COMMIT_S = {1_024: 30.0, 10_240: 300.0}
F, H = 2, 4


def sharded(rank: int, layers: int, ep: int) -> dict[str, Any]:
    """One rank's experts as ShardedTensors, with the keys, shapes and replicas that megatron-core makes."""
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    def weight(shape: tuple[int, int], value: float) -> Any:
        return torch.nn.Parameter(torch.full(shape, value), requires_grad=False)

    copies = RANKS // ep
    mine = range(rank % ep * (EXPERTS // ep), (rank % ep + 1) * (EXPERTS // ep))
    replica = (0, 0, rank // ep)
    found: dict[str, Any] = {}
    for kind in CLASSES:
        for layer in range(layers):
            for expert in mine:
                place = ((0, layer, layers), (1, expert, EXPERTS))
                how: dict[str, Any] = {"replica_id": replica, "prepend_axis_num": 2}
                key = f"{kind}decoder.layers.mlp.experts.experts.linear_fc1.weight"
                for half in (0, 1):
                    name = f"{key}.{layer}.{expert}.{half}"
                    data = weight((F, H), float(rank % ep + half))
                    found[name] = ShardedTensor.from_rank_offsets(key, data, *place, (2, half, 2), **how)
                key = f"{kind}decoder.layers.mlp.experts.experts.linear_fc2.weight"
                data = weight((H, F), float(rank % ep))
                found[f"{key}.{layer}.{expert}"] = ShardedTensor.from_rank_offsets(key, data, *place, **how)
    assert copies * ep == RANKS
    return found


def ours(rank: Rank, layers: int, ep: int, folder: str, reps: int) -> list[tuple[float, int]]:
    """Wall seconds and peak bytes above the state of each save; the first is the first of the process."""
    mcore_on_cpu()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    from holdfast import megatron

    found = []
    for rep in range(reps):
        state = sharded(rank.index, layers, ep)
        rank.barrier()
        sample, _ = measure(lambda: megatron.save(state, f"{folder}/ours-{rep}", job=Job(timeout=300)))  # noqa: B023
        found.append((sample.wall, sample.peak))
        rank.barrier()
    return found


def theirs(rank: Rank, layers: int, ep: int, folder: str, reps: int) -> list[tuple[float, int]]:
    mcore_on_cpu()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy())
    found = []
    for rep in range(reps):
        state = sharded(rank.index, layers, ep)
        path = Path(folder, f"theirs-{rep}")
        path.mkdir(parents=True, exist_ok=True)
        rank.barrier()
        sample, _ = measure(lambda: dist_checkpointing.save(state, str(path), strategy))  # noqa: B023
        found.append((sample.wall, sample.peak))
        rank.barrier()
    return found


def slowest(results: list[list[tuple[float, int]]]) -> list[float]:
    """Per save, the wall seconds of the slowest rank."""
    return [max(rank[rep][0] for rank in results) for rep in range(len(results[0]))]


def planning(bench: Bench, ep: int, folder: Path) -> None:
    layers = 6 if bench.quick else LAYERS
    few, many = (1, 2) if bench.quick else (6, 12)
    repeats = 3
    mine = attempt(
        bench,
        f"ours, EP{ep}",
        lambda: run_ranks(ours, RANKS, (layers, ep, str(folder), repeats), limit_s=300),
    )
    same = attempt(
        bench,
        f"ours, EP{ep}",
        lambda: run_ranks(ours, RANKS, (many, ep, str(folder / "same"), repeats), limit_s=300),
    )
    peer = {}
    for count in (many,) if bench.quick else (few, many):
        where = str(folder / f"peer{count}")
        peer[count] = attempt(
            bench,
            f"mcore, EP{ep}",
            lambda: run_ranks(theirs, RANKS, (count, ep, where, 2), limit_s=900),  # noqa: B023
        )
        shutil.rmtree(where, ignore_errors=True)
    if not (mine and same and all(peer.values())):
        return
    wall, large = slowest(mine), slowest(peer[many])
    what = f"{many} layers x {EXPERTS} experts, {3 * len(CLASSES) * EXPERTS * many:,} chunks, EP{ep}"
    bench.compare(f"first save of {what} / mcore", slowest(same)[:1], large[:1], "s")
    bench.compare(f"repeated save of {what} / mcore", slowest(same)[1:], large[1:], "s")
    if not bench.quick:
        small = slowest(peer[few])
        for which, at in (("first", 0), ("repeated", 1)):
            grown = math.log(large[at] / small[at]) / math.log(many / few)
            bench.compare(
                f"{which} save of {layers} layers x {EXPERTS} experts, EP{ep} / mcore, extrapolated",
                wall[:1] if at == 0 else wall[1:],
                [large[at] * (layers / many) ** grown],
                "s",
                limit=FASTER,
                note=f"mcore at {few} and {many} layers: {small[at]:.1f} and {large[at]:.1f} s, exponent {grown:.2f}",
            )
    peak = [max(rank[rep][1] for rank in mine) / 2**20 for rep in range(repeats)]
    bench.target(
        f"memory above the state, worst rank, {layers} layers, EP{ep}", [max(peak)], MEMORY_MIB, "MiB"
    )


def commit(bench: Bench, world: int, limit: float, folder: Path) -> None:
    found = attempt(bench, f"commit of {world}", lambda: [large_in_a_process(world, 16, folder / "index")])
    if found:
        bench.target(
            f"commit of DeepSeek-V3 671B over {world:,} simulated ranks",
            [found[0]["seconds"]],
            limit,
            "s CPU",
            note=f"{int(found[0]['chunks']):,} chunks, {found[0]['peak_gib']:.1f} GiB",
        )


def run(bench: Bench) -> None:
    with scratch("tmpfs") as folder:
        for ep in (8,) if bench.quick else (8, 1):
            planning(bench, ep, folder / f"ep{ep}")
        for world, limit in COMMIT_S.items():
            if world == min(COMMIT_S) or not bench.quick:
                commit(bench, world, limit, folder)


if __name__ == "__main__":
    raise SystemExit(main("megatron", run))
