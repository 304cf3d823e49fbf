"""Which steps `Checkpoints` saves and keeps, on real ranks."""

from __future__ import annotations

import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import holdfast
from holdfast._core.io.index_file import open_index
from holdfast._core.store.local import open_store
from holdfast._core.store.pins import Pin
from holdfast._tools.checkpoints.inspect import describe_run, fate
from holdfast._tools.checkpoints.prune import prune
from holdfast.errors import BadInput, Conflict, CorruptCheckpoint, HoldfastError, MissingTensors, StorageError
from tests.run import jobs
from tests.support.processes import ProcessWorld
from tests.support.threads import on_ranks
from tests.support.waiting import SLACK

ALONE = holdfast.Job(no_dist=True)


def test_the_newest_the_periodic_and_the_best_step_stay_on_all_ranks(tmp_path: Path) -> None:
    with ProcessWorld(2) as world:
        for steps, best, restored, value, collectives in world.run(jobs.train_with_metrics, str(tmp_path)):
            assert steps == [2, 3, 6]
            assert (best, restored, value) == (2, 2, 2.0)
            assert collectives == []
    with holdfast.open(tmp_path / "step-00000002") as opened:
        assert opened.metrics == {"loss": 1.0}
        assert opened.notes is None


def test_saves_by_the_clock_are_of_the_same_steps_on_all_ranks(tmp_path: Path) -> None:
    with ProcessWorld(3) as world:
        found = world.run(jobs.train_by_the_clock, str(tmp_path), 0.8, timeout=90)
    first = found[0][0]
    assert len(first) >= 2
    assert all(due == committed == first for due, committed, _ in found)
    # Never early, by the committer's clock, but for the instant between its step's question and its answer.
    assert all(0.7 < seconds < 0.8 + SLACK for seconds in found[0][2])


def test_a_second_loop_in_the_same_run_waits_for_its_own_time(tmp_path: Path) -> None:
    with ProcessWorld(2) as world:
        found = world.run(jobs.two_loops_by_the_clock, str(tmp_path), timeout=120)
    assert found[0] == found[1]
    assert all(loop and loop[0] > 10 for loop in found[0])


def test_a_rank_that_closes_before_the_others_is_named_to_them(tmp_path: Path) -> None:
    with ProcessWorld(3) as world:
        found = world.run(jobs.close_early, str(tmp_path))
    assert [saves for saves, _ in found] == [0, 0, 0]
    assert [len(said) for _, said in found] == [1, 0, 1]
    assert "rank 1 has closed its Checkpoints, 10 steps after the last save" in found[0][1][0]


def test_saves_by_number(tmp_path: Path) -> None:
    with ProcessWorld(2) as world:
        for asked, saved, committed in world.run(jobs.save_by_number, str(tmp_path)):
            assert [step for step, answer in enumerate(asked) if answer] == saved == [0, 4, 8]
            assert committed == [0, 4, 8, 9]


def test_a_save_has_a_timeout_of_its_own(tmp_path: Path) -> None:
    with ProcessWorld(2) as world:
        said, seconds = world.run(jobs.late_rank, str(tmp_path), timeout=60)[0]
    assert said == "DeadlineExceeded"
    assert 2.0 <= seconds < 2.0 + SLACK


def alone(run: Path, **how: Any) -> holdfast.Checkpoints:
    return holdfast.Checkpoints(run, asynchronous=False, job=ALONE, **how)


def test_ctrl_c_in_a_save_is_raised_once(tmp_path: Path) -> None:
    """A program that catches it and saves a last time gets the error that all ranks get, as after any failed
    save, and not another Ctrl-C, which ends it."""
    presses: list[BaseException] = [KeyboardInterrupt()]

    class Interrupted:
        def state_dict(self) -> dict[str, torch.Tensor]:
            if presses:
                raise presses.pop()
            return {"w": torch.ones(3)}

        def load_state_dict(self, state: object) -> None: ...

    run = holdfast.Checkpoints(tmp_path / "run", job=ALONE)
    with pytest.raises(KeyboardInterrupt):
        run.save(1, {"model": Interrupted()})
    assert run._queue.drain() is None, "nobody has to ask for what the call itself has raised"
    with pytest.raises(HoldfastError, match=r"The state could not be read: KeyboardInterrupt\.?$"):
        run.save(2, {"model": Interrupted()})
    run.save(2, {"model": Interrupted()})
    run.close()
    assert run.steps() == [2]


def test_a_step_whose_metrics_can_not_be_read_stays(tmp_path: Path) -> None:
    with alone(tmp_path, keep=1, best="loss", best_mode="min") as run:
        run.save(1, {"w": torch.zeros(3)}, metrics={"loss": 5.0})
        index = tmp_path / "step-00000001" / "index.safetensors"
        damaged = bytearray(index.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        index.write_bytes(damaged)
        for step, loss in ((2, 4.0), (3, 1.0), (4, 2.0)):
            run.save(step, {"w": torch.full((3,), loss)}, metrics={"loss": loss}, expected=None)
        assert run.steps() == [1, 3, 4]
        assert run.best_step() == 3


def test_the_best_of_the_run_before_is_known(tmp_path: Path) -> None:
    """The metrics are in the folder, not in the process."""
    rules: dict[str, Any] = {"keep": 1, "best": "acc", "best_mode": "max"}
    for first in (0, 10):
        with alone(tmp_path, **rules) as run:
            for step in range(first, first + 3):
                run.save(step, {"w": torch.full((3,), float(step))}, metrics={"acc": 1.0 / (step + 1)})
    with alone(tmp_path, **rules) as run:
        assert run.steps() == [0, 12]
        assert run.best_step() == 0
        run.save(12, {"w": torch.ones(3)}, metrics={"acc": 9.0})  # again, and better
        run.save(13, {"w": torch.zeros(3)})  # not measured
        assert run.steps() == [12, 13]
        assert run.best_step() == 12


def test_one_step_in_every_so_much_time_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e9]
    monkeypatch.setattr("holdfast._core.saving.commit.time.time", lambda: now[0])
    with alone(tmp_path, keep=1, keep_every=timedelta(minutes=10)) as run:
        for step in range(8):
            run.save(step, {"w": torch.full((3,), float(step))})
            now[0] += 240
        assert run.steps() == [0, 3, 6, 7]


def test_the_best_of_all_steps_is_the_only_best_one(tmp_path: Path) -> None:
    with alone(tmp_path, keep=1, keep_every=2, best="loss", best_mode="min") as run:
        for step, loss in ((2, 0.1), (3, 0.5), (5, 0.9), (7, 0.9)):
            run.save(step, {"w": torch.full((3,), loss)}, metrics={"loss": loss})
        assert run.steps() == [2, 7]


def test_the_best_steps_stay(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"keep": 1, "best": "acc", "best_mode": "max", "keep_best": 2}
    with alone(tmp_path, **rules) as run:
        for step, accuracy in enumerate((0.5, 0.9, 0.7, 0.8, float("nan"), 0.9, 0.1)):
            run.save(step, {"w": torch.full((3,), float(step))}, metrics={"acc": accuracy})
        assert run.steps() == [1, 5, 6]
        assert run.best_step() == 5
    described = describe_run(run.store)
    assert described.rules == "the newest 1, the 2 with the highest acc"
    assert {step.step: step.kept for step in described.steps} == {
        1: "one of the 2 best by acc",
        5: "one of the 2 best by acc",
        6: "one of the newest 1",
    }
    with alone(tmp_path, **{**rules, "keep_best": 1}) as run:  # the next start may have other rules
        run.save(7, {"w": torch.ones(3)}, metrics={"acc": 0.2})
        assert run.steps() == [5, 7]


@pytest.mark.parametrize("where", ["one job", "a job each"])
def test_steps_of_some_names_leave_the_newest_whole_ones(where: str, tmp_path: Path) -> None:
    state = {"w": torch.zeros(3), "m": torch.ones(3)}

    def save(run: holdfast.Checkpoints, step: int) -> None:
        state["w"].fill_(step)
        some: dict[str, Any] = (
            {} if step in (1, 5) else {"exclude": ["m"]} if step == 4 else {"include": ["w"]}
        )
        run.save(step, state, **some)

    if where == "one job":
        with alone(tmp_path, keep=1) as run:
            for step in (1, 2, 3, 4):
                save(run, step)
    else:
        for step in (1, 2, 3, 4):
            with alone(tmp_path, keep=1) as run:
                save(run, step)
    assert run.steps() == [1, 4]
    described = describe_run(run.store)
    assert [(step.kept, step.is_partial) for step in described.steps] == [
        ("one of the newest 1 whole ones", False),
        ("one of the newest 1", True),
    ]
    assert fate(described, described.steps[1]) == "saved with include= or exclude=, one of the newest 1"
    with alone(tmp_path, keep=1) as run:
        assert run.restore(state) == 1
        save(run, 5)
        assert run.steps() == [5]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (lambda rank: torch.full((2,), float(rank)), "hold different bytes"),
        (lambda rank: torch.zeros(2 + rank), "Ranks disagree on 'w'"),
        (lambda rank: float(rank), "Ranks disagree on 'w'"),
        (lambda rank: holdfast.Shard(torch.zeros(1, 2), (3, 2), (rank, 0)), "is not covered"),
    ],
)
def test_what_ranks_disagree_on_is_told_with_the_step_that_failed(
    part: Any, said: str, tmp_path: Path
) -> None:
    """The next save raises it, so the sentence alone has to say which one failed."""

    def job(roster: Any) -> str:
        run = holdfast.Checkpoints(tmp_path, job=holdfast.Job(roster=roster, timeout=30, stall_timeout=10))
        run.save(100, {"w": part(roster.rank)})
        with pytest.raises(HoldfastError, match=said) as raised:
            run.save(200, {"w": torch.zeros(2)})
        run.close()
        return str(raised.value)

    (first, second) = on_ranks(2, job)
    assert first == second
    assert f"save of {tmp_path}/step-00000100 (step 100) failed" in first
    assert first.count("step 100") == 1


def test_a_restore_passes_over_steps_of_some_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def state() -> dict[str, torch.Tensor]:
        return {"w": torch.full((3,), -1.0), "m": torch.full((3,), -1.0)}

    steps: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (2, {"include": ["w"]}),
        (3, {}),
        (4, {"exclude": ["m"]}),
        (5, {"include": ["m"]}),
    ]
    lacks = r"It was saved with include= or exclude=, and holds 1 names\. Load it with"
    with alone(tmp_path) as run:
        for step, some in steps:
            run.save(step, {"w": torch.full((3,), float(step)), "m": torch.full((3,), 10.0 * step)}, **some)
        whole = state()
        assert run.restore(whole) == 3
        assert (whole["w"][0], whole["m"][0]) == (3.0, 30.0)
        passed_over = [record.message for record in caplog.records if "passed over" in record.message]
        assert [line.split(" lacks")[0] for line in passed_over] == [
            "Step 5 was saved with include= or exclude=,",
            "Step 4 was saved with include= or exclude=,",
        ]
        # A state that asks for the names that such a step has is filled from it.
        assert run.restore({"w": torch.zeros(3)}) == 4
        assert run.restore({"m": torch.zeros(3)}) == 5
        assert run.restore(state(), include=["w"]) == 4
        assert run.restore(state(), strict=False) == 5
        assert run.restore({"w": torch.zeros(3)}, strict=False) == 4, "step 5 fills no tensor of it"
        # A step that is given, and a name that no step has: refused, as ever.
        for given in ({"step": 4}, {"fallback": False}):
            with pytest.raises(MissingTensors, match=lacks):
                run.restore(state(), **given)
        with pytest.raises(MissingTensors, match="step-00000003 does not hold 1 of the names"):
            run.restore({**state(), "new": torch.zeros(3)})
        damage(tmp_path / "step-00000003")
        assert run.restore(state()) == 1
        damage(tmp_path / "step-00000001")
        with pytest.raises(
            CorruptCheckpoint,
            match=r"No committed step in .* can be restored\. Damaged: \[1, 3\]\. Saved with include= or "
            r"exclude=, and without names of the state: \[2, 4, 5\]\.",
        ):
            run.restore(state())
        for step in (1, 3):
            run.delete(step)
        with pytest.raises(MissingTensors, match=rf"step-00000005 does not hold 1 of .*\n?.*{lacks}"):
            run.restore(state())


def test_all_ranks_pass_over_a_step_that_lacks_names_of_one(tmp_path: Path) -> None:
    def job(roster: Any) -> Any:
        made = holdfast.Job(roster=roster, timeout=30, stall_timeout=10)
        with holdfast.Checkpoints(tmp_path, job=made) as run:
            values = {name: torch.zeros(2) for name in ("w", "m")}
            run.save(1, values)
            run.save(2, values, include=["w"])
            return run.restore({name: values[name] for name in ("w", "m")[: roster.rank + 1]})

    assert on_ranks(2, job) == [1, 1]


def damage(step: Path) -> None:
    """Flip bits in the data files of a step."""
    for data in (step / "data").iterdir():
        data.write_bytes(bytes(byte ^ 1 for byte in data.read_bytes()))


@pytest.mark.parametrize("why", ["damaged", "not answered"])
def test_a_whole_step_stays_while_the_newer_ones_can_not_be_read(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.zeros(3), "m": torch.ones(3)}
    with alone(tmp_path) as run:
        run.save(1, state)
        run.save(2, state)
    second = tmp_path / "step-00000002" / "index.safetensors"
    if why == "damaged":
        second.write_bytes(b"damaged")
    else:

        def answers(store: Any) -> Any:
            if store.url.endswith("2"):
                raise StorageError("Storage does not answer.")
            return open_index(store)

        monkeypatch.setattr("holdfast._core.run.old_steps.open_index", answers)
    with alone(tmp_path, keep=1) as run:
        run.save(3, state, include=["w"])
        assert run.steps() == [1, *([2] if why == "not answered" else []), 3]
        run.save(4, state)
        assert run.steps() == [4]


@pytest.mark.parametrize("keep", [1, 2])
def test_prune_leaves_the_newest_whole_steps(keep: int, tmp_path: Path) -> None:
    state = {"w": torch.zeros(3), "m": torch.ones(3)}
    with alone(tmp_path) as run:
        for step, include in ((1, None), (2, None), (3, None), (4, ["w"]), (5, ["w"]), (6, ["w"])):
            run.save(step, state, include=include)
    assert prune(tmp_path, keep=keep, dry_run=True).kept == ((3, 6) if keep == 1 else (2, 3, 5, 6))
    prune(tmp_path, keep=keep)
    assert run.steps() == ([3, 6] if keep == 1 else [2, 3, 5, 6])


def test_metrics_and_rules_survive_a_reindex(tmp_path: Path) -> None:
    from holdfast._core.existing.reindex import reindex

    with alone(tmp_path, keep=2, keep_every=5) as run:
        run.save(1, {"w": torch.zeros(3)}, metrics={"loss": 2.0, "bad": float("inf")}, notes={"why": "x"})
    (tmp_path / "step-00000001" / "index.safetensors").unlink()
    reindex(tmp_path / "step-00000001")
    with holdfast.open(tmp_path / "step-00000001") as opened:
        assert opened.metrics == {"loss": 2.0, "bad": None}
        assert opened.notes == {"why": "x"}


def test_bad_values_are_one_sentence(tmp_path: Path) -> None:
    for how, words in (
        ({"save_every": 0}, "save_every must be a number of steps from 1 on"),
        ({"save_every": "1h"}, "save_every must be a number of steps from 1 on"),
        ({"keep_every": 2}, "without keep= all of them stay"),
        ({"best": "loss"}, "needs best_mode="),
    ):
        with pytest.raises(BadInput, match=words):
            alone(tmp_path, **how)  # type: ignore[arg-type]
    with alone(tmp_path) as run:
        with pytest.raises(BadInput, match="best_step\\(\\) needs the name of a metric"):
            run.best_step()
        with pytest.raises(BadInput, match="metrics must be names with numbers"):
            run.save(1, {"w": torch.zeros(3)}, metrics={"loss": "low"})  # type: ignore[dict-item]
        with pytest.raises(BadInput, match="timeout"):
            run.save(1, {"w": torch.zeros(3)}, timeout=-1)
        assert run.steps() == []


def test_no_rule_no_word_of_it_in_the_index(tmp_path: Path) -> None:
    with alone(tmp_path) as run:
        run.save(1, {"w": torch.zeros(3)})
    about = json.dumps(holdfast.open(tmp_path / "step-00000001")._source.about)
    assert "retention" not in about
    assert "metrics" not in about
    shutil.rmtree(tmp_path)


def test_a_step_is_deleted_on_all_ranks_together(tmp_path: Path) -> None:
    def job(roster: Any) -> Any:
        made = holdfast.Job(roster=roster, timeout=30, stall_timeout=10)
        with holdfast.Checkpoints(tmp_path, job=made) as run:
            for step in (1, 2, 3):
                run.save(step, {"w": torch.full((2,), float(step))})
            run.delete(2)
            before = run.steps()
            errors = []
            for step in (2, 7):
                try:
                    run.delete(step)
                except HoldfastError as error:
                    errors.append(f"{type(error).__name__}: {error.message}")
            state = {"w": torch.zeros(2)}
            run.delete(3)
            return before, errors, run.restore(state), state["w"].tolist()

    for before, errors, restored, value in on_ranks(2, job):
        assert before == [1, 3]
        assert len(errors) == 2
        assert all("NotCommitted" in line and "no committed step" in line for line in errors)
        assert (restored, value) == (1, [1.0, 1.0])
    assert not (tmp_path / "step-00000002").exists()


def test_a_step_that_is_read_or_foreign_is_not_deleted(tmp_path: Path) -> None:
    with holdfast.Checkpoints(tmp_path, job=ALONE) as run:
        run.save(1, {"w": torch.ones(2)})
        run.save(2, {"w": torch.ones(2)})
        run.close()
        (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
        with (
            closing(Pin(open_store(tmp_path / "step-00000002"))),
            pytest.raises(Conflict, match="is being read"),
        ):
            run.delete(2)
        assert run.steps() == [1, 2]
        run.delete(1)
        assert run.steps() == [2]
        assert (tmp_path / "step-00000001" / "notes.txt").read_text() == "mine"
        (tmp_path / "step-00000005").symlink_to(tmp_path / "step-00000002")
        torch_dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-00000006")
        for step in (5, 6):
            with pytest.raises(BadInput, match="is no step that Holdfast has saved there"):
                run.delete(step)
        assert run.steps() == [2, 5, 6]
        assert (tmp_path / "step-00000002" / "index.safetensors").exists()


def test_a_run_is_restored_as_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    with holdfast.Checkpoints(tmp_path, job=ALONE) as run:
        run.save(4, {"module": {"w": torch.ones(2), "head": torch.ones(3)}, "step": 4})
        model = {"w": torch.zeros(2, dtype=torch.bfloat16), "head": torch.zeros(5)}
        state: dict[str, Any] = {"model": model, "step": 0}
        how: dict[str, Any] = {"rename": {"module": "model"}, "cast": True, "on_shape": "skip"}
        assert run.restore(state, **how) == 4
        assert (state["step"], model["w"].tolist()) == (4, [1.0, 1.0])
        report = run.restore_report(state, **how)
        assert report is not None
        assert (report.step, report.skipped, report.missing) == (4, ("model.head",), ())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_threads_that_share_a_run_follow_one_another(tmp_path: Path, asynchronous: bool) -> None:
    steps = itertools.count(1)

    def save(_: int) -> None:
        for _ in range(10):
            step = next(steps)
            run.save(step, {"w": torch.full((50,), float(step))})

    with (
        holdfast.Checkpoints(tmp_path, asynchronous=asynchronous, job=ALONE) as run,
        ThreadPoolExecutor(3) as pool,
    ):
        list(pool.map(save, range(3)))
    assert run.steps() == list(range(1, 31))
    for step in run.steps():
        assert holdfast.open(tmp_path / f"step-{step:08}")["w"][:].unique().tolist() == [step]
