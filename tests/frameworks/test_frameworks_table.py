"""What `install` knows of each framework, held against the source of the installed package. Nothing is
imported, so that a wrong name shows for every module, also where its dependencies are not there."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from holdfast._frameworks.framework import Framework
from holdfast._frameworks.frameworks import FRAMEWORKS
from holdfast._frameworks.patching import Replacement
from holdfast._frameworks.replacing import replacements_of
from holdfast._frameworks.settings import Settings

ROOT = Path(__file__).parents[2]
NOT_IN = {
    # since megatron-core 0.17, Megatron-Bridge 0.4, before torchtitan 0.3, or where Megatron-FSDP comes as its own package
    "megatron-core": {
        "megatron.core.transformer.fsdp_dtensor_checkpoint.handle_gdn_in_state_dict",
        "megatron.core.dist_checkpointing.validation.verify_checkpoint_and_load_strategy",
    },
    "megatron-bridge": {
        "megatron.bridge.training.checkpointing.save_fsdp_dtensor_checkpoint",
        "megatron.bridge.training.checkpointing.load_fsdp_dtensor_checkpoint",
        "megatron.bridge.training.checkpointing.preprocess_fsdp_dtensor_state_dict",
    },
    "torchtitan": {
        "torchtitan.components.checkpoint.CheckpointManager.save",
        "torchtitan.components.checkpoint.CheckpointManager.load",
    },
}
"""Names that not every version has."""
HERE = [
    framework
    for framework in FRAMEWORKS
    if framework.distribution and framework.distribution != "nemo-rl" and framework.name != "torch-dcp"
]


def source_of(distribution: str, module: str) -> Path | None:
    """The file of a module, in the distribution that has it."""
    path = module.replace(".", "/")
    for name in (f"{path}.py", f"{path}/__init__.py"):
        found = Path(str(importlib.metadata.distribution(distribution).locate_file(name)))
        if found.exists():
            return found
    return None


def imports(source: Path, name: str) -> bool:
    """Does a file import a name by `from ... import`?"""
    tree = ast.walk(ast.parse(source.read_text(encoding="utf-8")))
    return any(isinstance(node, ast.ImportFrom) and name in {one.name for one in node.names} for node in tree)


def defines(source: Path, name: str) -> bool:
    """Does a file define a function, or a class with such a method?"""
    body = ast.parse(source.read_text(encoding="utf-8")).body
    *path, last = name.split(".")
    for part in path:
        found = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == part), None)
        if found is None:
            return False
        body = found.body
    inside = [node for top in body for node in ast.walk(top)] if not path else body
    return any(isinstance(node, ast.FunctionDef) and node.name == last for node in inside)


@pytest.mark.parametrize("framework", HERE, ids=lambda framework: framework.name)
def test_every_name_is_one_of_the_package(framework: Framework) -> None:
    try:
        importlib.metadata.distribution(framework.distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{framework.name} is not installed")
    of_others = (
        *("megatron_fsdp.", "megatron.bridge.", "megatron.training.", "swift."),
        "nvidia_resiliency_ext.",
    )
    looked, lacking = 0, set()
    for replacement in replacements_of(framework, Settings()):
        assert isinstance(replacement, Replacement)
        foreign = framework.name == "megatron-core" and f"{replacement.module}.".startswith(of_others)
        if foreign or replacement.adds:
            continue
        source = source_of(framework.distribution, replacement.module)
        found = imports if replacement.imported else defines
        if source is None or not found(source, replacement.name):
            lacking.add(str(replacement))
        looked += 1
    assert lacking <= NOT_IN.get(framework.name, set())
    assert looked


@pytest.mark.parametrize("framework", HERE, ids=lambda framework: framework.name)
def test_every_save_tells_its_calls_apart(framework: Framework) -> None:
    """A guarded save has an argument by which ranks know one call from the next."""
    saves = [place for place in framework.guards if ".save" in place.replace(":", ".") or ":save" in place]
    told, first = 0, {path.partition(".")[0] for path in framework.told_by}
    for place in saves:
        module, _, name = place.partition(":")
        try:
            source = source_of(framework.distribution, module)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{framework.name} is not installed")
        if source is None or not defines(source, name):
            continue
        arguments = arguments_of(source, name)
        assert first & set(arguments), (place, arguments)
        told += 1
    assert told or not saves


def arguments_of(source: Path, name: str) -> list[str]:
    """The names of a function's arguments; of a method, those of its own class."""
    owner, _, last = name.rpartition(".")
    inside: ast.AST = ast.parse(source.read_text(encoding="utf-8"))
    for part in filter(None, owner.split(".")):
        inside = next(
            node for node in ast.walk(inside) if isinstance(node, ast.ClassDef) and node.name == part
        )
    found = next(node for node in ast.walk(inside) if isinstance(node, ast.FunctionDef) and node.name == last)
    return [one.arg for one in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]


@pytest.mark.parametrize("name", ["mbridge", "megatron-bridge", "mcore-bridge"])
def test_published_weights_can_be_left_to_the_frameworks(name: str) -> None:
    [framework] = [known for known in FRAMEWORKS if known.name == name]

    def parts(settings: Settings) -> set[str]:
        return {replacement.part for replacement in replacements_of(framework, settings)}

    assert parts(Settings()) - parts(Settings(huggingface=False)) == {"huggingface"}


def test_the_versions_called_tested_are_those_that_are_installed_for_the_tests() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    del groups["engines"]  # of a Python of its own, whose transformers is what vLLM needs
    pins = [Requirement(one) for group in groups.values() for one in group]
    found = set()
    for framework in FRAMEWORKS:
        for pin in pins:
            if framework.tested and canonicalize_name(pin.name) == framework.distribution:
                assert any(map(pin.specifier.contains, framework.tested)), (framework.name, str(pin))
                found.add(framework.name)
    # torchtitan is run by hand: docs/recipes/torchtitan.md
    assert {framework.name for framework in FRAMEWORKS if framework.tested} - found == {"torchtitan"}


def test_descriptions_import_neither_torch_nor_a_framework() -> None:
    program = "import sys, holdfast._frameworks.frameworks as known; print([name for name in sys.modules "
    program += "if name == 'torch' or name in known.TRAINING])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_a_framework_uses_is_known() -> None:
    names = {framework.name for framework in FRAMEWORKS}
    for framework in FRAMEWORKS:
        assert set(framework.uses) <= names
