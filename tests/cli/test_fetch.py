"""`holdfast fetch`: counts, copies that survive a kill, and input that is refused with one sentence."""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast import huggingface
from holdfast._core.existing.reindex import reindex
from holdfast._models.huggingface import slice_writer
from holdfast._tools.checkpoints.prune import prune
from holdfast.errors import (
    BadInput,
    CorruptCheckpoint,
    DeadlineExceeded,
    HoldfastError,
    MissingTensors,
    NotCommitted,
    StorageError,
)
from tests.cli.conftest import Run, data_files, flip
from tests.store.faults import FOREVER, Faults
from tests.support.waiting import SLACK, wait_until

LAYERS, EXPERTS, HIDDEN, INNER = 4, 4, 8, 6
CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "tie_word_embeddings": False,
}
ONE = "world=1"


def tensors_of(layers: int = LAYERS) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (10, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (10, HIDDEN),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
        for name, rows in (("q", 16), ("k", 8), ("v", 8)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, 16)
        shapes[f"{prefix}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name in ("gate", "up"):
                shapes[f"{prefix}.mlp.experts.{expert}.{name}_proj.weight"] = (INNER, HIDDEN)
            shapes[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, INNER)
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def make_published(folder: Path) -> None:
    """A published model of two files."""
    folder.mkdir()
    tensors = tensors_of()
    names = sorted(tensors)
    files = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, folder / file)
    where = {name: file for file, some in files.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def published(tmp_path: Path) -> Path:
    make_published(tmp_path / "model")
    return tmp_path / "model"


def test_one_rank_of_one_needs_all(published: Path, run_json: Any) -> None:
    report, code = run_json("fetch", published, "--ranks", "0", "--grid", ONE)
    assert code == 0
    assert report["bytes"] == report["bytes_in_all"] == report["bytes_of_files"]
    assert report["by_rank"] == [{"rank": 0, "tensors": len(tensors_of()), "bytes": report["bytes"]}]
    assert [(file["name"], file["ranges"]) for file in report["files"]] == [
        ("a.safetensors", 1),
        ("b.safetensors", 1),
    ]
    assert report["path"] is None


def test_bytes_are_counted_by_hand(published: Path, run_json: Any, run: Run) -> None:
    """Two stages, two parts of experts, halves of rows and columns."""
    grid = "world=4,tp=2,pp=2,ep=2,etp=1"
    call = ("fetch", published, "--ranks", "1", "--grid", grid, "--vocabulary", "10")
    report, _ = run_json(*call)
    attention = (32 // 2) * HIDDEN + HIDDEN * (16 // 2)
    experts = (EXPERTS // 2) * 3 * INNER * HIDDEN
    layers = 2 * (HIDDEN + attention + EXPERTS * HIDDEN + experts)
    assert report["bytes"] == 4 * (layers + 5 * HIDDEN)  # and half of the embedding
    columns = [place for file in report["files"] for place in file["places"] if place["count"] > 1]
    assert columns == [
        {"start": place["start"], "length": 32, "step": 64, "count": HIDDEN} for place in columns
    ]
    assert len(columns) == 2  # of o_proj, a layer each
    host, _ = run_json("fetch", published, "--ranks", "0-1", "--grid", grid, "--vocabulary", "10")
    assert host["bytes"] < sum(need["bytes"] for need in host["by_rank"])  # what both need counts once
    shown = run(*call).stdout
    assert "Ranks 1 of world=4,tp=2,pp=2,ep=2,etp=1 need" in shown
    assert "a.safetensors" in shown


def test_an_uneven_split_of_layers(published: Path) -> None:
    def layers(ranks: str | int, split: str | list[int] | None, grid: str) -> set[int]:
        out = published.parent / f"out {ranks} {split} {grid}"
        huggingface.fetch(published, ranks, grid, out, split=split)
        state = {name: torch.zeros_like(value) for name, value in tensors_of().items()}
        found = set()
        for layer in range(LAYERS):
            name = f"model.layers.{layer}.input_layernorm.weight"
            try:
                holdfast.load({name: state[name]}, out, job=holdfast.Job(no_dist=True))
            except MissingTensors:
                continue
            assert torch.equal(state[name], tensors_of()[name])
            found.add(layer)
        return found

    assert layers("0", [1, 3], "world=2,pp=2") == {0}
    assert layers("1", [1, 3], "world=2,pp=2") == {1, 2, 3}
    assert layers("1", None, "world=2,pp=2") == {2, 3}
    assert layers("1", None, "world=2,pp=2,vpp=2") == {1, 3}
    assert layers("0", [1, 0, 2, 1], "world=2,pp=2,vpp=2") == {0, 1, 2}


HALF = "world=2,pp=2"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no ranks": ({"ranks": ""}, "'' names no ranks"),
    "backwards": ({"ranks": "3-1"}, "'3-1' names no ranks"),
    "negative": ({"ranks": "-1"}, "'-1' names no ranks"),
    "other digits": ({"ranks": "\u0664"}, "names no ranks"),
    "far too many ranks": ({"ranks": "0-999999999"}, "names no ranks"),
    "beyond the grid": ({"ranks": "0-8", "grid": "world=8"}, "Rank 8 is not in this grid of ranks 0 to 7"),
    "no world": ({"grid": "tp=2"}, "does not say how many ranks there are"),
    "no size": ({"grid": "world=8,tp=x"}, "'tp=x' in it, which is no size"),
    "twice": ({"grid": "world=8,tp=2,tp=4"}, "says tp twice"),
    "another name": ({"grid": "world=8,dp=2"}, "'dp=2' in it"),
    "a world that does not divide": ({"grid": "world=8,tp=3"}, "not divisible by tp x cp x pp = 3"),
    "rows that do not divide": ({"grid": "world=5,tp=5,etp=1"}, "can't be shared by 5"),
    "experts that do not divide": ({"grid": "world=8,ep=8"}, "4 experts can't be shared by ep=8"),
    "layers that do not divide": ({"grid": "world=3,pp=3"}, "4 layers can't be shared equally by 3"),
    "a split of other layers": ({"grid": HALF, "split": [1, 2]}, "The split 1,2 does not share 4 layers"),
    "a split of other chunks": ({"grid": HALF, "split": [1, 2, 1]}, "to 2 model chunks"),
    "a negative split": ({"grid": HALF, "split": [5, -1]}, "The split 5,-1"),
    "too few words": ({"grid": "world=2,tp=2", "vocabulary": 4}, "does not hold the 10"),
    "no words": ({"vocabulary": 0}, "vocabulary must be at least 1"),
    "words in words": ({"vocabulary": "10"}, "vocabulary must be at least 1, not '10'"),
    "a split of no numbers": ({"grid": HALF, "split": "1,x"}, "The split '1,x' is not made of numbers"),
    "a split of one number": ({"grid": HALF, "split": 3}, "The split 3 is not made of numbers"),
    "no grid": ({"grid": None}, "grid must be a holdfast.Grid, or a text such as"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    case: str, published: Path, tmp_path: Path
) -> None:
    changes, words = BAD[case]
    call = {"ranks": "0", "grid": ONE, **changes}
    with pytest.raises(BadInput) as caught:
        huggingface.fetch(published, to=tmp_path / "out", **call)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_command_refuses_a_split_that_is_no_numbers(published: Path, run: Run) -> None:
    assert run("fetch", published, "--ranks", "0", "--grid", ONE, "--split", "1,x").exit_code == 2
    assert run("fetch", published, "--ranks", "1", "--grid", ONE).stderr.startswith("holdfast: Rank 1 is not")


def test_names_that_leave_the_folder_are_damage(published: Path, tmp_path: Path) -> None:
    path = published / "model.safetensors.index.json"
    said = json.loads(path.read_text())
    said["weight_map"]["model.norm.weight"] = "../a.safetensors"
    path.write_text(json.dumps(said))
    with pytest.raises(CorruptCheckpoint, match="no safetensors file of its folder"):
        huggingface.fetch(published, "0", ONE, tmp_path / "out")
    (tmp_path / "out").mkdir(exist_ok=True)
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    said["weight_map"]["model.norm.weight"] = "b.safetensors"
    path.write_text(json.dumps(said))
    (published / "special.json").symlink_to(secret)
    with pytest.raises(holdfast.errors.HoldfastError, match="is a link that leaves its folder"):
        huggingface.fetch(published, "0", ONE, tmp_path / "out")
    with pytest.raises(NotCommitted, match="a fetch was begun here"):
        holdfast.load(
            {"model.norm.weight": torch.zeros(HIDDEN)}, tmp_path / "out", job=holdfast.Job(no_dist=True)
        )


def test_a_name_that_is_no_text_is_damage(published: Path, tmp_path: Path) -> None:
    header = {"\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    (published / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CorruptCheckpoint, match="can't be read"):
        huggingface.fetch(published, "0", ONE, tmp_path / "out")


@pytest.mark.parametrize("where", ["model", "out"])
def test_storage_that_fails_is_not_told_as_damage(
    where: str, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any of its reads; the same call goes on from there."""
    monkeypatch.setattr(slice_writer, "FILE_BYTES", 1500)
    faults, out = Faults(monkeypatch, tmp_path / where), tmp_path / "out"
    said: list[HoldfastError] = []
    for number in range(1, 1000):
        faults.arm(errno.EIO, number, FOREVER, only=("pread", "preadv"))
        try:
            huggingface.fetch(published, "0", ONE, out)
            break
        except HoldfastError as error:
            said.append(error)
    faults.disarm()
    assert len(said) > 10
    assert all(isinstance(error, StorageError) and "Input/output error" in str(error) for error in said)
    state = {name: torch.zeros_like(value) for name, value in tensors_of().items()}
    holdfast.load(state, out, job=holdfast.Job(no_dist=True))
    assert all(torch.equal(state[name], value) for name, value in tensors_of().items())


def test_a_file_of_a_terabyte_of_nothing_has_a_deadline(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_writer, "FILE_BYTES", 64 << 20)
    nbytes, config = 1 << 40, {**CONFIG, "vocab_size": 1 << 28}
    entry = {"dtype": "F32", "shape": [1 << 28, 1 << 10], "data_offsets": [0, nbytes]}
    text = json.dumps({"model.embed_tokens.weight": entry}).encode()
    path = published / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + nbytes)
    (published / "config.json").write_text(json.dumps(config))
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="did not end within 3 s"):
        huggingface.fetch(published, "0", ONE, tmp_path / "out", timeout=3)
    assert time.monotonic() - begun < 3 + SLACK
    # The thread has stopped, too: nothing is written any more.
    wait_until(lambda: not any(thread.name == "holdfast-look" for thread in threading.enumerate()))


def test_a_read_that_does_not_return_has_a_deadline(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, real = threading.Event(), os.preadv

    def hangs(*args: Any) -> int:
        go_on.wait(60)
        return real(*args)

    monkeypatch.setattr(os, "preadv", hangs)
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="did not end within 1 s"):
        huggingface.fetch(published, "0", ONE, tmp_path / "out", timeout=1)
    assert time.monotonic() - begun < 1 + SLACK
    go_on.set()
    wait_until(lambda: not any(thread.name == "holdfast-look" for thread in threading.enumerate()))
    monkeypatch.undo()
    assert huggingface.fetch(published, "0", ONE, tmp_path / "out").path == str(tmp_path / "out")


def test_a_folder_that_holds_something_else_is_left_alone(published: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(BadInput, match=r"holds 'mine\.txt'; a fetch goes into a new folder"):
        huggingface.fetch(published, "0", ONE, out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    with pytest.raises(BadInput, match="a fetch goes into a new folder"):
        huggingface.fetch(published, "0", ONE, published)
    huggingface.fetch(published, "0", HALF, tmp_path / "first")
    with pytest.raises(BadInput, match=r"holds what was fetched from .* for ranks 0 of world=2,pp=2"):
        huggingface.fetch(published, "1", HALF, tmp_path / "first")
    with pytest.raises(BadInput, match="is itself what was fetched for ranks 0"):
        huggingface.fetch(tmp_path / "first", "0", HALF, tmp_path / "second")
    assert huggingface.fetch(published, "0", HALF, tmp_path / "first").bytes_written == 0


def test_a_family_that_no_table_knows_is_taken_whole_by_layers(published: Path, tmp_path: Path) -> None:
    (published / "config.json").write_text(json.dumps({**CONFIG, "model_type": "strange"}))
    report = huggingface.fetch(published, "1", "world=4,tp=2,pp=2,ep=2,etp=1", tmp_path / "out")
    names = {name for name in tensors_of() if "layers" not in name or ".0." in name or ".1." in name}
    names = {name for name in names if ".layers.2." not in name and ".layers.3." not in name}
    assert set(report.taken_whole) == names
    state = {name: torch.zeros_like(value) for name, value in tensors_of().items() if name in names}
    holdfast.load(state, tmp_path / "out", job=holdfast.Job(no_dist=True))
    assert all(torch.equal(value, tensors_of()[name]) for name, value in state.items())
    with pytest.raises(MissingTensors, match="asks for"):
        holdfast.load(
            {"model.layers.3.input_layernorm.weight": torch.zeros(HIDDEN)},
            tmp_path / "out",
            job=holdfast.Job(no_dist=True),
        )


@pytest.mark.parametrize("prefix", ["", "model.", "module.policy."])
def test_a_checkpoint_of_other_names_than_megatrons_is_taken_whole_by_layers(
    prefix: str, tmp_path: Path
) -> None:
    alone = holdfast.Job(no_dist=True)
    names = [*tensors_of(), *(f"vision.layers.{layer}.weight" for layer in range(LAYERS - 1))]
    state: dict[str, Any] = {
        **{prefix + name: torch.full((4,), float(number)) for number, name in enumerate(names)},
        **{f"optim.state.{name}.exp_avg": torch.full((4,), -1.0) for name in tensors_of()},
        "step": 7,
    }
    holdfast.save(state, tmp_path / "kept", job=alone)
    both = [huggingface.fetch(tmp_path / "kept", rank, HALF, tmp_path / f"out{rank}") for rank in (0, 1)]
    assert sum(report.bytes for report in both) < 1.3 * both[0].bytes_in_all
    for rank, report in enumerate(both):
        mine = {
            name: torch.zeros(4) if name != "step" else 0
            for name in state
            if "vision" in name or not any(f".layers.{layer}." in name for layer in ((2, 3), (0, 1))[rank])
        }
        assert set(report.taken_whole) == mine.keys() - {"step"}
        holdfast.load(mine, tmp_path / f"out{rank}", job=alone)
        assert all(torch.equal(value, state[name]) for name, value in mine.items() if name != "step")
        with pytest.raises(MissingTensors, match="asks for"):
            holdfast.load(
                dict.fromkeys(state.keys() - mine, torch.zeros(4)), tmp_path / f"out{rank}", job=alone
            )
    uneven = huggingface.fetch(tmp_path / "kept", 1, HALF, split="1,3")
    assert {prefix + "model.layers.1.input_layernorm.weight"} <= set(uneven.taken_whole)


def test_a_name_that_the_family_does_not_have_is_taken_whole_and_told(
    published: Path, tmp_path: Path, run: Run
) -> None:
    tensors = {**tensors_of(), "model.layers.3.strange.weight": torch.ones(3), "vision.weight": torch.ones(2)}
    for path in [*published.glob("*.safetensors"), published / "model.safetensors.index.json"]:
        path.unlink()
    save_file(tensors, published / "model.safetensors")
    first = huggingface.fetch(published, "0", HALF)
    last = huggingface.fetch(published, "1", HALF)
    assert first.taken_whole == ("vision.weight",)
    assert last.taken_whole == ("model.layers.3.strange.weight", "vision.weight")
    shown = run("fetch", published, "--ranks", "1", "--grid", HALF).stdout
    assert "Taken whole, as it is not known how ranks share them: model.layers.3.strange.weight" in shown


def test_scales_of_blocks_go_with_their_tensors(published: Path, tmp_path: Path) -> None:
    tensors = tensors_of()
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.full((1, 1), 3.0)
    for path in [*published.glob("*.safetensors"), published / "model.safetensors.index.json"]:
        path.unlink()
    save_file(tensors, published / "model.safetensors")
    huggingface.fetch(published, "0", HALF, tmp_path / "out")
    ours = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    part = holdfast.Shard(torch.zeros(1, 1, HIDDEN, INNER), (LAYERS, EXPERTS, HIDDEN, INNER), (0, 1, 0, 0))
    holdfast.load({ours: part}, tmp_path / "out", job=holdfast.Job(no_dist=True))
    assert torch.equal(part.tensor[0, 0], tensors[name].float() * 3)


KILLED = """
import os, signal, sys
from holdfast import huggingface
from holdfast._models.huggingface import slice_writer
from holdfast._tools.checkpoints.prune import prune
from holdfast._core.existing.reindex import reindex
from holdfast._core.store.local import LocalWriter

slice_writer.FILE_BYTES = 3000
files, finish = [], LocalWriter.finish

def killed(self):
    files.append(self)
    if len(files) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    finish(self)

LocalWriter.finish = killed
huggingface.fetch(sys.argv[1], "0", "world=2,pp=2", sys.argv[2])
"""


def test_a_fetch_that_was_killed_goes_on_and_is_nothing_before(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(published), str(out)], env=os.environ, check=False, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    left = sorted(path.name for path in (out / "data").iterdir())
    assert [name.endswith(".partial") for name in left] == [True, False, False]
    with pytest.raises(NotCommitted, match="a fetch was begun here, and has not ended"):
        holdfast.load({"model.norm.weight": torch.zeros(HIDDEN)}, out, job=holdfast.Job(no_dist=True))
    with pytest.raises(BadInput, match="not all of it"):
        reindex(out)
    monkeypatch.setattr(slice_writer, "FILE_BYTES", 3000)
    told: list[tuple[int, int]] = []
    report = huggingface.fetch(published, "0", HALF, out, progress=lambda done, of: told.append((done, of)))
    assert 0 < report.bytes_written < report.bytes
    assert told[-1] == (report.bytes, report.bytes)
    assert not [path for path in (out / "data").iterdir() if path.name.startswith(".")]
    state = {"model.layers.1.mlp.gate.weight": torch.zeros(EXPERTS, HIDDEN)}
    holdfast.load(state, out, job=holdfast.Job(no_dist=True))
    assert torch.equal(
        state["model.layers.1.mlp.gate.weight"], tensors_of()["model.layers.1.mlp.gate.weight"]
    )
    assert {path.name for path in out.iterdir()} == {
        "slice.holdfast",
        "data",
        "config.json",
        "tokenizer.json",
    }


def test_damage_is_found_in_the_source_and_in_the_copy(
    checkpoint: Path, kept: Path, tmp_path: Path, run: Run
) -> None:
    huggingface.fetch(kept, "0", ONE, tmp_path / "good")
    state = {"wide": torch.zeros(512, 1024)}
    holdfast.load(state, tmp_path / "good", job=holdfast.Job(no_dist=True))
    assert state["wide"][3, 4] == 3 * 1024 + 4
    (file,) = (tmp_path / "good" / "data").iterdir()
    flip(file, file.stat().st_size // 2)
    with pytest.raises(CorruptCheckpoint, match="do not match the digest"):
        holdfast.load(state, tmp_path / "good", job=holdfast.Job(no_dist=True))
    flip(data_files(checkpoint)[0], 300_000)
    with pytest.raises(CorruptCheckpoint, match="do not match the digest"):
        huggingface.fetch(checkpoint, "0", ONE, tmp_path / "bad")
    assert not (tmp_path / "bad" / "slice.holdfast").exists()
    for path in data_files(checkpoint):
        path.unlink()
    with pytest.raises(CorruptCheckpoint, match=f"A data file of {checkpoint} is missing: "):
        huggingface.fetch(checkpoint, "0", ONE, tmp_path / "worse")


def test_inspect_opens_it_and_says_what_it_is(kept: Path, tmp_path: Path, run: Run) -> None:
    huggingface.fetch(kept, "0", ONE, tmp_path / "out")
    result = run("inspect", tmp_path / "out")
    assert result.exit_code == 0
    assert "a slice that `holdfast fetch` took of a checkpoint" in result.stdout
    assert "layer0.weight" in result.stdout


@pytest.mark.parametrize("command", ["verify", "explain", "diff"])
def test_other_commands_say_what_it_is(command: str, kept: Path, tmp_path: Path, run: Run) -> None:
    huggingface.fetch(kept, "0", ONE, tmp_path / "out")
    more = {"explain": ["wide"], "diff": [kept]}.get(command, [])
    result = run(command, tmp_path / "out", *more)
    assert result.exit_code == 2
    assert "it is what `holdfast fetch` took of one" in result.stderr


def test_a_rank_gets_its_own_values_and_all_objects(kept: Path, tmp_path: Path) -> None:
    """`layer0` and `layer1` are no layers of megatron-core's: they are taken whole by all."""
    report = huggingface.fetch(kept, "1", "world=2,tp=2", tmp_path / "out")
    assert "layer0.weight" in report.taken_whole
    state: dict[str, Any] = {
        "lr": 0.0,
        "args": {"b": 0, "a": None},
        "scalar": torch.zeros((), dtype=torch.int64),
    }
    holdfast.load(state, tmp_path / "out", job=holdfast.Job(no_dist=True))
    assert state["lr"] == 0.25
    assert state["args"] == {"b": 2, "a": [1, "x[bold]y"]}
    assert state["scalar"] == 3


def test_a_file_of_somebody_else_is_not_replaced(published: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"mine": 1}')
    with pytest.raises(BadInput, match=r"holds another config\.json"):
        huggingface.fetch(published, "0", ONE, out)
    assert (out / "config.json").read_text() == '{"mine": 1}'


def test_prune_takes_no_copy_for_a_save_that_failed(kept: Path, tmp_path: Path) -> None:
    """A step that was fetched into a folder named like a step: no index there names its files."""
    out = tmp_path / "run" / "step-00000001"
    huggingface.fetch(kept, "0", ONE, out)
    assert prune(out.parent, older_than=0.0).removed == ()
    state = {"wide": torch.zeros(512, 1024)}
    holdfast.load(state, out, job=holdfast.Job(no_dist=True))
    assert state["wide"][3, 4] == 3 * 1024 + 4
