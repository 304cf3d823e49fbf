"""The recipes: each has the same sections, and what it says to type runs, or says that it needs a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._frameworks.frameworks import FRAMEWORKS
from tests.docs.pages import RECIPES, ROOT, code, text, without_code
from tests.docs.shell import environment, run_commands
from tests.support.processes import ProcessWorld
from tests.support.third_parties import needs

SECTIONS = (
    "The line",
    "What it replaces",
    "The folder",
    "Going back",
    "What was run",
    "What is not covered",
)
OF_PROGRAMS = (
    "The program",
    "What is in the state",
    "What changes, and what does not",
    "What was run",
    "What is not covered",
)
"""The sections where nothing is replaced: the program calls Holdfast."""
WITHOUT = ("ddp", "fsdp2", "ray-train")
"""Pages on programs that save by themselves."""
FRAMEWORK_PAGES = [page for page in RECIPES if page.stem not in WITHOUT]
RAY = """
import json, os, sys
import ray
import verl  # as its driver does, before Ray is started

@ray.remote
class Worker:
    def installed(self):
        import torch  # the import at which `holdfast run` installs
        import holdfast
        return [framework.name for framework in holdfast.installed()]

for runtime_env in json.loads(sys.argv[1]):
    ray.init(
        num_cpus=1, include_dashboard=False, _temp_dir=sys.argv[2], runtime_env=runtime_env, log_to_driver=False
    )
    worker = Worker.options(runtime_env={"env_vars": {"WORLD_SIZE": "1"}}).remote()  # as verl makes its workers
    print(json.dumps(ray.get(worker.installed.remote(), timeout=200)))
    ray.shutdown()
"""


def python(program: str, *args: str, cwd: Path, **more: str) -> str:
    """What a new process prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *args],
        env=environment(**more),
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=270,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def runs(block: str) -> bool:
    """Is the block one that is run here? The others say why not in their first line."""
    first = block.partition("\n")[0]
    return not first.startswith("#") or not re.search(r"needs? (a GPU|GPUs)|run by `?tests/", first)


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (page.name, block)
        for page in RECIPES
        for _, block in code(page.read_text(encoding="utf-8"), language)
        if runs(block)
    ]


def test_every_recipe_is_found_on_the_page_of_users() -> None:
    """By a line of its own, or, of a framework, by the line for all pages that have a framework's name."""
    found = re.findall(r"\]\(recipes/([\w-]+)\.md\)", text("docs/users.md"))
    assert sorted({*found}) == sorted(found)
    assert {*WITHOUT} <= {*found} <= {page.stem for page in RECIPES}
    assert "](recipes) | `holdfast.install()` | `recipes/<name>.md` |" in text("docs/users.md")


def test_there_is_a_recipe_for_every_framework() -> None:
    below = {"megatron-core", "torch-dcp", "mbridge", "mcore-bridge", "pytorch-lightning"}
    assert {page.stem for page in FRAMEWORK_PAGES} == {framework.name for framework in FRAMEWORKS} - below


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_recipe_answers_the_same_questions(page: Path) -> None:
    body = without_code(page.read_text(encoding="utf-8"))
    sections = list(OF_PROGRAMS if page.stem in WITHOUT else SECTIONS)
    assert re.findall(r"^## (.*)$", body, re.MULTILINE)[: len(sections)] == sections
    kinds = set(re.findall(r"^```(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert kinds <= {"python", "sh", "text"}


@pytest.mark.parametrize("page", FRAMEWORK_PAGES, ids=lambda page: page.stem)
def test_what_a_recipe_says_is_replaced_is_what_the_code_replaces(page: Path) -> None:
    """Every guarded function of the framework stands on its page."""
    [framework] = [known for known in FRAMEWORKS if known.name == page.stem]
    body = page.read_text(encoding="utf-8")
    for place in framework.guards:
        module, _, name = place.partition(":")
        assert name in body, place
        assert module in body, place


def installed_by(rank: int, block: str) -> bool:
    """Does a program that runs the block install, or have a function that does?"""
    space: dict[str, object] = {"__name__": "block"}
    exec(block, space)
    return "install" in space or bool(holdfast.installed())


@pytest.mark.wide
@pytest.mark.parametrize("block", sorted({block for _, block in blocks("python")}))
def test_python_on_a_recipe_installs(block: str) -> None:
    with ProcessWorld(1) as world:
        assert world.run(installed_by, block) == [True]


def save(rank: int, folder: str) -> None:
    from megatron.core.dist_checkpointing import ShardedTensor

    from holdfast import megatron

    megatron.save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0)), "kind": "actor"}, folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of megatron-core's tensors, to be copied."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    with ProcessWorld(1) as world:
        world.run(save, str(folder))
    return folder


def different_commands() -> list[tuple[str, str]]:
    """Blocks of commands that have all commands there are; those that differ in names of folders, or in the framework,
    are one."""
    seen: set[str] = set()
    found = []
    for page, block in sorted(blocks("sh"), key=lambda one: -one[1].count("\n")):
        named = re.sub(r"--framework \S+", "--framework NAME", block)
        commands = set(re.sub(r"\S*/\S*", "FOLDER", named).splitlines())
        if commands - seen:
            found.append((page, block))
        seen |= commands
    return found


@pytest.mark.parametrize("page", FRAMEWORK_PAGES, ids=lambda page: page.stem)
def test_commands_on_a_recipe_name_its_framework(page: Path) -> None:
    named = re.findall(r"--framework (\S+)", page.read_text(encoding="utf-8"))
    assert set(named) <= {page.stem}


@pytest.mark.wide
@pytest.mark.parametrize(("page", "block"), different_commands())
def test_commands_on_a_recipe_run(page: str, block: str, checkpoint: Path, tmp_path: Path) -> None:
    sources = re.findall(r"^holdfast (?:export torch_dist|verify|inspect|latest) (\S+)", block, re.MULTILINE)
    for folder in dict.fromkeys(sources):
        shutil.copytree(checkpoint, tmp_path / folder)
    (tmp_path / "program.py").write_text(
        "import torch, holdfast\nassert holdfast.installed()\nprint('installed')\n"
    )
    printed = run_commands(block, tmp_path)
    assert ("program.py" in block) == ("installed" in printed)
    for target in re.findall(r"^holdfast export torch_dist \S+ (\S+)", block, re.MULTILINE):
        assert (tmp_path / target / ".metadata").exists()


@needs("ray", "verl")
def test_rays_workers_install(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The two ways on the pages of verl and NeMo RL: a hook of Ray's, and the environment."""
    page = text("docs/recipes/verl.md")
    [hook] = set(re.findall(r"runtime_env\.worker_process_setup_hook=(holdfast\.\w+)", page))
    shown = python(
        "from holdfast._tools.cli import main; main()", "run", "--env", "--framework", "verl", cwd=ROOT
    )
    more: dict[str, str] = {}
    for line in shown.splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        more[name] = value.strip("'")
    # The second is what NeMo RL's `init_ray` gives.
    ways = [{"worker_process_setup_hook": hook}, {"env_vars": environment(**more)}]
    stand_in = "from tests.support.stand_ins import stand_in_for; stand_in_for('verl')\n"
    folder = tmp_path_factory.mktemp("ray")
    short = Path("/tmp") / f"hf-{os.getpid()}"  # sockets have short names
    short.symlink_to(folder)
    try:
        said = python(stand_in + RAY, json.dumps(ways), str(short), cwd=ROOT)
    finally:
        short.unlink()
    installed = [json.loads(line) for line in said.splitlines() if line.startswith("[")]
    assert ["verl" in names for names in installed] == [True, True]


def test_swift_imports_a_plugin_as_the_page_says(tmp_path: Path) -> None:
    if importlib.util.find_spec("swift") is None:
        pytest.skip("ms-swift is not installed")
    [(_, block)] = [found for found in blocks("python") if found[0] == "ms-swift.md"]
    (tmp_path / "holdfast_plugin.py").write_text(block)
    program = """
import sys
from tests.support.stand_ins import stand_in_for
stand_in_for("ms-swift")
from swift.utils import import_external_file
import_external_file(sys.argv[1])
import holdfast
print("ms-swift" in [framework.name for framework in holdfast.installed()])
"""
    said = python(program, str(tmp_path / "holdfast_plugin.py"), cwd=ROOT)
    assert said.splitlines()[-1] == "True"
