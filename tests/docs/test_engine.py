"""The page on weights in an engine: its lists say what the tables and the tests have."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from holdfast._models.views.forms import FORMS
from tests.docs.pages import text
from tests.engines.models import LAYOUTS, SETTINGS


def rows(mark: str) -> list[list[str]]:
    part = text("docs/engine.md").partition(f"<!-- {mark} -->\n")[2].partition("<!-- end -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()[2:]]


def test_the_forms_are_those_of_the_source() -> None:
    told = {name: " ".join((form.__doc__ or "").split()) for name, form in FORMS.items()}
    assert {name.strip("`"): about for name, about in rows("forms")} == told


def test_ms_swift_has_the_functions_that_the_page_names() -> None:
    """Its source only: its imports need vLLM."""
    found = importlib.util.find_spec("swift")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs ms-swift")
    source = (Path(found.submodule_search_locations[0]) / "rlhf_trainers/rollout_mixin.py").read_text()
    mixin = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "RolloutTrainerMixin"
    )
    move = next(
        node
        for node in mixin.body
        if isinstance(node, ast.FunctionDef) and node.name == "_move_full_model_to_vllm"
    )
    assert {"self.engine.inner_model", "self.accelerator.device"} <= {
        ast.unparse(node) for node in ast.walk(move)
    }


def test_the_models_are_those_that_are_run() -> None:
    assert [row[0].split("`")[1] for row in rows("engines")] == sorted(SETTINGS)
    for kind, _, *layouts in rows("engines"):
        assert [cell.startswith("yes") for cell in layouts] == [
            not experts or "expert" in str(SETTINGS[kind.split("`")[1]]) for _, experts in LAYOUTS.values()
        ]
