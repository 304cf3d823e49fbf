"""A published model: opening its folder, loading it into megatron-core's names, and exporting it again, on tmpfs.

One process against plain reads and writes of the same bytes; eight ranks with an eighth of the experts each
against torch DCP's reader of such folders, which is asked for the published names (it knows no others).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness import GB, MIB, Bench, Rank, Sample, main, measure, run_ranks, scratch

WORLD = 8
STEP = "step"
EXPERT = "model.layers.{}.mlp.experts.{}."


@dataclass(frozen=True)
class Shape:
    """A Qwen3-MoE, all of whose sides are powers of two but the number of layers."""

    layers: int
    experts: int
    hidden: int = 2048
    inner: int = 768
    heads: int = 16
    groups: int = 4
    head: int = 128
    words: int = 32_768

    @property
    def config(self) -> dict[str, object]:
        return {
            "model_type": "qwen3_moe",
            "num_hidden_layers": self.layers,
            "num_experts": self.experts,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": self.head,
            "vocab_size": self.words,
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.inner,
        }

    def published(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the folder."""
        yield "model.embed_tokens.weight", (self.words, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            for name, heads in (("q", self.heads), ("k", self.groups), ("v", self.groups)):
                yield f"{at}self_attn.{name}_proj.weight", (heads * self.head, self.hidden)
            yield f"{at}self_attn.o_proj.weight", (self.hidden, self.heads * self.head)
            yield f"{at}input_layernorm.weight", (self.hidden,)
            yield f"{at}post_attention_layernorm.weight", (self.hidden,)
            yield f"{at}mlp.gate.weight", (self.experts, self.hidden)
            for expert in range(self.experts):
                yield f"{EXPERT.format(layer, expert)}gate_proj.weight", (self.inner, self.hidden)
                yield f"{EXPERT.format(layer, expert)}up_proj.weight", (self.inner, self.hidden)
                yield f"{EXPERT.format(layer, expert)}down_proj.weight", (self.hidden, self.inner)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.words, self.hidden)

    def ours(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and global shapes of megatron-core's state."""
        at, layers = "decoder.layers.", self.layers
        yield "embedding.word_embeddings.weight", (self.words, self.hidden)
        rows = (self.heads + 2 * self.groups) * self.head
        yield f"{at}self_attention.linear_qkv.weight", (layers, rows, self.hidden)
        yield f"{at}self_attention.linear_proj.weight", (layers, self.hidden, self.heads * self.head)
        yield f"{at}self_attention.linear_qkv.layer_norm_weight", (layers, self.hidden)
        yield f"{at}mlp.linear_fc1.layer_norm_weight", (layers, self.hidden)
        yield f"{at}mlp.router.weight", (layers, self.experts, self.hidden)
        experts = (layers, self.experts)
        yield f"{at}mlp.experts.experts.linear_fc1.weight", (*experts, 2 * self.inner, self.hidden)
        yield f"{at}mlp.experts.experts.linear_fc2.weight", (*experts, self.hidden, self.inner)
        yield "decoder.final_layernorm.weight", (self.hidden,)
        yield "output_layer.weight", (self.words, self.hidden)


def publish(shape: Shape, folder: Path, file_bytes: int = 400_000_000) -> int:
    """The folder, as transformers shards it; returns the bytes of its weights."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape.config))
    part: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    size = total = number = 0
    generator = torch.Generator().manual_seed(1)
    for name, sides in [*shape.published(), ("", ())]:
        if part and (not name or size > file_bytes):
            file = f"model-{number:05d}.safetensors"
            save_file(part, folder / file)
            where |= dict.fromkeys(part, file)
            part, size, number = {}, 0, number + 1
        if name:
            bits = torch.randint(-32768, 32767, sides, dtype=torch.int16, generator=generator)
            part[name] = (bits & 0x3FFF).view(torch.bfloat16)  # no NaN among them: equal means equal
            size += part[name].nbytes
            total += part[name].nbytes
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return total


def state_of(shape: Shape) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(sides, dtype=torch.bfloat16) for name, sides in shape.ours()}


# -- one process ----------------------------------------------------------------------------------


def alone(rank: Rank, shape: Shape, root: Path, reps: int) -> dict[str, list[Sample]]:
    """Loads and exports, and plain reads and writes of the same bytes, in turns."""
    import holdfast
    from holdfast.huggingface import export, import_

    folder, state = root / "model", state_of(shape)
    files = sorted(folder.glob("*.safetensors"))
    buffers = [bytearray(path.stat().st_size) for path in files]
    found: dict[str, list[Sample]] = {}

    def note(what: str, call: Callable[[], Any]) -> None:
        sample, _ = measure(call)
        found.setdefault(what, []).append(sample)

    def read() -> None:
        for path, buffer in zip(files, buffers, strict=True):
            with open(path, "rb", buffering=0) as file:
                view = memoryview(buffer)
                while view and (got := file.readinto(view)):
                    view = view[got:]

    def copy() -> None:
        (root / "out").mkdir()
        for path in files:
            with open(path, "rb", buffering=0) as source, open(root / "out" / path.name, "wb") as target:
                while part := source.read(16 << 20):
                    target.write(part)
                target.flush()
                os.fsync(target.fileno())

    holdfast.load(state, folder, job=holdfast.Job(no_dist=True))
    holdfast.save(state, root / STEP, job=holdfast.Job(no_dist=True))
    writes: list[tuple[str, Callable[[], Any]]] = [
        ("export", lambda: export(root / STEP, root / "out", like=folder, job=holdfast.Job(no_dist=True))),
        ("copy", copy),
        ("import", lambda: import_(folder, root / "out", job=holdfast.Job(no_dist=True))),
    ]
    for turn in range(reps + 1):
        note("load", lambda: holdfast.load(state, folder, job=holdfast.Job(no_dist=True)))
        note("read", read)
        # Who comes first changes: memory that was just freed is cheaper to take than memory of before.
        for what, write in writes[turn % 3 :] + writes[: turn % 3]:
            note(what, write)
            shutil.rmtree(root / "out")
    return found


def fingerprints(rank: Rank, shape: Shape, root: Path, reps: int) -> dict[str, list[Sample]]:
    """Fingerprints of a state in memory, and saves that note them, beside saves that do not, in turns."""
    import holdfast

    state = {name: value.normal_() for name, value in state_of(shape).items()}
    found: dict[str, list[Sample]] = {"live": [], "noted": [], "plain": []}

    def save(noted: bool) -> None:
        holdfast.save(
            state, root / "step", job=holdfast.Job(no_dist=True, options=holdfast.Options(fingerprint=noted))
        )

    for turn in range(reps + 1):
        found["live"].append(measure(lambda: holdfast.fingerprint(state, job=holdfast.Job(no_dist=True)))[0])
        for what, noted in (("noted", True), ("plain", False))[:: 1 if turn % 2 else -1]:
            # A save of the other kind before each: both come after the same, whose room was just freed.
            save(not noted)
            shutil.rmtree(root / "step")
            found[what].append(measure(lambda: save(noted))[0])  # noqa: B023
            shutil.rmtree(root / "step")
    return found


def open_many(rank: Rank, root: Path, reps: int) -> list[float]:
    """Seconds to open a folder of 20,000 tensors in 200 files, and to look at all of them."""
    from safetensors.torch import save_file

    from holdfast._core.io.open_checkpoint import open_source
    from holdfast._core.store.local import open_store

    folder = root / "many"
    folder.mkdir()
    where: dict[str, str] = {}
    for number in range(200):
        part = {f"model.layers.{number}.t{at}.weight": torch.zeros(4, 4) for at in range(100)}
        save_file(part, folder / f"model-{number:05d}.safetensors")
        where |= dict.fromkeys(part, f"model-{number:05d}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))

    def look() -> None:
        with open_source(open_store(folder)) as source:
            assert len(source.select().names) == 20_000

    return [measure(look)[0].wall for _ in range(reps)]


# -- eight ranks ----------------------------------------------------------------------------------


def slices(rank: Rank, shape: Shape, root: Path, reps: int) -> dict[str, list[tuple[Sample, int, int]]]:
    """An eighth of the experts and all of the rest, by us, by DCP and by plain reads of as many bytes: what
    each took, read and needed."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    import holdfast

    each = shape.experts // rank.world
    mine = range(rank.index * each, (rank.index + 1) * each)
    state: dict[str, Any] = {}
    for name, sides in shape.ours():
        if ".experts." in name:
            part = torch.zeros((sides[0], each, *sides[2:]), dtype=torch.bfloat16)
            state[name] = holdfast.Shard(part, sides, (0, mine.start, *(0,) * (len(sides) - 2)))
        else:
            state[name] = torch.zeros(sides, dtype=torch.bfloat16)
    theirs = {
        name: torch.zeros(sides, dtype=torch.bfloat16)
        for name, sides in shape.published()
        if ".experts." not in name or int(name.split(".experts.")[1].split(".")[0]) in mine
    }
    needed = sum(value.nbytes for value in theirs.values())
    found: dict[str, list[tuple[Sample, int, int]]] = {"holdfast": [], "DCP": [], "raw": []}
    files = sorted((root / "model").glob("*.safetensors"))
    buffers = [bytearray(needed // len(files)) for _ in files]

    def read() -> None:
        for path, buffer in zip(files, buffers, strict=True):
            with open(path, "rb", buffering=0) as file:
                file.readinto(buffer)

    for _ in range(reps + 1):
        sample, _ = rank.together(read)
        found["raw"].append((sample, needed, needed))
        sample, report = rank.together(lambda: holdfast.load(state, root / "model"))
        found["holdfast"].append((sample, report.bytes_read, needed))
        reader = HuggingFaceStorageReader(str(root / "model"))
        sample, _ = rank.together(lambda: dcp.load(theirs, storage_reader=reader))  # noqa: B023
        found["DCP"].append((sample, sample.rchar, needed))
    first = f"{EXPERT.format(0, mine.start)}up_proj.weight"
    fc1 = state["decoder.layers.mlp.experts.experts.linear_fc1.weight"].tensor[0, 0]
    if not torch.equal(fc1[shape.inner :], theirs[first]):
        raise ValueError(f"{first} differs between the two sides")
    return found


def run(bench: Bench) -> None:
    shape = Shape(layers=1, experts=16) if bench.quick else Shape(layers=3, experts=64)
    with scratch("tmpfs") as root:
        nbytes = publish(shape, root / "model")
        what = f"{nbytes / GB:.1f} GB"
        found = run_ranks(alone, 1, (shape, root, bench.reps), limit_s=900.0)[0]
        rows_alone(bench, what, nbytes, found)
        shutil.rmtree(root / STEP, ignore_errors=True)
        for place in ("tmpfs", "disk"):
            with scratch(place) as other:
                told = run_ranks(fingerprints, 1, (shape, other, bench.reps), limit_s=900.0)[0]
                rows_of_fingerprints(bench, f"{what}, {place}", nbytes, told, place == "tmpfs")
        ranks = run_ranks(slices, WORLD, (shape, root, bench.reps), limit_s=900.0)
        rows_together(bench, what, ranks)
        seconds = run_ranks(open_many, 1, (root, bench.reps), limit_s=300.0)[0]
        bench.target("open 20,000 tensors in 200 files", seconds, 2.0, "s")


def rows_alone(bench: Bench, what: str, nbytes: int, found: dict[str, list[Sample]]) -> None:
    def speed(side: str) -> list[float]:
        return [nbytes / GB / sample.wall for sample in found[side][1:]]

    for side, peer, note in (
        ("load", "read", "plain reads of the same files into buffers made beforehand"),
        ("export", "copy", "a plain copy of the same files, synced"),
        ("import", "copy", "a plain copy of the same files, synced"),
    ):
        bench.compare(
            f"{side} {what}, 1 process / plain {peer}",
            speed(side),
            speed(peer),
            "GB/s",
            limit=0.8,
            higher_is_better=True,
            note=note,
            first=nbytes / GB / found[side][0].wall,
            peer_first=nbytes / GB / found[peer][0].wall,
        )
    for side in ("export", "import"):
        most = (
            max(sample.peak for sample in found[side]) / MIB
        )  # later calls use memory that an earlier one has freed
        note = f"the most of {len(found[side])} calls"
        bench.target(f"memory of an {side} of {what}", [most], 300.0, "MiB", note=note)


def rows_of_fingerprints(
    bench: Bench, what: str, nbytes: int, found: dict[str, list[Sample]], with_live: bool
) -> None:
    if with_live:
        speed = [nbytes / GB / sample.wall for sample in found["live"][1:]]
        bench.target(
            "fingerprint of a state in memory, one thread", speed, 2.0, "GB/s", higher_is_better=True
        )
    bench.compare(
        f"save {what}, with fingerprints / without",
        [sample.wall for sample in found["noted"][1:]],
        [sample.wall for sample in found["plain"][1:]],
        "s",
        limit=1 / 1.1,
        note="the sums are made beside the writing, on a thread",
    )


def rows_together(bench: Bench, what: str, ranks: list[dict[str, list[tuple[Sample, int, int]]]]) -> None:
    def slowest(side: str) -> list[float]:
        turns = zip(*(found[side][1:] for found in ranks), strict=True)
        return [max(sample.wall for sample, _, _ in turn) for turn in turns]

    def most(side: str) -> list[float]:
        return [max(sample.peak for sample, _, _ in found[side][1:]) / MIB for found in ranks]

    metric = f"load {what}, {WORLD} ranks with 1/{WORLD} of the experts each"
    bench.compare(f"{metric} / DCP", slowest("holdfast"), slowest("DCP"), "s", limit=1.3)
    bench.compare(
        f"{metric} / plain reads",
        slowest("holdfast"),
        slowest("raw"),
        "s",
        note="of as many bytes of the same files, by the same ranks, into buffers made beforehand",
    )
    bench.compare(f"{metric}, memory / DCP", most("holdfast"), most("DCP"), "MiB", limit=1.0)
    shares = [read / needed for found in ranks for _, read, needed in found["holdfast"][1:]]
    bench.target(f"{metric}, bytes read", shares, 1.02, "of the bytes needed")


if __name__ == "__main__":
    sys.exit(main("huggingface", run))
