"""What `install` knows of each framework, held against the source of the installed package. Nothing is
imported, so that a wrong name shows for every module, also where its dependencies are not there."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path

import pytest

from holdfast.integrations.frameworks import FRAMEWORKS, Framework, replacements_of
from holdfast.integrations.patching import Replacement
from holdfast.integrations.settings import Settings

NOT_IN = {
    # since megatron-core 0.17, Megatron-Bridge 0.4, or where Megatron-FSDP comes as its own package
    "megatron-core": {
        "megatron.core.transformer.fsdp_dtensor_checkpoint.handle_gdn_in_state_dict",
        "megatron.core.dist_checkpointing.validation.verify_checkpoint_and_load_strategy",
    },
    "megatron-bridge": {
        "megatron.bridge.training.checkpointing.save_fsdp_dtensor_checkpoint",
        "megatron.bridge.training.checkpointing.load_fsdp_dtensor_checkpoint",
        "megatron.bridge.training.checkpointing.preprocess_fsdp_dtensor_state_dict",
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
    of_others = ("megatron_fsdp.", "megatron.bridge.", "megatron.training.", "swift.")
    looked, lacking = 0, set()
    for replacement in replacements_of(framework, Settings()):
        assert isinstance(replacement, Replacement)
        foreign = framework.name == "megatron-core" and f"{replacement.module}.".startswith(of_others)
        if foreign or replacement.adds:
            continue
        source = source_of(framework.distribution, replacement.module)
        if source is None or not defines(source, replacement.name):
            lacking.add(str(replacement))
        looked += 1
    assert lacking <= NOT_IN.get(framework.name, set())
    assert looked >= 2


def test_what_a_framework_uses_is_known() -> None:
    names = {framework.name for framework in FRAMEWORKS}
    for framework in FRAMEWORKS:
        assert set(framework.uses) <= names
