"""Megatron-Bridge where ranks take no part (NeMo RL issue 2226), and under Megatron-FSDP (Megatron-LM issue
4910): stock's symptom, and its absence after `install()`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast._core.io.index_file import open_index
from holdfast._core.protocol.job import Job
from holdfast._core.store.local import open_store
from holdfast._models.equality.same import same
from holdfast._tools.checkpoints.verify import verify
from tests.frameworks.megatron.models import Layout
from tests.frameworks.megatron_bridge import jobs as bridge_jobs
from tests.frameworks.megatron_fsdp import bridge as fsdp
from tests.support.processes import ProcessWorld
from tests.support.waiting import SLACK

TRACKER = "latest_checkpointed_iteration.txt"
LAYOUT = Layout(tp=2, ep=2)
JOB = Job(timeout=60)
GIVEN = replace(JOB, participants=range(4))


@pytest.mark.wide
def test_stock_waits_for_ranks_that_do_not_train(tmp_path: Path) -> None:
    with ProcessWorld(6) as world:
        found = world.run(bridge_jobs.save_of_some, str(tmp_path), 4, None, None, 4.0, timeout=100)
    for said, took in found[:4]:
        assert said != "saved"
        assert took >= 3.5
        assert "rank 4" not in said
    assert not (tmp_path / TRACKER).exists()


@pytest.mark.wide
@pytest.mark.parametrize("job", [JOB, GIVEN], ids=["found out", "given"])
def test_only_the_ranks_that_train_are_waited_for(job: Job, tmp_path: Path) -> None:
    with ProcessWorld(6) as world:
        found = world.run(bridge_jobs.save_of_some, str(tmp_path), 4, None, job, 4.0, timeout=100)
    assert [said for said, _ in found] == ["saved"] * 4 + ["takes no part"] * 2
    assert (tmp_path / TRACKER).read_text() == "0"
    assert (tmp_path / "iter_0000000" / "index.safetensors").exists()


@pytest.mark.wide
def test_idle_members_of_the_groups_are_left_out(tmp_path: Path) -> None:
    """The report's literal case: the data-parallel groups contain the ranks of the inference engine."""
    with ProcessWorld(8) as world:
        found = world.run(bridge_jobs.save_of_some, str(tmp_path), 4, None, GIVEN, 4.0, 8, timeout=100)
    assert [said for said, _ in found] == ["saved"] * 4 + ["takes no part"] * 4
    assert (tmp_path / TRACKER).read_text() == "0"
    assert verify(tmp_path / "iter_0000000").whole


@pytest.mark.wide
def test_idle_members_that_nobody_has_named_are_told(tmp_path: Path) -> None:
    with ProcessWorld(8) as world:
        found = world.run(
            bridge_jobs.save_of_some, str(tmp_path), 4, None, Job(timeout=4.0), 4.0, 8, timeout=100
        )
    for said, _ in found[:4]:
        assert "rank 4" in said
        assert "leave them out: job=holdfast.Job(participants=...)" in said


def test_a_save_of_a_model_does_without_idle_members(tmp_path: Path) -> None:
    """The report's literal case by the bare line: nobody has named the idle ranks."""
    with ProcessWorld(8) as world:
        job = Job(report_after=2.0)
        found = world.run(bridge_jobs.save_and_log, str(tmp_path / "bare"), 4, job, 0.0, LAYOUT, timeout=100)
    with ProcessWorld(8) as world:
        world.run(bridge_jobs.save_of_some, str(tmp_path / "given"), 4, None, GIVEN, 4.0, 8, timeout=100)
    assert [said for said, *_ in found] == ["saved"] * 4 + ["takes no part"] * 4
    assert all(2.0 < took < 2 * SLACK for _, took, _ in found[:4])
    lines = "".join(log for *_, log in found)
    assert "ranks 4-7 had not entered it" in lines
    # On a busy host a rank that trains may be late, too, and is reported as others are.
    assert not re.search(r"for ranks? [4-7]\b.*It waits on", lines)
    assert "It is committed." in lines
    assert "job=holdfast.Job(participants=...)" in lines
    assert (tmp_path / "bare" / TRACKER).read_text() == "0"
    folders = [tmp_path / how / "iter_0000000" for how in ("bare", "given")]
    assert verify(folders[0]).whole
    assert same(*folders).same
    with open_index(open_store(folders[0])) as index:
        assert index.about["notes"]["without"] == [4, 5, 6, 7]


@pytest.mark.wide
def test_an_idle_member_that_comes_late_is_told(tmp_path: Path) -> None:
    with ProcessWorld(8) as world:
        job = Job(report_after=2.0)
        found = world.run(bridge_jobs.save_and_log, str(tmp_path), 6, job, 2 * SLACK, LAYOUT, timeout=100)
    assert [said for said, *_ in found] == ["saved"] * 8
    assert verify(tmp_path / "iter_0000000").whole
    for rank, (_, took, log) in enumerate(found):
        assert took < 2 * SLACK
        assert ("came after that, and saves nothing" in log) == (rank >= 6)


def test_nobody_but_the_lowest_rank_decides_that_ranks_are_idle(tmp_path: Path) -> None:
    with ProcessWorld(4) as world:
        found = world.run(
            bridge_jobs.save_and_log, str(tmp_path), 4, Job(timeout=60), 0.0, LAYOUT, "forged", timeout=100
        )
    for said, *_ in found[:3]:
        assert said.startswith(("SaveFailed", "CheckpointingException")), said
        assert "is made without ranks 3, which rank 0 has not decided" in said
    assert "saves nothing" in found[3][2]
    assert not (tmp_path / TRACKER).exists()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("ranks", "layout", "changes"),
    [(8, LAYOUT, "object"), (4, Layout(tp=2, ep=4), "")],
    ids=["an object", "the only holder of its experts"],
)
def test_a_late_rank_with_something_of_its_own_is_waited_for(
    ranks: int, layout: Layout, changes: str, tmp_path: Path
) -> None:
    with ProcessWorld(ranks) as world:
        job = Job(report_after=1.0)
        found = world.run(
            bridge_jobs.save_and_log, str(tmp_path), ranks - 1, job, 8.0, layout, changes, timeout=100
        )
    assert {said for said, *_ in found} == {"saved"}
    assert all(took > 4.0 for _, took, _ in found[:-1])
    assert not any("It is committed." in log for *_, log in found)
    assert verify(tmp_path / "iter_0000000").whole


@pytest.mark.wide
def test_one_that_trains_and_does_not_come_is_named(tmp_path: Path) -> None:
    with ProcessWorld(6) as world:
        found = world.run(
            bridge_jobs.save_of_some, str(tmp_path), 4, 2, replace(JOB, stall_timeout=2.0), 2.0, timeout=100
        )
    for rank in (0, 1, 3):
        said, took = found[rank]
        assert "rank 2" in said
        assert "rank 4" not in said
        assert took < 4 + SLACK


@pytest.mark.wide
def test_stock_preparation_under_megatron_fsdp_never_saves(tmp_path: Path) -> None:
    with ProcessWorld(4) as world:
        said = world.run(fsdp.save, str(tmp_path), Layout(ep=2), False, timeout=100)
    assert "saved" not in said


@pytest.mark.wide
@pytest.mark.parametrize(
    "offloads", [*(pytest.param(share, marks=pytest.mark.soak) for share in (None, 0.0)), 1.0]
)
def test_megatron_fsdp_saves_and_loads_through_bridges_own_functions(
    offloads: float | None, tmp_path: Path
) -> None:
    """Also with `optimizer_cpu_offload`; offloading all is how Megatron-LM issue 4910 has it."""
    with ProcessWorld(4) as world:
        found = world.run(fsdp.save_load_compare, str(tmp_path), Layout(ep=2), offloads, timeout=150)
    assert all(changed > 5 and held > 20 for changed, held, _ in found), found
    assert (tmp_path / TRACKER).read_text() == "1"
    assert (tmp_path / "iter_0000001" / "index.safetensors").exists()
    losses = found[0][2]
    with ProcessWorld(4) as world:
        same = world.run(fsdp.resume, str(tmp_path), Layout(ep=2), offloads, timeout=150)
        assert same == [losses] * 4
    with ProcessWorld(4) as world:
        for other in world.run(fsdp.resume, str(tmp_path), Layout(tp=2, ep=2), offloads, timeout=150):
            assert other == pytest.approx(losses, rel=1e-4)
