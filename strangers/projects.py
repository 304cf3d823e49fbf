"""The projects of `projects.toml`, and a fresh copy of one for a side: with its imports switched, or not."""

from __future__ import annotations

import ast
import re
import shutil
import tomllib
from pathlib import Path
from typing import NamedTuple

_DCP = r"torch\.distributed\.checkpoint"
_SWITCHES = (
    # Also of the modules that contain `save` and `load`; a private name that only they have stays torch's.
    (rf"^(\s*)import {_DCP}(\.state_dict_saver|\.state_dict_loader)? as ", r"\1import holdfast.dcp as "),
    (rf"^(\s*)from {_DCP}(\.state_dict_saver)? import ", r"\1from holdfast.dcp import "),
)
SWITCH = "import holdfast.dcp as dcp"
"""The line of a project whose tests call torch DCP themselves."""


class Project(NamedTuple):
    """A project, as projects.toml describes it."""

    name: str
    source: str
    tag: str
    folders: tuple[str, ...]
    root: str
    line: str
    tests: tuple[str, ...]
    ranks: int = 1
    gpus: int = 0
    stand_ins: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environment: dict[str, str] | None = None
    package: str = ""

    @property
    def how_to_get(self) -> str:
        """The commands that make the copy in a folder `copies`."""
        into = f"copies/{self.name}"
        return (
            f"git clone --depth 1 --filter=blob:none --sparse --branch {self.tag} {self.source} {into} && "
            f"git -C {into} sparse-checkout set {' '.join(self.folders)}"
        )

    def is_in(self, copies: Path) -> bool:
        """Whether the folder of copies has this project."""
        return all((copies / self.name / folder).is_dir() for folder in self.folders)


def read_projects(file: Path) -> list[Project]:
    """Read the table of projects."""
    return [
        Project(**{name: tuple(value) if isinstance(value, list) else value for name, value in one.items()})
        for one in tomllib.loads(file.read_text())["project"]
    ]


def copy_project(project: Project, copies: Path, into: Path, *, ours: bool, lists: bool = True) -> bool:
    """Copy what the tests need; with `ours`, imports are switched, if that is the project's line.

    lists: False takes out the assertions that compare a list of files with torch DCP's `*.distcp`; returns
    whether there were any.

    Tests of PyTorch that ask for GPUs run on CPU and gloo where their code allows it: on both sides alike.
    """
    for folder in project.folders:
        shutil.copytree(copies / project.name / folder, into / folder)
    found = False
    for file in into.rglob("*.py") if not lists else ():
        if ".distcp" in (text := file.read_text()):
            found = (other := without_lists(text)) != text or found
            file.write_text(other)
    if project.line != SWITCH:
        return found
    for file in into.rglob("*.py"):
        text = file.read_text()
        text = re.sub(r"skip_if_lt_x_gpu\((\d+)\)", r"skip_if_lt_x_gpu(\1, allow_cpu=True)", text)
        for line, other in _SWITCHES if ours else ():
            text = re.sub(line, other, text, flags=re.MULTILINE)
        file.write_text(text)
    return found


def without_lists(text: str) -> str:
    """Return a program without its assertions on lists with a `*.distcp`; the numbers of its lines stay."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assert) and any(_lists_files(part) for part in ast.walk(node)):
            first, end = node.lineno - 1, node.end_lineno or node.lineno
            lines[first:end] = [f"{lines[first][: node.col_offset]}pass\n", *["\n"] * (end - first - 1)]
    return "".join(lines)


def _lists_files(part: ast.AST) -> bool:
    names = part.elts if isinstance(part, ast.Set | ast.List | ast.Tuple) else ()
    return any(isinstance(one, ast.Constant) and str(one.value).endswith(".distcp") for one in names)
