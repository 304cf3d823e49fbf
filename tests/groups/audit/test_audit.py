"""Hazards: of facts, of a live process from outside, and of ranks that are compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist
from click.testing import CliRunner

import holdfast
from holdfast._core.layout.grid import Grid
from holdfast._groups.audit.doctor import ask, variables_of
from holdfast._groups.audit.hazards import GroupFacts, ProcessFacts, hazards, of_variables
from holdfast._groups.lifecycle.open import open_groups
from holdfast._groups.lifecycle.warm_up import warm_up
from holdfast._tools.cli import cli
from holdfast.errors import BadInput
from tests.support.processes import ProcessWorld


def group(name: str, ranks: tuple[int, ...], **other: Any) -> GroupFacts:
    found = {
        "description": name.upper(),
        "backend": "cuda:nccl",
        "timeout": 600.0,
        "is_open": True,
        "is_warm": True,
    }
    return GroupFacts(name, ranks=ranks, **{**found, **other})


def kinds(*groups: GroupFacts, is_eager: bool = False, variables: dict[str, str] | None = None) -> list[str]:
    facts = ProcessFacts(1, 0, 8, "2.13", is_eager, (group("0", tuple(range(8))), *groups), variables or {})
    return [hazard.kind for hazard in hazards(facts)]


def test_each_hazard_is_found_and_a_sound_process_has_none() -> None:
    assert kinds(group("1", (0, 1)), group("2", (0, 2))) == []
    assert kinds(group("1", (0, 1), is_open=False, is_warm=False)) == ["never warmed up"]
    assert kinds(group("1", (0, 1), is_open=None, is_warm=False, backend="cpu:gloo")) == []
    assert kinds(group("1", (0,))) == ["groups of one"]
    assert kinds(group("1", (0, 1), timeout=1800.0)) == ["no timeout given"]
    assert kinds(group("1", (0, 1), timeout=20.0)) == []
    assert kinds(group("a" * 40, (0, 1))) == ["named by history"]
    assert kinds(group("a" * 40, (0, 1)), is_eager=True) == ["eager and local"]
    assert kinds(group("1", (0, 1), description="TP"), group("2", (0, 1), description="TP")) == ["leaked"]
    assert kinds(group("1", (0, 1), description="TP"), group("2", (0, 1), description="EP")) == []


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("TORCH_FR_BUFFER_SIZE", "0", "no flight recorder"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "0", "no flight recorder"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "errors ignored"),
        ("TORCH_NCCL_ENABLE_MONITORING", "false", "no monitor"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", "no dump"),
        ("NCCL_DEBUG", "trace", "slow log"),
    ],
)
def test_switches_that_hide_a_hang(name: str, value: str, kind: str) -> None:
    found = of_variables({name: value})
    assert [hazard.kind for hazard in found] == [kind]
    assert name in found[0].what
    assert of_variables({name: "2000" if "BUFFER" in name else "3"}) == []


def test_ranks_that_made_different_numbers_of_groups_are_told_apart() -> None:
    with ProcessWorld(4) as world:
        for found in world.run(audit_with_history, timeout=60):
            assert found == ["unequal numbers of groups"]


def test_a_live_process_answers_from_outside() -> None:
    with ProcessWorld(4) as world:
        world.run(open_small, timeout=60)
        pid = world.pid(1)
        facts = ask(pid)
        assert facts is not None
        assert (facts.pid, facts.rank, facts.world_size) == (pid, 1, 4)
        assert all(g.is_warm for g in facts.groups)
        assert {g.ranks for g in facts.groups} == {(0, 1, 2, 3), (0, 1), (1, 3)}
        assert facts.variables["GLOO_SOCKET_IFNAME"] == "lo"
        done = CliRunner().invoke(cli, ["doctor", "--pid", str(pid)])
        assert done.exit_code == 0, done.output
        assert "rank 1 of 4" in done.output
        assert "+tp+" in done.output
        assert "no hazards found" in done.output
        said = json.loads(CliRunner().invoke(cli, ["doctor", "--pid", str(pid), "--json"]).output)
        assert len(said["process"]["groups"]) == 3


def test_a_process_that_does_not_tell_shows_its_environment() -> None:
    env = {**os.environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    program = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(program, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the kernel shows no environment of a process that is just begun
        assert ask(process.pid) is None
        done = CliRunner().invoke(cli, ["doctor", "--pid", str(process.pid)])
        assert done.exit_code == 1
        assert "errors ignored: TORCH_NCCL_ASYNC_ERROR_HANDLING is 0" in done.output
        process.kill()
    with pytest.raises(BadInput, match="can't be read"):
        variables_of(process.pid)
    assert CliRunner().invoke(cli, ["doctor", "--pid", str(process.pid)]).exit_code == 2


def open_small(rank: int) -> None:
    warm_up(open_groups(Grid(4, tp=2), job=holdfast.Job(timeout=20)), job=holdfast.Job(timeout=20))


def audit_with_history(rank: int) -> list[str]:
    if rank == 2:
        dist.new_group([0, 1])
    return [hazard.kind for hazard in holdfast.audit(all_ranks=True, job=holdfast.Job(timeout=20))]
