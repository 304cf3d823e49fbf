"""`holdfast run` where Python does not look for `sitecustomize` as usual, and where there is nothing to install."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import holdfast
from holdfast._tools.cli.run import is_torchrun_of_one_host
from tests.support.wide import wide

SOURCE = Path(holdfast.__file__).parents[1]
TRAINS = "import torch, holdfast; print('installed:', bool(holdfast.installed()))"
YES = "installed: True\n"


def run(*command: object, **env: str) -> subprocess.CompletedProcess[str]:
    program = "from holdfast._tools.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, "run", "--no-session", "--", *map(str, command)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **env},
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


def environment(folder: Path, holdfast_too: bool) -> Path:
    """The Python of a new virtual environment, with the packages of this one, and with Holdfast or not."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    if holdfast_too:
        there = sysconfig.get_path("purelib")
        (packages / "_1.pth").write_text(f"{SOURCE}\n")
        (packages / "_2.pth").write_text(f"import site; site.addsitedir({there!r})\n")
        brought = SOURCE / "holdfast" / "_tools" / "startup" / "holdfast-run.pth"
        (packages / brought.name).write_text(brought.read_text())
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("installed"), True)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("bare"), False)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('this one is broken')\n")
    return tmp_path


def test_a_broken_sitecustomize_is_reported_and_hinders_nothing(broken: Path) -> None:
    done = run(sys.executable, "-c", TRAINS, PYTHONPATH=f"{broken}{os.pathsep}{SOURCE}")
    assert (done.returncode, done.stdout) == (0, YES)
    assert "this one is broken" in done.stderr


@pytest.mark.parametrize(
    "options", wide((["-E"], ["-B", "-W", "ignore", "-sE"]), suite=(["-E"],)), ids=" ".join
)
def test_a_python_that_ignores_the_environment_installs(installed: Path, options: list[str]) -> None:
    assert run(installed, *options, "-c", TRAINS).stdout == YES


@pytest.mark.parametrize(
    "script",
    [
        "{python} -I -c '{program}'",
        *wide(["PYTHONPATH= {python} -c '{program}'", "PYTHONPATH={broken} {python} -c '{program}'"]),
    ],
)
def test_also_where_a_script_starts_it(installed: Path, broken: Path, script: str) -> None:
    program = TRAINS.replace("'", '"')
    done = run("sh", "-c", script.format(python=installed, program=program, broken=broken))
    assert done.stdout == YES, done.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [(["-I"], "-I"), (["-u", "-X", "utf8", "-sE"], "-sE"), (["-BI", "-W", "error"], "-BI"), (["-IS"], "-IS")],
    ids=str,
)
@pytest.mark.parametrize("way", [["-c", "print(1)"], ["-mthis"], ["train.py", "-c"]], ids=lambda way: way[0])
def test_where_holdfast_is_not_installed_it_is_refused(
    bare: Path, options: list[str], told: str, way: list[str]
) -> None:
    done = run(bare, *options, *way)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{bare} {told}` ignores the variables" in done.stderr
    assert f"Leave {told} out" in done.stderr


@pytest.mark.wide
def test_options_in_one_word_with_the_program_are_seen(bare: Path, installed: Path) -> None:
    assert run(bare, "-Ic", "print(1)").returncode == 2
    assert run(installed, "-Ic", TRAINS).stdout == YES


@pytest.mark.parametrize("command", [["-c", "print(1)", "-I"], ["-Bc", "print(1)"]], ids=" ".join)
def test_a_process_that_trains_nothing_is_as_it_was(bare: Path, command: list[str]) -> None:
    """Options of the program are not Python's; and an environment without torch has nothing to say."""
    for call in ([bare, *command], ["sh", "-c", f'exec "{bare}" "$@"', "sh", *command]):
        done = run(*call)
        assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.wide
def test_ranks_of_one_torchrun_get_a_secret(tmp_path: Path) -> None:
    """The same for all of a start, another for the next, and none over that of the user."""
    script = tmp_path / "train.py"
    # In one piece: the ranks share a pipe.
    script.write_text(
        "import os; os.write(1, f\"secret:{os.environ.get('HOLDFAST_SECRET', '')}\\n\".encode())\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    drawn = set[str]()
    for given in ({}, {}, {"HOLDFAST_SECRET": "of the user"}):
        done = run(*torchrun, script, **given)
        first, second = (line for line in done.stdout.splitlines() if line.startswith("secret:"))
        assert first == second, done.stderr
        assert len(first) > len("secret:")
        drawn.add(first)
    assert len(drawn) == 3
    assert "secret:of the user" in drawn


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("torchrun --nproc-per-node 8 train.py", True),
        ("/env/bin/torchrun --nnodes=1 train.py", True),
        ("python3 -m torch.distributed.run --nnodes 1:1 train.py", True),
        ("torchrun --nnodes 2 train.py", False),
        ("torchrun --nnodes=1:4 train.py", False),
        ("torchrun --nn 2 train.py", False),
        ("bash train.sh", False),
        ("python train.py", False),
        ("srun torchrun train.py", False),
    ],
)
def test_a_secret_is_drawn_only_where_all_ranks_inherit_it(
    line: str, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PET_NNODES", raising=False)
    assert is_torchrun_of_one_host(line.split()) is is_one
    monkeypatch.setenv("PET_NNODES", "2")
    assert not is_torchrun_of_one_host(line.split())
