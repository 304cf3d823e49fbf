"""The command line starts fast, imports no torch, and never shows a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from keyword import iskeyword
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import holdfast
from holdfast._tools.cli import COMMANDS, cli
from holdfast._version import __version__
from tests.cli.conftest import Run, data_files

TOLD = """
import sys
from click.testing import CliRunner
from holdfast._tools.cli import cli
result = CliRunner().invoke(cli, sys.argv[1:])
if result.exception is not None and not isinstance(result.exception, SystemExit):
    raise result.exception
print(result.exit_code, *sorted(sys.modules))
"""


def modules_after(*arguments: object) -> tuple[int, set[str]]:
    """The exit code and the modules that a fresh process has imported once a command ran."""
    done = subprocess.run(
        [sys.executable, "-c", TOLD, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    code, *names = done.stdout.split()
    return int(code), set(names)


def test_no_command_imports_torch(checkpoint: Path, kept: Path) -> None:
    log = checkpoint.parent / "job.log"
    log.write_text("[rank2]: ValueError: bad sample\n")
    calls: list[tuple[object, ...]] = [
        ("latest", kept.parent),
        ("inspect", checkpoint),
        ("verify", checkpoint),
        ("explain", checkpoint, "wide", "--box", "0:4,500:520"),
        ("diff", checkpoint, kept, "--values"),
        ("fetch", kept, "--ranks", "0", "--grid", "world=1", "--to", checkpoint.parent / "fetched"),
        ("models",),
        ("reindex", checkpoint, "--force", "--dry-run"),
        ("prune", kept.parent, "--dry-run"),
        ("diagnose", log),
        ("watch", kept.parent, "--once"),
        ("report", kept.parent, "--html", checkpoint.parent / "report.html"),
        ("doctor",),
        ("run", "--env"),
    ]
    assert {call[0] for call in calls} == set(COMMANDS) - {
        "import",
        "export",
        "same",
    }  # these write torch's own archives
    torch_dcp.save({"w": torch.ones(2)}, checkpoint_id=checkpoint.parent / "dcp", no_dist=True)
    calls.append(("inspect", checkpoint.parent / "dcp"))
    for call in calls:
        code, modules = modules_after(*call)
        assert code == 0, call
        assert "torch" not in modules, call


def test_the_probe_would_see_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch\n" + TOLD, "--help"], capture_output=True, text=True, check=True
    )
    assert "torch" in done.stdout.split()


STARTED = """
import sys
from holdfast._tools.cli import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""
NEVER = {"torch", "rich", "numpy.ma", "holdfast._core.format.pickle_reader", "holdfast._models.views"}
"""What none of these commands needs."""
DATA = {"holdfast._core.io.file_reader", "holdfast._core.format.plain_objects"}
"""What is needed to read an object."""


@pytest.mark.parametrize(
    ("command", "most", "in_all", "unwanted"),
    [
        ("--help", 24, 124, {"numpy", "msgspec", "holdfast._core.store", "holdfast.errors"}),
        ("latest", 50, 159, {"numpy", "holdfast._core.format.index"}),
        ("inspect", 160, 284, DATA),
        ("inspect an object", 176, 302, set()),
    ],
)
def test_what_is_imported_at_the_start(
    command: str, most: int, in_all: int, unwanted: set[str], kept: Path, tmp_path: Path
) -> None:
    """By number, because a time depends on the machine. `most` leaves room for other versions, not for a
    package."""
    holdfast.save({"w": torch.ones(2)}, tmp_path / "no objects", job=holdfast.Job(no_dist=True))
    places = {"latest": kept.parent, "inspect": tmp_path / "no objects", "inspect an object": kept}
    arguments = [command.split()[0], *([str(places[command])] if command in places else [])]
    done = subprocess.run(
        [sys.executable, "-c", STARTED, *arguments], capture_output=True, text=True, check=True
    )
    modules = set(done.stderr.split())
    assert not modules & (NEVER | unwanted)
    # Of Python's own each version imports others for the same.
    assert len(modules) <= in_all + (8 if sys.version_info >= (3, 12) else 0), sorted(modules)
    found = {name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names}
    assert len(found) <= most, (len(found), sorted(found))


def test_table_of_commands_is_that_of_the_modules(run: Run) -> None:
    listed = run("--help").stdout
    for name, line in COMMANDS.items():
        command = import_module(f"holdfast._tools.cli.{name}{'_' * iskeyword(name)}").command
        assert command.name == name
        assert command.get_short_help_str(200) == line
        assert f"{name} " in listed
        assert ("--json" in run(name, "--help").stdout) == (name != "run")


def test_unknown_commands_and_options_are_bad_usage(run: Run) -> None:
    assert run("inspct").exit_code == 2
    assert run("latest").exit_code == 2
    assert run("verify", "--fast", "x").exit_code == 2


@pytest.mark.parametrize("command", ["inspect", "verify", "explain", "diff", "fetch", "reindex"])
@pytest.mark.parametrize("place", ["missing", "empty", "file"])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_place_that_is_no_checkpoint_ends_in_one_sentence(
    command: str, place: str, as_json: bool, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / place
    if place == "empty":
        path.mkdir()
    elif place == "file":
        path.write_text("hello")
    more = {"explain": ["w"], "diff": [path], "fetch": ["--ranks", 0, "--grid", "world=1"]}.get(command, [])
    result = run(command, path, *more, *(["--json"] if as_json else []))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("holdfast: ")
    assert result.stderr.count("\n") == 1
    assert str(path) in result.stderr


def test_control_characters_in_names_do_not_reach_the_terminal(tmp_path: Path, run: Run) -> None:
    holdfast.save({"a\x1b[31m[bold]red": torch.zeros(2)}, tmp_path / "c", job=holdfast.Job(no_dist=True))
    shown = run("inspect", tmp_path / "c").stdout
    assert "\x1b" not in shown
    assert "\\x1b[31m[bold]red" in shown


def test_errors_without_sentence_are_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import holdfast._tools.cli.latest as module

    def broken(run: str) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "latest", broken)
    with pytest.raises(ZeroDivisionError):
        cli(["latest", str(tmp_path)], standalone_mode=False)


def test_nothing_leaks_a_descriptor(checkpoint: Path, kept: Path, run_json: Callable[..., object]) -> None:
    def every() -> None:
        run_json("inspect", checkpoint)
        run_json("verify", checkpoint)
        run_json("explain", checkpoint, "wide")
        run_json("diff", checkpoint, kept)
        run_json("reindex", checkpoint, "--force")
        run_json("prune", checkpoint.parent)

    every()
    before = len(os.listdir("/proc/self/fd"))
    every()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert data_files(checkpoint)


def test_it_says_its_version() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "from holdfast._tools.cli import main; main()", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert __version__ in said.stdout


def test_python_m_is_the_same_program() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "holdfast", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert all(name in said.stdout for name in COMMANDS)


def test_a_shell_completes_commands_and_options() -> None:
    """As docs/commands.md says: the line in the startup file, then what a shell asks at a tab."""
    for shell in ("bash", "zsh", "fish"):
        assert "_HOLDFAST_COMPLETE" in completion(f"{shell}_source")
    asked = {"COMP_WORDS": "holdfast la", "COMP_CWORD": "1"}
    assert completion("bash_complete", **asked).split() == ["plain,latest"]
    asked = {"COMP_WORDS": "holdfast verify --", "COMP_CWORD": "2"}
    assert "plain,--json" in completion("bash_complete", **asked).split()


def completion(kind: str, **more: str) -> str:
    """What the program prints for a shell."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast"],
        env={**os.environ, "_HOLDFAST_COMPLETE": kind, **more},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("command", ["verify", "inspect", "--help"])
def test_an_output_that_can_not_be_written_is_no_verdict(command: str, checkpoint: Path) -> None:
    """On a whole checkpoint: 1 would say that it is damaged."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", command, str(checkpoint)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "holdfast: The output could not be written: [Errno 28] No space left on device\n"
