"""What the source promises its reader: names that tell classes apart, types, and imports at the top."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs.pages import text

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"
PUBLIC_TWICE = {"Checkpoints", "CheckpointManager"}
"""Public in two modules each: Holdfast's and megatron-core's, Megatron-Bridge's and torchtitan's."""
LATE = {
    # The source of published models, until a folder may hold one.
    "__init__.py",
    "_core/store/local.py",
    # Without torch DCP, megatron-core, or torch, until they are needed.
    "_frameworks/huggingface/replacing.py",
    "_frameworks/megatron/enumerations.py",
    "_frameworks/torch_dcp/patches.py",
    "_models/views/hugging_face.py",
    "_tools/cli/export.py",
    "_tools/cli/import_.py",
    "_tools/startup/sitecustomize.py",
    # So that a command, or `import holdfast`, starts fast.
    "_tools/checkpoints/inspect.py",
    "_tools/cli/__init__.py",
    "_tools/cli/inspect.py",
}
"""The modules that import modules of Holdfast in functions."""


@cache
def trees() -> dict[str, ast.Module]:
    """Return the source, by file; not at import, which each worker of the suite does."""
    return {
        path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    }


def late_imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports of Holdfast's modules in functions, each once."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node): node for function in functions for node in ast.walk(function)}
    for node in inside.values():
        if isinstance(node, ast.Import | ast.ImportFrom):
            ours = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if any(name.startswith("holdfast") for name in ours):
                yield node


def test_two_classes_have_two_names() -> None:
    names = Counter(
        node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == PUBLIC_TWICE


def test_imports_stand_at_the_top() -> None:
    late = {place: [*late_imports(tree)] for place, tree in trees().items()}
    assert {place for place, imports in late.items() if imports} == LATE
    assert sum(map(len, late.values())) < 15


def test_few_values_have_no_type() -> None:
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    assert sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes) <= 70


def used_of_core(wing: str) -> set[tuple[str, str]]:
    """Return the modules of the core that a wing imports, and the names of each that it imports."""
    return {
        (node.module, alias.name)
        for place, tree in trees().items()
        if place.startswith(f"{wing}/")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast._core")
        for alias in node.names
    }


def test_the_width_of_the_waist_is_what_the_page_says() -> None:
    """A wing that uses more of the core fails here: look whether a name that it uses already would do."""
    rows = re.findall(r"^\| `(_?\w+)` \| (\d+) \| (\d+) \|$", text("docs/architecture.md"), re.MULTILINE)
    said = {wing: (int(modules), int(names)) for wing, modules, names in rows}
    used = {wing: used_of_core(wing) for wing in said}
    assert {wing: (len({module for module, _ in some}), len(some)) for wing, some in used.items()} == said
    assert said.keys() == {"_frameworks", "_groups", "_models", "_tools", "_watch", "testing"}


def test_the_probes_see_what_they_look_for() -> None:
    tree = ast.parse("import holdfast\ndef f():\n    import os\n    from holdfast.errors import BadInput\n")
    assert [node.lineno for node in late_imports(tree)] == [4]
