"""What the site has that is no page of docs/: mkdocs.yml names this file as a hook.

The README is its front page, and CHANGELOG and CONTRIBUTING are pages. `reference.md` asks mkdocstrings for the
docstring of every public name. Links to a file that is no page of the site become plain words.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FROM_ROOT = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
MODULES = ("errors", "events", "interfaces", "dcp", "huggingface", "megatron", "megatron_fsdp", "testing")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)#]*)(#[^)]*)?\)")
_LIST = re.compile(r"^(?![-|>#]|\d+\. )(\S.*)\n(?=(?:-|1\.) )", re.MULTILINE)
"""The last line of a paragraph that a list follows without an empty line, which Python-Markdown wants."""
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    for name, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, "reference.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to where the site has what they mean; a link to anything else becomes its words."""
    here = page.file.src_uri
    origin = next((name for name, made in FROM_ROOT.items() if made == here), f"docs/{here}")
    known = {file.src_uri for file in files}

    def link(found: re.Match[str]) -> str:
        mark, words, target, anchor = found[1], found[2], found[3], found[4] or ""
        if not target:
            return found[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        there = FROM_ROOT.get(there, there.removeprefix("docs/"))
        if there not in known:
            return words
        return f"{mark}[{words}]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{anchor})"

    parts = _FENCE.split(markdown)
    return "".join(
        part if part.startswith("```") else _LIST.sub(r"\1\n\n", _LINK.sub(link, part)) for part in parts
    )


def reference() -> str:
    """The page of docstrings: every name of `holdfast.__all__` that is no module, then the modules."""
    names = [name for name in public("holdfast/__init__.py") if name not in MODULES]
    lines = [
        "# Docstrings",
        "",
        "[api.md](api.md) explains these names, with examples that are run by the suite.",
        "",
    ]
    lines += [f"::: holdfast.{name}\n" for name in names]
    for module in MODULES:
        lines += [f"## holdfast.{module}\n"]
        place = "__init__.py" if (ROOT / "src/holdfast" / module).is_dir() else ""
        for name in public(f"holdfast/{module}/{place}" if place else f"holdfast/{module}.py"):
            lines += [f"::: holdfast.{module}.{name}\n    options:\n      heading_level: 3\n"]
    return "\n".join(lines)


def public(module: str) -> list[str]:
    """The names of a module's `__all__`; without one, of its classes and functions."""
    tree = ast.parse((ROOT / "src" / module).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            return list(ast.literal_eval(node.value))
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
