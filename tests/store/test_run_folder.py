"""Run folders as people have them: links, other frameworks' checkpoints, names of any width, what is no step
at all."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from click.testing import CliRunner

import holdfast
from holdfast._core.io.old_steps import remove_step
from holdfast._core.roster.memory import MemoryRoster
from holdfast._core.store.local import LocalStore
from holdfast._core.store.run_folder import refuse_other_checkpoints
from holdfast._tools.checkpoints.inspect import Run, describe
from holdfast._tools.checkpoints.prune import prune
from holdfast._tools.checkpoints.verify import VerifiedRun, verify
from holdfast._tools.cli import cli
from holdfast.errors import BadInput, StorageError
from tests.protocol.test_protocol import ranks
from tests.support.threads import on_ranks

Save = Callable[[Path, float], None]


def ours(folder: Path, value: float) -> None:
    holdfast.save({"w": torch.full((3,), value)}, folder, job=holdfast.Job(no_dist=True))


def torchs(folder: Path, value: float) -> None:
    torch_dcp.save({"w": torch.full((3,), value)}, checkpoint_id=folder)


def run_of(folder: Path, **how: Any) -> holdfast.Checkpoints:
    _runs.append(holdfast.Checkpoints(folder, asynchronous=False, job=holdfast.Job(no_dist=True), **how))
    return _runs[-1]


_runs: list[holdfast.Checkpoints] = []


@pytest.fixture(autouse=True)
def _close_runs() -> Iterator[None]:
    yield
    while _runs:
        _runs.pop().close()


def restored(folder: Path) -> tuple[int | None, float]:
    state = {"w": torch.zeros(3)}
    return run_of(folder).restore(state), float(state["w"][0])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- links -------------------------------------------------------------------------------------


def test_a_step_that_is_a_link_to_another_run_is_never_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To go on from another run's checkpoint it was linked into this one; that run needs it still."""
    pretrain, run = tmp_path / "pretrain", tmp_path / "run"
    ours(pretrain / "step-00000007", 7.0)
    run.mkdir()
    (run / "step-00000007").symlink_to("../pretrain/step-00000007")
    before = tree(pretrain)
    assert restored(run) == (7, 7.0)
    checkpoints = run_of(run, keep=1)
    with caplog.at_level(logging.WARNING, "holdfast"):
        for step in (8, 9, 10):
            checkpoints.save(step, {"w": torch.full((3,), float(step))})
    assert tree(pretrain) == before
    assert checkpoints.steps() == [7, 10]
    told = [record.getMessage() for record in caplog.records if "is a link" in record.getMessage()]
    assert len(told) == 1
    assert str(run / "step-00000007") in told[0]
    found = prune(run, keep=1, older_than=0.0)
    assert tree(pretrain) == before
    assert [(item.path, "link" in item.why) for item in found.skipped] == [("step-00000007", True)]


def test_a_link_takes_no_place_of_the_steps_that_are_kept(tmp_path: Path) -> None:
    """What it leads to may go at any time: two real steps stay, although the newest is a link."""
    ours(tmp_path / "other" / "step-00000099", 99.0)
    run = tmp_path / "run"
    run.mkdir()
    (run / "step-00000099").symlink_to(tmp_path / "other" / "step-00000099")
    checkpoints = run_of(run, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, {"w": torch.zeros(3)})
    assert checkpoints.steps() == [2, 3, 99]


@pytest.mark.parametrize("target", ["step-00000001", "step-00000001/data", "{run}/step-00000001"])
@pytest.mark.parametrize("name", ["best", "step-00000000"])
def test_a_step_to_which_a_link_of_the_run_leads_stays(tmp_path: Path, name: str, target: str) -> None:
    """A user's `best`; with the number of a step, too. The steps that are kept are those that were kept without it."""
    (tmp_path / name).symlink_to(target.format(run=tmp_path))
    (tmp_path / "elsewhere").symlink_to("..")
    checkpoints = run_of(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, {"w": torch.full((3,), float(step))})
    assert [step for step in checkpoints.steps() if step] == [1, 3, 4]
    described = describe(tmp_path)
    assert isinstance(described, Run)
    assert {one.step: one.kept for one in described.steps if one.step}[1] == f"the link {name} leads to it"
    found = prune(tmp_path, keep=1, older_than=0.0)
    assert [item.path for item in found.removed] == ["step-00000003"]
    assert ("step-00000001", f"the link {name} leads to it") in [
        (item.path, item.why) for item in found.skipped
    ]
    assert found.kept[-2:] == (1, 4)
    (tmp_path / name).unlink()
    checkpoints.save(5, {"w": torch.full((3,), 5.0)})
    assert checkpoints.steps() == [4, 5]


def test_a_data_folder_that_is_a_link_keeps_its_files(tmp_path: Path) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"
    checkpoints = run_of(run, keep=1)
    checkpoints.save(1, {"w": torch.zeros(3)})
    step = run / "step-00000001"
    shutil.move(step / "data", precious)
    (precious / "notes.txt").write_text("mine")
    (step / "data").symlink_to(precious)
    before = tree(precious)
    for number in (2, 3):
        checkpoints.save(number, {"w": torch.zeros(3)})
    prune(run, keep=1, older_than=0.0)
    assert tree(precious) == before
    assert (step / "index.safetensors").exists()
    assert remove_step(checkpoints.store, step.name) is False
    assert checkpoints.steps() == [1, 3]


def test_a_save_of_a_step_that_is_a_link_is_refused(tmp_path: Path) -> None:
    ours(tmp_path / "pretrain", 7.0)
    run = tmp_path / "run"
    run.mkdir()
    (run / "step-00000007").symlink_to(tmp_path / "pretrain")
    before = tree(tmp_path / "pretrain")
    for asynchronous in (False, True):
        with (
            pytest.raises(StorageError, match="is a link; nothing is saved behind it"),
            holdfast.Checkpoints(
                run, asynchronous=asynchronous, job=holdfast.Job(no_dist=True)
            ) as checkpoints,
        ):
            checkpoints.save(7, {"w": torch.zeros(3)})
    assert tree(tmp_path / "pretrain") == before
    ours(tmp_path / "run" / "step-00000007", 8.0)  # who names the link itself means what it leads to
    assert restored(run) == (7, 8.0)


def test_one_link_in_a_circle_disables_nothing(tmp_path: Path) -> None:
    checkpoints = run_of(tmp_path)
    checkpoints.save(1, {"w": torch.ones(3)})
    for name in ("step-00000009", "loop", "latest"):
        (tmp_path / name).symlink_to(name)
    (tmp_path / "step-00000008").symlink_to("nowhere")
    assert holdfast.latest(tmp_path) == str(tmp_path / "step-00000001")
    assert restored(tmp_path) == (1, 1.0)
    described, verified = describe(tmp_path), verify(tmp_path)
    assert isinstance(described, Run)
    assert [step.step for step in described.steps] == [1]
    assert isinstance(verified, VerifiedRun)
    assert verified.whole
    assert prune(tmp_path, older_than=0.0).kept == (1,)


@pytest.mark.parametrize("link", ["the run", "a folder above it"])
def test_a_run_behind_a_link_that_leads_nowhere_is_not_a_run_without_steps(tmp_path: Path, link: str) -> None:
    """Storage that is not mounted looks like that: a job must not begin anew there."""
    there, state = tmp_path / "mounted" / "run", {"w": torch.zeros(3)}
    run_of(there).save(7, {"w": torch.ones(3)})
    run = tmp_path / "run" if link == "the run" else tmp_path / "results" / "run"
    place = run if link == "the run" else run.parent
    place.symlink_to(there if link == "the run" else there.parent)
    (tmp_path / "mounted").rename(tmp_path / "elsewhere")
    other, first = tmp_path / "other", {"w": torch.zeros(3)}
    for call in (
        lambda: run_of(run).restore(state),
        lambda: run_of(run, start_from=other).restore(state),
        lambda: run_of(other, start_from=run).restore(state),
        lambda: run_of(run).latest(),
        lambda: holdfast.latest(run),
        lambda: run_of(run).save(1, first),
        lambda: ours(run, 1.0),
        lambda: ours(run / "deeper" / "still", 1.0),
        lambda: verify(run),
        lambda: describe(run),
    ):
        with pytest.raises(StorageError, match=r"is a link to '.*', which does not exist") as caught:
            call()
        assert str(place) in str(caught.value)
        assert "mounted on this host" in caught.value.hint
    (tmp_path / "elsewhere").rename(tmp_path / "mounted")
    assert run_of(run).restore(state) == 7


# -- which folders are steps -----------------------------------------------------------------------


@pytest.mark.parametrize("save", [ours, torchs], ids=["Holdfast", "torch DCP"])
@pytest.mark.parametrize(
    "name", ["step-10", "step-00000010", "step-0000000000010", "iter_10", "iter_0000010"]
)
def test_steps_of_any_spelling_and_either_format_are_gone_on_from(
    tmp_path: Path, save: Save, name: str
) -> None:
    save(tmp_path / name, 10.0)
    (tmp_path / "logs").mkdir()
    assert restored(tmp_path) == (10, 10.0)
    assert holdfast.latest(tmp_path) == str(tmp_path / name)
    assert (run_of(tmp_path).latest(), run_of(tmp_path).steps()) == (10, [10])
    described = describe(tmp_path)
    assert isinstance(described, Run)
    (shown,) = described.steps
    assert (shown.step, shown.committed, shown.problem) == (10, True, None)
    assert shown.bytes > 12


def test_the_newest_number_counts_whatever_its_format(tmp_path: Path) -> None:
    ours(tmp_path / "step-9", 9.0)
    torchs(tmp_path / "step-10", 10.0)
    assert restored(tmp_path) == (10, 10.0)
    ours(tmp_path / "step-00000011", 11.0)
    assert restored(tmp_path) == (11, 11.0)


def test_of_two_folders_of_one_step_an_index_goes_first_then_the_newest(tmp_path: Path) -> None:
    ours(tmp_path / "step-00000010", 1.0)
    torchs(tmp_path / "step-10", 2.0)
    assert restored(tmp_path) == (10, 1.0)
    ours(tmp_path / "iter_10", 3.0)
    os.utime(tmp_path / "iter_10" / "index.safetensors", (2e9, 2e9))
    assert restored(tmp_path) == (10, 3.0)
    os.utime(tmp_path / "step-00000010" / "index.safetensors", (2e9 + 1, 2e9 + 1))
    assert restored(tmp_path) == (10, 1.0)
    assert run_of(tmp_path).steps() == [10]


def test_only_folders_that_holdfast_made_and_named_are_retired(tmp_path: Path) -> None:
    torchs(tmp_path / "step-00000001", 1.0)
    torchs(tmp_path / "iter_0000002", 2.0)
    ours(tmp_path / "step-3", 3.0)
    stays = tree(tmp_path)
    checkpoints = run_of(tmp_path, keep=1)
    for step in (4, 5, 6):
        checkpoints.save(step, {"w": torch.zeros(3)})
    assert checkpoints.steps() == [1, 2, 3, 6]
    prune(tmp_path, keep=1, older_than=0.0)
    assert checkpoints.steps() == [1, 2, 3, 6]
    assert stays.items() <= tree(tmp_path).items()


def test_left_overs_are_swept_from_steps_of_any_spelling(tmp_path: Path) -> None:
    """`holdfast.save(state, f"run/step-{step}")` is what people write."""
    ours(tmp_path / "step-3", 3.0)
    left = tmp_path / "step-3" / "data" / "aaaaaaaaaaaa-r00000.safetensors"
    left.write_bytes(b"x")
    failed = tmp_path / "step-4" / "data" / left.name
    failed.parent.mkdir(parents=True)
    failed.write_bytes(b"x")
    found = prune(tmp_path, older_than=0.0)
    assert {item.path for item in found.removed} == {f"step-{n}/data/{left.name}" for n in (3, 4)}
    assert restored(tmp_path) == (3, 3.0)


# -- what is no step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [ours, torchs], ids=["Holdfast", "torch DCP"])
@pytest.mark.parametrize("name", ["global_step_10", "checkpoint-500", "best"])
def test_checkpoints_under_other_names_are_never_nothing(tmp_path: Path, save: Save, name: str) -> None:
    save(tmp_path / name, 10.0)
    for look in (
        lambda: restored(tmp_path),
        lambda: holdfast.latest(tmp_path),
        lambda: run_of(tmp_path).latest(),
    ):
        with pytest.raises(BadInput, match=f"{name!r} in it is one") as caught:
            look()
        assert f"holdfast.load(state, '{tmp_path / name}')" in caught.value.hint
    state = {"w": torch.zeros(3)}
    holdfast.load(state, tmp_path / name, job=holdfast.Job(no_dist=True))
    assert state["w"].tolist() == [10.0] * 3


def test_the_newest_of_many_other_names_is_told(tmp_path: Path) -> None:
    for number in (9, 100, 20):
        ours(tmp_path / f"global_step_{number}", 0.0)
    with pytest.raises(BadInput, match="'global_step_100' in it is one"):
        restored(tmp_path)


@pytest.mark.parametrize("save", [ours, torchs], ids=["Holdfast", "torch DCP"])
def test_a_checkpoint_in_the_place_of_a_run_is_not_nothing(tmp_path: Path, save: Save) -> None:
    save(tmp_path / "run", 1.0)
    with pytest.raises(BadInput, match="is a checkpoint, not a run folder"):
        restored(tmp_path / "run")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("latest_checkpointed_iteration.txt", "a run of Megatron-LM"),
        (
            "checkpoint-500/trainer_state.json",
            "'checkpoint-500' in it is one, of a format that Holdfast does not load",
        ),
        ("checkpoint-500/model.safetensors", "'checkpoint-500' in it is one\\. Load it by holdfast.load"),
        ("epoch_3/model.safetensors.index.json", "'epoch_3' in it is one\\. Load it by holdfast.load"),
        ("checkpoint-500/adapter_model.safetensors", "'checkpoint-500' in it is one, of a format"),
        ("step-5/metadata.json", "'step-5' in it is one, of a format that Holdfast does not load"),
    ],
)
def test_formats_that_do_not_load_are_not_nothing_either(tmp_path: Path, file: str, words: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("500")
    with pytest.raises(BadInput, match=words):
        restored(tmp_path)


def test_all_ranks_hear_that_there_is_something_else(tmp_path: Path) -> None:
    ours(tmp_path / "global_step_10", 10.0)

    def job(roster: MemoryRoster) -> object:
        run = holdfast.Checkpoints(tmp_path, asynchronous=False, job=holdfast.Job(roster=roster, timeout=20))
        return run.restore({"w": torch.zeros(3)})

    found = ranks(3, job)
    assert all(isinstance(error, BadInput) for error in found)
    assert len({str(error) for error in found}) == 1


def test_a_folder_without_checkpoints_is_a_fresh_start(tmp_path: Path) -> None:
    for name in ("tensorboard", "step-00000003", "code"):
        (tmp_path / name).mkdir()
    (tmp_path / "config.yaml").write_text("lr: 1")
    (tmp_path / "code" / "train.py").write_text("")
    (tmp_path / "step-00000003" / "data").mkdir()
    for place in (tmp_path, tmp_path / "tensorboard", tmp_path / "missing"):
        assert restored(place) == (None, 0.0)
        assert holdfast.latest(place) is None


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("qwen-run2", "the folder does not exist, but {tmp_path} has 'qwen-run-2'."),
        ("another", "the folder does not exist."),
        ("qwen-run-2", "the folder holds step-00000003/ (never committed)."),
        ("empty", "the folder is empty."),
        ("models", "the folder holds a, b, c, config.json, llama2/ and 1 more."),
    ],
)
def test_a_fresh_start_says_what_lies_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, run: str, words: str
) -> None:
    """One rank says it. The model that a training begins with is no reason not to begin."""
    for name in ("qwen-run-2/step-00000003", "empty", "models/llama2"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("llama2/model.safetensors", "config.json", "model.safetensors", "a", "b", "c"):
        (tmp_path / "models" / name).write_text("")

    def restore(roster: MemoryRoster) -> int | None:
        with holdfast.Checkpoints(
            tmp_path / run, asynchronous=False, job=holdfast.Job(roster=roster, timeout=60)
        ) as there:
            return there.restore({"w": torch.zeros(3)})

    with caplog.at_level(logging.INFO, "holdfast"):
        assert on_ranks(2, restore) == [None, None]
    said = f"No step is restored from {tmp_path / run}, so the run starts fresh: {words.format(tmp_path=tmp_path)}"
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(logging.INFO, said)]


def test_a_fresh_start_beside_data_whose_index_is_gone_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of steps that a copy of the run lacks the indexes of, say: the hint restores one."""
    for step in (3, 7):
        ours(tmp_path / f"step-0000000{step}", float(step))
        (tmp_path / f"step-0000000{step}" / "index.safetensors").unlink()
    assert restored(tmp_path) == (None, 0.0)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.startswith(f"No step is restored from {tmp_path}, so the run starts fresh: ")
    found = re.search(r"`holdfast reindex (\S+)` may recover it", said)
    assert found is not None
    assert CliRunner().invoke(cli, ["reindex", found[1]]).exit_code == 0
    assert restored(tmp_path) == (7, 7.0)


def test_a_folder_that_may_not_be_listed_hinders_no_fresh_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path) in (tmp_path, tmp_path / "run" / "step-00000003" / "data"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert restored(tmp_path / "run") == (None, 0.0)
    (tmp_path / "run" / "step-00000003" / "data").mkdir(parents=True)
    assert restored(tmp_path / "run") == (None, 0.0)


def test_what_was_restored_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours(tmp_path / "iter_7", 7.0)

    def restore(roster: MemoryRoster) -> int | None:
        with holdfast.Checkpoints(
            tmp_path, asynchronous=False, job=holdfast.Job(roster=roster, timeout=60)
        ) as there:
            return there.restore({"w": torch.zeros(3)})

    with caplog.at_level(logging.INFO, "holdfast"):
        assert on_ranks(2, restore) == [7, 7]
    moved, restored = (record.getMessage() for record in caplog.records)
    assert moved.startswith(f"load of {tmp_path / 'iter_7'}: rank 0 has moved 12 B of 12 B in ")
    assert restored == f"Step 7 is restored, from {tmp_path / 'iter_7'}."


def test_a_folder_of_somebody_else_hinders_no_fresh_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lost+found`, say, at the top of a file system."""
    (tmp_path / "lost+found").mkdir()
    real = os.stat

    def stat(path: Any, *rest: Any, **named: Any) -> Any:
        if not isinstance(path, int) and "lost+found/" in os.fspath(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "stat", stat)
    assert restored(tmp_path) == (None, 0.0)


def test_a_file_in_the_place_of_a_run_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    for look in (lambda: restored(tmp_path / "run"), lambda: holdfast.latest(tmp_path / "run")):
        with pytest.raises(BadInput, match="run is a file, not a folder"):
            look()


def test_a_folder_of_thousands_is_looked_into_at_few_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3000):
        (tmp_path / f"trial-{number}").mkdir()
    ours(tmp_path / "trial-2999", 0.0)
    real, looks = os.stat, []

    def stat(path: Any, *rest: Any, **named: Any) -> Any:
        looks.append(path)
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(BadInput, match="'trial-2999' in it is one"):
        holdfast.latest(tmp_path)
    shutil.rmtree(tmp_path / "trial-2999")
    looks.clear()
    assert holdfast.latest(tmp_path) is None
    assert len(looks) < 2500


def test_a_step_that_is_committed_during_the_look_is_no_stranger(tmp_path: Path) -> None:
    """`restore` finds no step; then the first one is committed; then it looks for other checkpoints."""
    holdfast.save({"w": torch.zeros(1)}, tmp_path / "step-00000000", job=holdfast.Job(no_dist=True))
    refuse_other_checkpoints(LocalStore(tmp_path))


# -- a damaged step ----------------------------------------------------------------------------


def test_one_of_the_participants_warns_of_a_damaged_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where rank 0 is none of them."""
    for step in (1, 2):
        ours(tmp_path / f"step-0000000{step}", float(step))
    (data,) = (tmp_path / "step-00000002" / "data").iterdir()
    right, wrong = (torch.full((3,), value).numpy().tobytes() for value in (2.0, 5.0))
    assert right in data.read_bytes()
    data.write_bytes(data.read_bytes().replace(right, wrong))

    def restore(roster: MemoryRoster) -> tuple[int | None, list[float]] | None:
        if roster.rank == 0:
            return None
        state = {"w": torch.zeros(3)}
        job = holdfast.Job(participants=[1, 2], roster=roster, timeout=60)
        with holdfast.Checkpoints(tmp_path, asynchronous=False, job=job) as run:
            return run.restore(state), state["w"].tolist()

    with caplog.at_level(logging.WARNING, "holdfast"):
        assert on_ranks(3, restore) == [None, (1, [1.0] * 3), (1, [1.0] * 3)]
    (said,) = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert said.startswith("Step 2 is damaged")


def test_damaged_steps_take_no_place_of_good_ones(tmp_path: Path) -> None:
    with holdfast.Checkpoints(
        tmp_path, keep=3, asynchronous=False, job=holdfast.Job(no_dist=True)
    ) as checkpoints:
        for step in (1, 8, 9):
            checkpoints.save(step, {"w": torch.full((1000,), float(step))})
    for step in (8, 9):
        (file,) = (tmp_path / f"step-{step:08d}" / "data").iterdir()
        data = bytearray(file.read_bytes())
        at = data.find(torch.full((1000,), float(step)).numpy().tobytes())
        data[at + 100] ^= 1
        file.write_bytes(data)
    with holdfast.Checkpoints(
        tmp_path, keep=3, asynchronous=False, job=holdfast.Job(no_dist=True)
    ) as checkpoints:
        state = {"w": torch.zeros(1000)}
        assert checkpoints.restore(state) == 1
        for step in (2, 3, 4):
            checkpoints.save(step, state)
        assert checkpoints.steps() == [2, 3, 4, 8, 9]
        checkpoints.save(8, state)  # a new one in its place is a good one
        assert checkpoints.steps() == [3, 4, 8, 9]


def test_a_copied_step_counts_by_its_folders_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = holdfast.Checkpoints(tmp_path, asynchronous=False, job=holdfast.Job(no_dist=True))
    checkpoints.save(10, {"w": torch.ones(1)})
    (tmp_path / "step-00000010").rename(tmp_path / "step-00000030")
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert checkpoints.restore({"w": torch.ones(1)}) == checkpoints.latest() == 30
    assert "copied or renamed" in caplog.text


def test_a_pipe_is_no_index(tmp_path: Path) -> None:
    checkpoints = holdfast.Checkpoints(tmp_path, asynchronous=False, job=holdfast.Job(no_dist=True))
    checkpoints.save(1, {"w": torch.ones(1)})
    (tmp_path / "step-00000002").mkdir()
    os.mkfifo(tmp_path / "step-00000002" / "index.safetensors")
    assert checkpoints.restore({"w": torch.zeros(1)}) == 1


# -- runs of thousands of steps -----------------------------------------------------------------


class Counting(LocalStore):
    """Counts listings of the run folder, and looks at what lies in it."""

    calls: Counter[str] = Counter()  # noqa: RUF012 (of all stores; cleared before each use)

    def list(self, folder: str = "") -> list[str]:
        self.calls["list"] += self.root == self._top and not folder
        return super().list(folder)

    def stat(self, path: str = "") -> Any:
        self.calls["stat"] += 1
        return super().stat(path)

    def child(self, folder: str) -> Counting:
        return Counting(self._full(folder), self._top)


def long_run(run: Path, steps: int, file: str) -> Counting:
    """A run with a file for each step; the newest step after these is a checkpoint."""
    for step in range(steps):
        path = run / file.format(step)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    ours(run / f"step-{steps:08d}", 2.0)
    Counting.calls.clear()
    return Counting(run)


def test_the_newest_of_many_steps_is_found_by_one_listing(tmp_path: Path) -> None:
    store: Any = long_run(tmp_path / "run", 5000, "step-{:08d}/index.safetensors")
    assert run_of(store).latest() == 5000
    assert store.calls["list"] == 1
    assert store.calls["stat"] < 5
    store.calls.clear()
    assert restored(store) == (5000, 2.0)
    assert store.calls["list"] == 1
    assert store.calls["stat"] < 20


@pytest.mark.parametrize(
    ("file", "keep", "left"),
    [
        ("step-{:08d}/index.safetensors", 2000, 1004),
        ("step-{:08d}/index.safetensors", 5, 5),
        ("iter_{:07d}/.metadata", 5, 1004),
        ("step-{:08d}/never-committed", 5, 4),
    ],
)
def test_a_save_into_a_run_of_many_steps_does_not_look_at_all_of_them(
    tmp_path: Path, file: str, keep: int, left: int
) -> None:
    store: Any = long_run(tmp_path / "run", 1000, file)
    run, state = run_of(store, keep=keep), {"w": torch.ones(3)}
    run.save(1001, state)  # with a small `keep`, it removes what is too old, or learns that it is not ours
    for step in (1002, 1003):
        store.calls.clear()
        run.save(step, state)
        assert store.calls["list"] == 2  # for the step before, and for old steps
        assert store.calls["stat"] < 60
    steps = run.steps()
    assert (steps[-4:], len(steps)) == ([1000, 1001, 1002, 1003], left)
