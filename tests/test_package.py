"""What a stranger gets: the page of the package, the wheel, and the source archive."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest

from tools.matrix import is_prerelease

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_no_link_on_the_page_of_the_package_leads_nowhere() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"\]\((?!https?:)", page)) > 20
    for one in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        page = re.sub(one["pattern"], one["replacement"], page)
    assert not re.findall(r"\]\((?!https?:|#)", page)
    assert "docs/users.md" in page, "the words of a link stay"


def test_what_only_a_clone_needs_is_no_extra() -> None:
    assert set(PROJECT["project"]["optional-dependencies"]) == {"megatron", "object"}
    groups = set(PROJECT["dependency-groups"])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"--group ([\w-]+)", makefile.replace("-$(MEGATRON)", "-oldest")))
    newest = {name.replace("oldest", "newest") for name in named if name.endswith("-oldest")}
    assert named | newest | {"torch-oldest", "torch-newest"} == groups  # tools/matrix.py installs these two


def test_the_range_of_megatron_is_what_is_tested() -> None:
    [asked] = PROJECT["project"]["optional-dependencies"]["megatron"]
    groups = PROJECT["dependency-groups"]
    tested = [groups[f"megatron-{end}"][0].removeprefix("megatron-core==") for end in ("oldest", "newest")]
    low, high = re.fullmatch(r"megatron-core>=([\d.]+),<0\.(\d+)", asked).groups()  # type: ignore[union-attr]
    assert tested[0] == low
    assert int(tested[-1].split(".")[1]) == int(high) - 1


def test_the_next_torch_is_one_that_is_not_released() -> None:
    versions = {
        "2.16.0.dev20261127+cpu": True,
        "2.16.0rc1": True,
        "2.16.0b2": True,
        "2.15.0": False,
        "2.13.0+cpu": False,
    }
    assert {version: is_prerelease(version) for version in versions} == versions
    assert not is_prerelease("2.15.0+abc1"), "which names a build"


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **more},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_the_wheel_runs_and_the_tests_of_the_source_archive_do(tmp_path: Path) -> None:
    """Builds as `make dist` does, which asks the package index for the build backend."""
    tools = tmp_path / "tools"
    venv.create(tools, with_pip=True)
    run(tools / "bin/pip", "install", "-q", "build>=1.2", cwd=tmp_path)
    run(tools / "bin/python", "-m", "build", "-o", tmp_path / "dist", ROOT, cwd=tmp_path)
    [wheel], [archive] = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")

    # Its dependencies are those of this process.
    run(
        tools / "bin/pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        tmp_path / "installed",
        wheel,
        cwd=tmp_path,
    )
    path = str(tmp_path / "installed")
    said = run(
        sys.executable, "-c", "import holdfast; print(holdfast.__file__)", cwd=tmp_path, PYTHONPATH=path
    )
    assert said.startswith(path)
    assert "latest" in run(sys.executable, "-m", "holdfast", "--help", cwd=tmp_path, PYTHONPATH=path)
    assert (tmp_path / "installed" / "holdfast-run.pth").exists()

    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    [source] = tmp_path.glob("torch_holdfast-*")
    page = (source / "PKG-INFO").read_text(encoding="utf-8")
    assert not re.findall(r"\]\((?!https?:|#)", page)
    tests = ["tests/test_public.py", "tests/layout", "tests/docs/test_blocks.py", "tests/docs/test_pages.py"]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "not soak and not gpu", *tests]
    run(*command, cwd=source, PYTHONPATH=str(source / "src"))
