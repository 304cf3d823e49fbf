"""ZeRO checkpoints that real engines of DeepSpeed write on real ranks: imported, compared with what DeepSpeed
itself says of them, and loaded on other numbers of ranks."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import holdfast
from holdfast._frameworks.deepspeed import checkpoint
from holdfast._frameworks.deepspeed.importing import import_zero
from holdfast._tools.cli import cli
from holdfast.errors import BadInput, CorruptCheckpoint
from tests.frameworks.deepspeed import jobs
from tests.support.processes import ProcessWorld
from tests.support.wide import wide

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
KINDS: dict[str, tuple[int, bool, dict[str, Any], dict[str, Any]]] = {
    "zero1": (1, False, {}, {}),
    "zero1-bf16": (1, True, {}, {}),
    "zero1-bf16-optimizer": (1, True, {}, {"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero2-bf16": (2, True, {}, {}),
    "zero2-aligned": (2, False, {"parameter_alignment": True, "round_robin_gradients": True}, {}),
    "zero3": (3, False, {}, {}),
    "zero3-bf16": (3, True, {}, {}),
    "zero3-sub-groups": (3, False, {"sub_group_size": 40}, {}),
}
"""Stage, bf16, settings of `zero_optimization`, other settings."""


def run(size: int, job: Any, *args: Any) -> Any:
    """What a job returns on rank 0."""
    with ProcessWorld(size, env=jobs.ENV, preload="zero") as world:
        return world.run(job, *args, timeout=40)[0]


class Saved(dict[str, tuple[Path, jobs.State, list[float]]]):
    """Checkpoints of each kind, by two ranks; what they had; and the losses of the steps after it."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, name: str) -> tuple[Path, jobs.State, list[float]]:
        folder = self._root / name
        self[name] = (folder, *run(2, jobs.save, str(folder), *KINDS[name]))
        return self[name]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    root = tmp_path_factory.mktemp("zero")
    yield Saved(root)
    shutil.rmtree(root)


def imported(folder: Path, out: Path) -> dict[str, Any]:
    import_zero(folder, out)
    found: dict[str, Any] = dict(holdfast.open(out).read(""))
    return found


@pytest.mark.parametrize(
    "name", wide(KINDS, suite=("zero1-bf16-optimizer", "zero2-bf16", "zero3-sub-groups"))
)
def test_an_import_is_what_the_engine_had(name: str, saved: Saved, tmp_path: Path) -> None:
    folder, had, _ = saved[name]
    found = imported(folder, tmp_path / "out")
    for parameter, state in had.items():
        for key, value in state.items():
            at = f"model.{parameter}" if key == "fp32" else f"optim.state.{parameter}.{key}"
            assert torch.equal(found[at], value), at
        assert found[f"optim.state.{parameter}.step"].item() == 3
    # Those that zero_to_fp32 leaves out in ZeRO 1 are there, too.
    # It does not know the files of BF16_Optimizer.
    theirs = {} if name == "zero1-bf16-optimizer" else run(1, jobs.consolidated, str(folder))
    ours = {at.removeprefix("model."): value for at, value in found.items() if at.startswith("model.")}
    assert ours.keys() == jobs.Model().state_dict().keys()
    assert {name: value.float() for name, value in theirs.items()}.keys() <= ours.keys()
    for at, value in theirs.items():
        assert torch.equal(ours[at].float(), value.float()), at
    assert ours["count"].dtype == torch.int64
    assert found["global_steps"] == 3
    assert found["client_state.epoch"] == 4
    assert torch.equal(found["client_state.seen.1"], torch.ones(2))
    assert found["lr_scheduler.last_batch_iteration"] == 2


@pytest.mark.parametrize("name", ["zero1", "zero3", "zero3-sub-groups"])
def test_a_program_without_deepspeed_trains_on(name: str, saved: Saved, tmp_path: Path) -> None:
    folder, _, after = saved[name]
    import_zero(folder, tmp_path / "out")
    model, optimizer = jobs.model_and_optimizer()
    model_state, optim_state = holdfast.get_state_dict(model, optimizer)
    holdfast.load(
        {"model": model_state, "optim": optim_state}, tmp_path / "out", job=holdfast.Job(no_dist=True)
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    words = jobs.batch(3)
    loss = torch.nn.functional.cross_entropy(model(words), (words + 1) % jobs.WORDS)
    assert loss.item() == pytest.approx(after[0], rel=1e-5)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    words = jobs.batch(4)
    loss = torch.nn.functional.cross_entropy(model(words), (words + 1) % jobs.WORDS)
    assert loss.item() == pytest.approx(after[1], rel=1e-5)
    # And in another dtype.
    model.to(torch.bfloat16).load_state_dict(
        holdfast.open(tmp_path / "out").read("model", dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("name", wide(KINDS, suite=("zero3-sub-groups",)))
def test_an_engine_goes_on_with_four_ranks_and_then_with_three(
    name: str, saved: Saved, tmp_path: Path
) -> None:
    folder, had, after = saved[name]
    place = folder
    for size in (4, 3):
        found, losses, rest = run(size, jobs.resume, str(place), *KINDS[name], str(tmp_path / str(size)))
        for parameter, state in had.items():
            for key, value in state.items():
                assert torch.equal(found[parameter][key], value), (size, parameter, key)
        # Three ranks divide by three, which rounds, and bfloat16 coarsely.
        assert losses == pytest.approx(after, rel=5e-3 if KINDS[name][1] else 1e-5)
        assert rest["client"]["epoch"] == 4
        assert torch.equal(rest["client"]["seen"][1], torch.ones(2))
        assert (rest["steps"], rest["schedule"]) == (3, {"last_batch_iteration": 2})
        assert rest["rates"][1] == pytest.approx(2 * rest["rates"][0])
        assert rest["path"].startswith(str(place))
        model = jobs.model_and_optimizer()[0]
        assert torch.equal(rest["frozen"], model.frozen.weight.to(rest["frozen"].dtype))
        assert torch.equal(rest["buffers"]["count"], torch.tensor(3))
        place = tmp_path / str(size)


@pytest.mark.parametrize(
    ("name", "stage", "size"),
    wide([("zero1", 3, 2), ("zero3", 1, 3), ("zero3-bf16", 2, 4)], suite=[("zero3", 1, 3)]),
)
def test_an_engine_of_another_stage_goes_on(name: str, stage: int, size: int, saved: Saved) -> None:
    folder, had, after = saved[name]
    bf16 = KINDS[name][1]
    found, losses, rest = run(size, jobs.resume, str(folder), stage, bf16, {}, {})
    for parameter, state in had.items():
        for key, value in state.items():
            assert torch.equal(found[parameter][key], value), (parameter, key)
    assert losses == pytest.approx(after, rel=5e-3 if bf16 else 1e-5)
    assert rest["steps"] == 3


@pytest.mark.parametrize("name", wide(("zero1", "zero3"), suite=("zero3",)))
def test_just_the_weights_are_loaded(name: str, saved: Saved) -> None:
    folder, had, _ = saved[name]
    found = run(3, jobs.weights, str(folder), KINDS[name][0])
    assert all(torch.equal(found[parameter], state["fp32"]) for parameter, state in had.items())
    assert torch.equal(found["frozen.weight"], jobs.model_and_optimizer()[0].frozen.weight)


def test_the_same_ranks_load_as_ever(saved: Saved) -> None:
    folder, had, after = saved["zero2-bf16"]
    found, losses, _ = run(2, jobs.resume, str(folder), *KINDS["zero2-bf16"])
    assert all(torch.equal(found[name][key], value) for name in had for key, value in had[name].items())
    assert losses == after


def test_deepspeed_itself_refuses_it(saved: Saved) -> None:
    assert "world size" in run(4, jobs.stock, str(saved["zero1"][0]), 1)


@pytest.mark.parametrize("name", wide(("zero2-bf16", "zero3"), suite=("zero3",)))
def test_a_universal_checkpoint_is_imported(name: str, saved: Saved, tmp_path: Path) -> None:
    folder, had, _ = saved[name]
    out = tmp_path / "universal" / "three"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(folder / "three"), "--output_folder", str(out)]
    subprocess.run(command, check=True, timeout=100, env={**os.environ, **jobs.ENV}, capture_output=True)
    found = imported(out, tmp_path / "out")
    for parameter, state in had.items():
        assert torch.equal(found[f"model.{parameter}"], state["fp32"])
        assert torch.equal(found[f"optim.state.{parameter}.exp_avg_sq"], state["exp_avg_sq"])
        assert found[f"optim.state.{parameter}.step"].item() == 3
    assert torch.equal(found["model.head.weight"], found["model.emb.weight"])
    assert [group["weight_decay"] for group in found["optim.param_groups"]] == [0.1, 0.0]


# -- what can't be read ---------------------------------------------------------------------------


def copied(saved: Saved, name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[name][0] / "three", tmp_path / "copy"))


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_a_missing_file_is_named_with_its_rank(name: str, saved: Saved, tmp_path: Path) -> None:
    folder = copied(saved, name, tmp_path)
    gone = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (folder / gone).unlink()
    with pytest.raises(CorruptCheckpoint, match=f"no {gone}, which rank 1 of 2 has written"):
        import_zero(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_engine_names_a_missing_file(saved: Saved, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved["zero3"][0], tmp_path / "copy"))
    (folder / "three" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert "which rank 0 of 2 has written" in run(3, jobs.tried, str(folder), 3)


@pytest.mark.parametrize("stage", wide((1, 3)))
def test_parameter_groups_are_found_by_their_parameters(stage: int, saved: Saved) -> None:
    folder = str(saved[f"zero{stage}"][0])
    assert run(3, jobs.tried, folder, stage, "swapped") == [0.0, 0.1]
    said = run(3, jobs.tried, folder, stage, "one")
    assert said.startswith("BadInput: No parameter group in")
    assert "'emb.weight'" in said


@pytest.mark.parametrize("keep", [0, 100, 2000])
def test_a_truncated_file_is_refused(keep: int, saved: Saved, tmp_path: Path) -> None:
    folder = copied(saved, "zero1", tmp_path)
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CorruptCheckpoint, match=file.name):
        import_zero(folder, tmp_path / "out")


def test_a_changed_weight_is_noticed(saved: Saved, tmp_path: Path) -> None:
    folder = copied(saved, "zero3", tmp_path)
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        largest = max(archive.infolist(), key=lambda item: item.file_size * ("/data/" in item.filename))
        content = archive.read(largest)
    data[data.index(content)] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=f"{file.name} is damaged: its .* does not match its CRC-32"):
        import_zero(folder, tmp_path / "out")


class Forged:
    """Writes a file if somebody unpickles it."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (self.place,)


@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_forged_file_executes_nothing(file: str, inside: bool, saved: Saved, tmp_path: Path) -> None:
    folder, trap = copied(saved, "zero1", tmp_path), tmp_path / "executed"
    forged = Forged(str(trap))
    torch.save({"optimizer_state_dict": forged, "param_shapes": forged} if inside else forged, folder / file)
    with pytest.raises((CorruptCheckpoint, BadInput), match="is expected"):
        import_zero(folder, tmp_path / "out")
    assert not trap.exists()
    with pytest.raises(pickle.UnpicklingError):  # the trap would work: torch refuses it only for its own list
        torch.load(folder / file, weights_only=True)


def test_a_forged_client_state_is_left_out(
    saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_SOME", 1 << 16)  # what is counted to takes seconds
    folder, trap = copied(saved, "zero1", tmp_path), tmp_path / "executed"
    file = folder / "mp_rank_00_model_states.pt"
    endless: list[Any] = []
    endless.append(endless)
    wide: Any = []
    for _ in range(60):
        wide = [wide, wide]
    content = torch.load(file, weights_only=False)
    torch.save(content | {"bad": Forged(str(trap)), "endless": endless, "wide": wide}, file)
    found = imported(folder, tmp_path / "out")
    assert not trap.exists()
    assert found["client_state.epoch"] == 4
    assert not {"client_state.bad", "client_state.endless", "client_state.wide"} & found.keys()
    assert "'client_state.bad' is left out: it is an instance of posix.mkdir" in caplog.text


def test_paths_of_a_universal_checkpoint_stay_inside(saved: Saved, tmp_path: Path) -> None:
    folder = copied(saved, "zero1", tmp_path)
    file = folder / "mp_rank_00_model_states.pt"
    (folder / "zero").mkdir()
    optimizer = torch.load(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)
    torch.save(optimizer["optimizer_state_dict"], folder / "zero" / "optimizer_state.pt")
    content = torch.load(file, weights_only=False)
    torch.save(content | {"param_shapes": [{"../../x": torch.Size([1])}]}, file)
    with pytest.raises(BadInput, match="not a path inside"):
        import_zero(folder, tmp_path / "out")


def test_a_folder_that_holds_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no checkpoint of DeepSpeed"):
        import_zero(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_weights_that_are_not_there_are_told(name: str, saved: Saved, tmp_path: Path) -> None:
    folder = copied(saved, name, tmp_path)
    file = next(folder.glob("zero_pp_rank_0_*_model_states.pt"), folder / "mp_rank_00_model_states.pt")
    content = torch.load(file, weights_only=False)
    content["param_shapes"][0]["inner.weight"] = torch.Size([1 << 20, 1 << 20])
    torch.save(content, file)
    with pytest.raises(CorruptCheckpoint, match=r"fewer elements of 'inner.weight' than its shape says"):
        import_zero(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dp_world_size": 0}, "no rank has written it"),
        ({"shared_params": {"tied": ["inner.weight"]}}, "a list where a str is expected"),
        # The whole would take a gigabyte of memory, of a file of some kilobytes.
        ({"param_shapes": [{f"w{i}": torch.Size([0]) for i in range(1000)}] * 20_000}, "in two flat tensors"),
    ],
)
def test_a_forged_description_is_refused(
    change: dict[str, Any], words: str, saved: Saved, tmp_path: Path
) -> None:
    folder = copied(saved, "zero1", tmp_path)
    file = folder / "mp_rank_00_model_states.pt"
    torch.save(torch.load(file, weights_only=False) | change, file)
    with pytest.raises(CorruptCheckpoint, match=words):
        import_zero(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "words"),
    [("param_groups", "two of its parameter groups have"), ("param_alignment_paddings", "1 paddings of")],
)
def test_a_forged_optimizer_is_refused(key: str, words: str, saved: Saved, tmp_path: Path) -> None:
    folder = copied(saved, "zero1", tmp_path)
    file = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(file, weights_only=False)
    state = content["optimizer_state_dict"]
    if key == "param_groups":
        state["base_optimizer_state"][key] *= 100_000
    else:
        state[key] = [[1]] * 3
    torch.save(content, file)
    with pytest.raises(CorruptCheckpoint, match=words):
        import_zero(folder, tmp_path / "out")


def test_an_elastic_checkpoint_is_refused(tmp_path: Path) -> None:
    run(2, jobs.save, str(tmp_path / "saved"), 1, False, {"elastic_checkpoint": True}, {})
    with pytest.raises(BadInput, match="saved with elastic_checkpoint"):
        import_zero(tmp_path / "saved", tmp_path / "out")


def test_the_command(saved: Saved, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli, ["import", "zero", str(saved["zero3"][0]), str(tmp_path / "out"), "--json"]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["step"] == 3
    assert told["tensors"] == len(holdfast.open(tmp_path / "out"))
    again = CliRunner().invoke(cli, ["import", "zero", str(tmp_path / "out"), str(tmp_path / "other")])
    assert again.exit_code == 2
    assert "holds no checkpoint of DeepSpeed" in again.stderr


def test_tensor_parallelism_is_refused(saved: Saved, tmp_path: Path) -> None:
    folder = copied(saved, "zero1", tmp_path)
    file = folder / "mp_rank_00_model_states.pt"
    torch.save(torch.load(file, weights_only=False) | {"mp_world_size": 2}, file)
    with pytest.raises(BadInput, match="parallelism of degree 2"):
        import_zero(folder, tmp_path / "out")
