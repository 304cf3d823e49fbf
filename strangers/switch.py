"""A copy of PyTorch's tests: as they are, or with the one line switched that a user switches."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = "test/distributed/checkpoint"
_DCP = r"torch\.distributed\.checkpoint"
_SWITCHES = (
    # Also of the modules that contain `save` and `load`; a private name that only they have stays torch's.
    (rf"^(\s*)import {_DCP}(\.state_dict_saver|\.state_dict_loader)? as ", r"\1import holdfast.dcp as "),
    (rf"^(\s*)from {_DCP}(\.state_dict_saver)? import ", r"\1from holdfast.dcp import "),
)
_CALLS = frozenset(
    ("save", "load", "async_save", "save_state_dict", "load_state_dict", "_load_state_dict_from_keys")
    + ("dcp_to_torch_save", "torch_save_to_dcp", "load_sharded_optimizer_state_dict")
)
"""torch's functions that go to a checkpoint."""


def copy_tests(pytorch: Path, suites: tuple[str, ...], into: Path, *, ours: bool) -> None:
    """Copy test files; with `ours`, their imports are switched.

    A test that asks for GPUs runs on CPU and gloo where its code allows it: on both sides alike.
    """
    for suite in suites:
        text = (pytorch / FOLDER / suite).read_text()
        text = re.sub(r"skip_if_lt_x_gpu\((\d+)\)", r"skip_if_lt_x_gpu(\1, allow_cpu=True)", text)
        for line, other in _SWITCHES if ours else ():
            text = re.sub(line, other, text, flags=re.MULTILINE)
        target = into / suite
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def callers(file: Path) -> set[str]:
    """Return the names of a file's functions that go to a checkpoint, directly or by another one of them."""
    tree = ast.parse(file.read_text())
    modules, names = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {one.asname or one.name for one in node.names if re.match(_DCP, one.name)}
        elif isinstance(node, ast.ImportFrom) and re.match(_DCP, node.module or ""):
            names |= {one.asname or one.name for one in node.names if one.name in _CALLS}
    uses = {node.name: _used(node, modules) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found, more = set[str](), {name for name, used in uses.items() if used & (names | {_DIRECT})}
    while more:
        found |= more
        more = {name for name, used in uses.items() if used & found} - found
    return found


_DIRECT = "a call of torch DCP"


def _used(function: ast.FunctionDef, modules: set[str]) -> set[str]:
    """Return the names that a function uses; it may hand them on: `run_subtests({}, self._test_fsdp)`."""
    used = set[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            theirs = ast.unparse(node.value) in modules and node.attr in _CALLS
            used.add(_DIRECT if theirs else node.attr)
    return used
