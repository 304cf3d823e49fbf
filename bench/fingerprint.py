"""Fingerprints of weights in memory beside the checkers of other projects, on one thread.

A fingerprint is that of the whole tensor in any layout, and adds up over ranks; the others are of the bytes that one
rank has, in their order, and tell nothing of a tensor that another rank has cut otherwise. Their arithmetic is typed
from their sources, because none of them can be imported without a GPU's libraries or a framework:

- sha256 of each tensor: SGLang 0.5.23, `srt/utils/weight_checker.py`, action "checksum" (`tensor_hash` on a CPU), and
  `compute_tensor_sha256` of its diffusion runtime;
- hash_tensor: verl 0.9.1, `checkpoint_engine/delta_sync/encode.py`, `checksum`: an exclusive or of 64-bit words, to which
  their order makes no difference;
- compare: SGLang's WeightChecker, action "compare", which slime's and miles' `--check-weight-update-equal` calls: in
  pieces of 64 Mi elements, the difference from a snapshot, which takes as much memory as the weights.

AReaL 1.0.4 has no such checker; what PyPI has as nemo-rl and slime are placeholders without code. A figure is GB of
weights by second of processor time, since other work on the machine takes none of that.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.harness import GB, Bench, Rank, Sample, main, measure, run_ranks

State = dict[str, torch.Tensor]
_PIECE = 64 * 1024 * 1024
NORMS, WIDTH = 5000, 2048


def ours(state: State) -> Any:
    import holdfast

    return holdfast.fingerprint(state, job=holdfast.Job(no_dist=True))


def sha256(state: State) -> dict[str, int]:
    found = {}
    for name, tensor in state.items():
        hasher = hashlib.sha256()
        hasher.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
        found[name] = int.from_bytes(hasher.digest()[:8], byteorder="big", signed=False)
    return found


def hash_tensor(state: State) -> dict[str, int]:
    return {name: int(torch.hash_tensor(tensor).item()) for name, tensor in state.items()}


def compare(snapshot: State, state: State) -> bool:
    same = True
    for name, tensor in state.items():
        before, after = snapshot[name].reshape(-1), tensor.reshape(-1)
        for start in range(0, len(after), _PIECE):
            one, other = before[start : start + _PIECE], after[start : start + _PIECE]
            same = same and bool(torch.all((other.float() - one.float()).abs() == 0))
    return same


def states(quick: bool) -> dict[str, Callable[[], State]]:
    """Makes each state."""
    generator = torch.Generator().manual_seed(1)

    def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).to(dtype)

    def experts(dtype: torch.dtype, number: int) -> State:
        state = {f"layers.0.experts.{i}.down_proj.weight": random(dtype, WIDTH, 768) for i in range(number)}
        return state | {
            f"layers.0.experts.{i}.up_proj.weight": random(dtype, 1536, WIDTH) for i in range(number)
        }

    def norms(dtype: torch.dtype) -> State:
        return {f"layers.{i}.norm.weight": random(dtype, WIDTH) for i in range(NORMS)}

    many = 10 if quick else 20
    whole = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    made: dict[str, Callable[[], State]] = {}
    for dtype, name in whole.items():
        count = many if dtype is torch.bfloat16 else many // 2
        made[f"experts in {name}"] = partial(experts, dtype, count)
        made[f"{NORMS} norms of {WIDTH} in {name}"] = partial(norms, dtype)
    made["transposed experts in bf16"] = lambda: {
        name: tensor.T for name, tensor in experts(torch.bfloat16, many).items()
    }
    made["a model in bf16"] = lambda: (
        experts(torch.bfloat16, many)
        | norms(torch.bfloat16)
        | {
            "embed.weight": random(torch.bfloat16, 32768, WIDTH),
            "head.weight": random(torch.bfloat16, 32768, WIDTH),
        }
    )
    return made


def beside_each_other(rank: Rank, quick: bool, reps: int) -> dict[str, tuple[int, dict[str, list[Sample]]]]:
    torch.set_num_threads(1)
    found = {}
    for what, make in states(quick).items():
        state = make()
        snapshot = {name: tensor.clone() for name, tensor in state.items()}
        sides: dict[str, Callable[[], Any]] = {
            "ours": partial(ours, state),
            "sha256": partial(sha256, state),
            "hash_tensor": partial(hash_tensor, state),
            "compare": partial(compare, snapshot, state),
        }
        samples: dict[str, list[Sample]] = {side: [] for side in sides}
        for _ in range(reps + 1):
            for side, call in sides.items():
                samples[side].append(measure(call)[0])
        found[what] = sum(tensor.nbytes for tensor in state.values()), samples
    return found


def run(bench: Bench) -> None:
    found = run_ranks(beside_each_other, 1, (bench.quick, bench.reps), limit_s=1200.0)[0]
    for what, (nbytes, samples) in found.items():
        speed = {side: [nbytes / GB / one.cpu for one in taken] for side, taken in samples.items()}
        metric = f"fingerprint {nbytes / GB:.2g} GB: {what}"
        for peer in ("sha256", "hash_tensor", "compare"):
            bench.compare(
                f"{metric} / {peer}",
                speed["ours"][1:],
                speed[peer][1:],
                "GB/s",
                limit=1.0 if peer == "sha256" else None,
                higher_is_better=True,
                first=speed["ours"][0],
                peer_first=speed[peer][0],
            )
        asked = 1.0 if "norms" in what or "transposed" in what else 5.0
        if "fp32" not in what or "norms" in what:
            bench.target(metric, speed["ours"][1:], asked, "GB/s", higher_is_better=True)


if __name__ == "__main__":
    sys.exit(main("fingerprint", run))
