"""`holdfast.install()` before and after a framework is imported, and `holdfast run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import types
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed

import holdfast
from holdfast._core.protocol.call import find_roster
from holdfast._core.torch_private import clone_store
from holdfast._frameworks.patching import Patches, Replacement, rebind, undo
from holdfast.errors import BadInput
from tests.frameworks import install_jobs
from tests.support.processes import ProcessWorld

ROOT = Path(__file__).parents[2]


def python(program: str, *args: str, env: dict[str, str] | None = None, expect: int = 0) -> str:
    """What a new process prints that runs a program."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *args],
        env={**os.environ, **(env or {})},
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == expect, done.stderr
    return done.stdout


def run(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command line, in a new process."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "from holdfast._tools.cli import main; main()", *args],
        env={**os.environ, **(env or {})},
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


@pytest.mark.wide
def test_before_the_framework_is_imported() -> None:
    assert python(install_jobs.EARLY) == "done\n"


def speaks_while_its_client_is_held(rank: int) -> bool:
    """Hold the program's client of the message store directly after `install()`, and send a message."""
    holdfast.install(checkpoints=False, guard=False)
    store = torch.distributed.distributed_c10d._get_default_store()
    other_client = clone_store(store)
    held = threading.Thread(target=store.wait, args=([f"go on {rank}"], timedelta(seconds=60)))
    held.start()
    roster = find_roster(holdfast.Job()).bounded()
    sent = threading.Thread(target=roster.put, args=(f"test/{rank}", {}), daemon=True)
    sent.start()
    sent.join(20)
    spoke = held.is_alive() and not sent.is_alive()
    own = roster.get([f"test/{other}" for other in range(2)]) if spoke else []
    other_client.set(f"go on {rank}", "")
    held.join()
    holdfast.uninstall()
    return spoke and own[rank] == {}


def installs_while_its_client_is_held(rank: int) -> bool:
    """Call `install()` while another thread of the program waits in the message store, and go on."""
    store = torch.distributed.distributed_c10d._get_default_store()
    other_client = clone_store(store)
    held = threading.Thread(target=store.wait, args=([f"go {rank}"], timedelta(seconds=60)))
    held.start()
    holdfast.install(checkpoints=False, guard=False)
    returned = held.is_alive()
    other_client.set(f"go {rank}", "")
    held.join()
    find_roster(holdfast.Job()).put(f"test/later/{rank}", {})
    holdfast.uninstall()
    return returned


def test_install_does_not_wait_for_a_thread_that_waits_in_the_store() -> None:
    with ProcessWorld(2) as world:
        assert world.run(installs_while_its_client_is_held) == [True, True]


def test_a_rank_that_goes_into_new_group_at_once_can_be_asked() -> None:
    """Such a call holds the program's client of the message store for as long as other ranks do not come."""
    with ProcessWorld(2) as world:
        assert world.run(speaks_while_its_client_is_held) == [True, True]


def test_after_functions_were_bound_elsewhere() -> None:
    with ProcessWorld(1) as world:
        assert world.run(install_jobs.said_by, install_jobs.LATE)[0].endswith("done\n")


def test_what_a_module_has_imported_can_be_replaced_there_alone() -> None:
    user, ours, stock = types.ModuleType("user_of_dumps"), [1], json.dumps
    user.dumps = json.dumps  # type: ignore[attr-defined]
    sys.modules["user_of_dumps"] = user
    patches = Patches()
    try:
        patches.begin(
            [Replacement(user.__name__, "dumps", "checkpoints", lambda _: lambda: ours, imported=True)]
        )
        rebind([patches])
        assert user.dumps() is ours
        assert json.dumps is stock
        undo([patches])
        assert user.dumps is json.dumps is stock
    finally:
        del sys.modules["user_of_dumps"]


def test_after_groups_were_made_one_sentence_says_so() -> None:
    with ProcessWorld(1) as world:
        said = world.run(install_jobs.said_by, install_jobs.TOO_LATE)[0].splitlines()
    assert [line for line in said if "process groups" in line] == [
        "install() came after megatron-core has made its process groups: they are not warmed up, and no session "
        "watches them. Call install() before initialize_model_parallel, or holdfast.warm_up() now."
    ]
    assert said[-1] == "done"


def test_bad_input() -> None:
    with pytest.raises(BadInput, match="verk is not known"):
        holdfast.install("verk")
    with pytest.raises(BadInput, match="timeout"):
        holdfast.install(job=holdfast.Job(timeout=-1))
    with pytest.raises(BadInput, match="host_memory_budget"):
        holdfast.install(job=holdfast.Job(options=holdfast.Options(host_memory_budget=0)))
    assert holdfast.installed() == []


def test_several_frameworks_at_once() -> None:
    holdfast.install(["lightning", "ms-swift"])
    try:
        names = [found.name for found in holdfast.installed()]
        assert {"lightning", "ms-swift", "megatron-core", "torch-dcp"} <= set(names)
    finally:
        holdfast.uninstall()


def test_run_installs_before_a_script_starts(tmp_path: Path) -> None:
    script = tmp_path / "converter.py"
    script.write_text(install_jobs.CONVERTER)
    folder = tmp_path / "converted"
    folder.mkdir()
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = run("run", "--no-session", "--", sys.executable, "-W", "ignore", str(script), str(folder), env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[0.0, 1.0, 2.0, 3.0] actor\n")
    assert (folder / "index.safetensors").exists()


@pytest.mark.wide
def test_run_where_holdfast_itself_imports_torch() -> None:
    program = install_jobs.HOLDFAST_FIRST
    done = run("run", "--no-session", "--", sys.executable, "-W", "ignore", "-c", program)
    assert done.stdout.splitlines() == ["True", "True"], done.stderr


def test_run_keeps_the_environments_own_customization(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import hidden_customization\n")
    (tmp_path / "hidden_customization.py").write_text("RAN = True\n")
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = run("run", "--", sys.executable, "-c", install_jobs.FORWARD, env=env)
    assert done.stdout == "hidden one ran: True\n", done.stderr


def test_run_prints_the_variables_for_launchers() -> None:
    done = run("run", "--env", "--timeout", "60", "--framework", "verl")
    lines = dict(line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines())
    assert Path(lines["PYTHONPATH"].strip("'").split(os.pathsep)[0], "sitecustomize.py").exists()
    assert json.loads(lines["HOLDFAST_INSTALL"].strip("'"))["job"]["timeout"] == 60.0


@pytest.mark.parametrize(
    ("args", "said"),
    [((), "needs a command"), (("--", "/nowhere/at/all"), "can't be run")],
    ids=["nothing", "no such program"],
)
def test_run_with_bad_input(args: tuple[str, ...], said: str) -> None:
    done = run("run", *args)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_exit_code_is_the_programs() -> None:
    assert run("run", "--", sys.executable, "-c", "raise SystemExit(3)").returncode == 3


def test_doctor_lists_the_frameworks_that_are_there() -> None:
    done = run("doctor")
    assert "megatron-core 0." in done.stdout
    assert "holdfast.install() knows it" in done.stdout
