"""Which operations a warm-up issues, by real processes, as torch's profiler and flight recorder have counted
them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast._groups.lifecycle.report import WarmedGroup
from holdfast._groups.lifecycle.warm_up import chosen_operations
from holdfast._groups.session.session import GroupSession
from holdfast.errors import BadInput
from tests.groups.lifecycle import operation_jobs as jobs
from tests.support.ports import held_port
from tests.support.processes import ProcessWorld
from tests.support.waiting import ended


def operations(group: WarmedGroup) -> tuple[str, ...]:
    return tuple(issued.operation for issued in group.operations)


def sends(size: int) -> int:
    """Of one rank in a pipeline of a size, and as many that it receives: in a batch, one by one, and in a
    pipeline of two over the default group."""
    return 3 if size == 2 else 4


def check(report: Any, counts: dict[str, int], by_group: dict[str, dict[str, int]]) -> None:
    """A report, what torch's dispatcher has counted in all, and what its flight recorder has of each
    group."""
    piped = [group for group in report.groups if "pairs" in operations(group)]
    expected = {
        "all_reduce": sum("all_reduce" in operations(group) for group in report.groups),
        "all_to_all": sum("all_to_all" in operations(group) for group in report.groups),
        "send": sum(sends(len(group.ranks)) for group in piped),
        "recv": sum(sends(len(group.ranks)) for group in piped),
    }
    assert counts == {what: number for what, number in expected.items() if number}
    for group in report.groups:
        found = {f"gloo:{what}": 1 for what in ("all_reduce", "all_to_all") if what in operations(group)}
        assert by_group[group.name] == found, group
        assert group.left_out == ()
        assert 0 < sum(issued.seconds for issued in group.operations) <= group.seconds
    for what, seconds in report.operation_seconds.items():
        assert 0 < seconds <= report.seconds, what


def test_each_group_of_a_grid_has_the_operations_that_it_is_used_for() -> None:
    with ProcessWorld(8) as world:
        found = world.run(jobs.of_a_grid, 8, {"tp": 2, "pp": 2, "ep": 2}, None, timeout=60)
    for names, report, counts, by_group in found:
        issued = {group.name: operations(group) for group in report.groups}
        for name, known in names.items():
            sharing = {other for other, same in names.items() if same == known}
            assert ("all_to_all" in issued[known]) == bool(sharing & {"ep", "tp_ep"}), name
            assert ("pairs" in issued[known]) == ("pp" in sharing), name
            assert "all_reduce" in issued[known]
        check(report, counts, by_group)


@pytest.mark.parametrize("size", [3, 4, 5])
def test_all_neighbours_of_a_longer_pipeline_send_and_receive(size: int) -> None:
    with ProcessWorld(size) as world:
        found = world.run(jobs.of_a_grid, size, {"pp": size}, ["pairs"], timeout=60)
    for names, report, counts, by_group in found:
        assert names["pp"] == names["world"]
        pipelines = [group for group in report.groups if len(group.ranks) == size]
        pairs = [group for group in report.groups if len(group.ranks) == 2]  # first and last: the embedding's
        assert {operations(group) for group in report.groups} == {("pairs",)}
        expected = 4 * len(pipelines) + 3 * len(pairs)
        assert counts == {"send": expected, "recv": expected}
        assert not any(by_group.values())


def test_what_is_asked_for_is_issued_on_every_group() -> None:
    with ProcessWorld(4) as world:
        chosen = ["all_reduce", "all_to_all", "pairs"]
        found = world.run(jobs.of_a_grid, 4, {"tp": 2}, chosen, timeout=60)
    for names, report, counts, by_group in found:
        assert len(report.groups) == len(set(names.values())) > 2
        assert all(operations(group) == tuple(chosen) for group in report.groups)
        check(report, counts, by_group)


def test_dimensions_of_a_mesh_are_known_by_their_names() -> None:
    with ProcessWorld(4) as world:
        found = world.run(jobs.of_a_mesh, timeout=60)
    for names, report, counts, by_group in found:
        issued = {group.name: operations(group) for group in report.groups}
        assert issued[names["pp"]] == ("all_reduce", "pairs")
        assert issued[names["ep"]] == ("all_reduce", "all_to_all")
        check(report, counts, by_group)


def test_the_default_group_is_one_of_experts_as_long_as_a_layout_says_so() -> None:
    with ProcessWorld(4) as world:
        for first, second in world.run(jobs.of_a_world_of_experts, 4, timeout=60):
            assert first == ("all_reduce", "all_to_all")
            assert second == ("all_reduce",)


def test_a_session_issues_the_same() -> None:
    with ProcessWorld(4) as world:
        for default, chosen in world.run(jobs.of_sessions, 4, timeout=60):
            used = {name: operations for names, operations in default.items() for name in names.split("+")}
            assert used["ep"] == ("all_reduce", "all_to_all")
            assert used["pp"] == ("all_reduce", "pairs")
            assert used["default_pg"] == ("all_reduce",)
            assert set(chosen) == set(default)
            assert set(chosen.values()) == {("all_to_all",)}


def test_what_a_backend_lacks_is_left_out_unless_it_was_asked_for() -> None:
    with ProcessWorld(4) as world:
        for report, said in world.run(jobs.with_a_backend_that_lacks, timeout=60):
            left = {group.description: (operations(group), group.left_out) for group in report.groups}
            assert left["holdfast:ep"] == (("all_reduce",), ("all_to_all",))
            assert left["holdfast:pp"] == (("all_reduce",), ("pairs",))
            assert said.startswith("GroupsFailed"), said
            assert "has the backend" in said
            assert "which has no all_to_all." in said


@pytest.mark.parametrize(
    ("operation", "what", "timeout"),
    [
        ("all_to_all_single", "hangs", 3.0),
        ("all_to_all_single", "dies", 20.0),
        ("batch_isend_irecv", "hangs", 3.0),
        ("send", "dies", 20.0),
        ("send", "has no memory", 20.0),
    ],
)
def test_a_rank_that_fails_in_an_operation_is_named_on_all_others(
    operation: str, what: str, timeout: float
) -> None:
    victim = 5
    with ProcessWorld(8) as world:
        world.start(jobs.misbehaving, victim, operation, what, timeout)
        results = {result.rank: result for result in world.collect_some(timeout + 4)}
        assert set(results) >= set(range(8)) - {victim}
        for rank, result in results.items():
            if rank == victim:
                continue
            said, took, culprit, missing = result.get()
            assert took < timeout + 3, said
            if what == "hangs":
                assert said.startswith("DeadlineExceeded"), said
                assert victim in missing, said
                doing = "before all_to_all of" if operation == "all_to_all_single" else "in pairs of"
                assert f"{doing} group" in said, said
                continue
            assert culprit == victim, said
            assert ended(said) if what == "dies" else "The first pairs of group" in said, said


def test_ranks_that_do_not_ask_for_the_same_are_told() -> None:
    with ProcessWorld(4) as world:
        for said in world.run(jobs.differing, timeout=60):
            assert said.startswith(
                "BadInput: Rank 2 warms up with ['pairs'], rank 0 with the default operations."
            ), said


@pytest.mark.parametrize("given", ["all_reduce", [], ["pairs", "sends"], [["pairs"]], 5])
def test_operations_that_there_are_not(given: Any) -> None:
    with pytest.raises(BadInput, match=r"^operations=.* must be some of \('all_reduce', .*\), or None\.$"):
        chosen_operations(given)
    with pytest.raises(BadInput, match="must be some of"):
        GroupSession(operations=given)
    assert chosen_operations(["pairs", "all_reduce"]) == ("pairs", "all_reduce")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes a GPU a rank")
def test_nothing_is_opened_after_a_warm_up_over_nccl() -> None:
    with held_port() as port, ProcessWorld(2) as world:
        for issued, opened, as_free_as_before in world.run(jobs.over_nccl, port, timeout=300):
            assert issued["PIPELINE_MODEL_PARALLEL_GROUP"] == ("all_reduce", "pairs")
            assert issued["EXPERT_MODEL_PARALLEL_GROUP"] == ("all_reduce", "all_to_all")
            assert all(opened)
            assert as_free_as_before
