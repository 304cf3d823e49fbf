"""Private names of torch stand in one room, `_torch_private`, and Holdfast works without any one of them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.support.without_names import KEPT, STOCK, pickled

SOURCE = ROOT / "src" / "holdfast"
ROOM = "_core/torch_private.py"

STAYS = {
    # Of Python: named tuples, frames and threads.
    **dict.fromkeys(("_fields", "_asdict", "_field_defaults"), "of named tuples"),
    **dict.fromkeys(("_getframe", "_current_frames", "_run_exitfuncs"), "of sys and atexit"),
    **dict.fromkeys(("_bootstrap", "_limbo", "_register_atexit"), "of threading"),
    **dict.fromkeys(("_dataclass_getstate", "_dataclass_setstate"), "of dataclasses"),
    # Of NumPy.
    "_reconstruct": "what NumPy's pickles call",
    # Of frameworks: Megatron-LM's arguments, if they are there.
    "_GLOBAL_ARGS": "of Megatron-LM",
    "_expert_map": "of vLLM's experts; without it, a part of them is refused",
    # Of frameworks, inside the replacements that `install()` makes; a version without one is reported.
    **dict.fromkeys(
        ("_get_safetensor_io", "_source_model_dir", "_get_actual_hf_path"), "of mbridge and Megatron-Bridge"
    ),
    **dict.fromkeys(
        ("_get_all_ckpt_names", "_get_zero_frozen_param_attributes", "_get_zero_param_shapes"), "of DeepSpeed"
    ),
    "_shard_order": "of Megatron-FSDP, which sets it on meshes of torch",
    **dict.fromkeys(
        (
            "_get_main_param_and_optimizer_states",
            "_set_main_param_and_optimizer_states",
            "_sync_hdo_state_to_sub_optimizers",
            "_synchronize_steps",
            "_param2group_meta_to_param_groups",
        ),
        "of megatron-core",
    ),
}
"""Private names of others that stand elsewhere, and whose they are."""

WITHOUT = {
    **dict.fromkeys(
        (
            "_get_layout",
            "_rebuild_tensor_v2",
            "_rebuild_tensor_v3",
            "_rebuild_parameter",
            "_rebuild_sparse_tensor",
        ),
        "",
    ),
    **{
        name: f"LoadFailed: An object needs torch.{module}.{name}, which torch "
        for name, module in {
            "_rebuild_from_type_v2": "_tensor",
            "_rebuild_parameter_with_state": "_utils",
            "_rebuild_qtensor": "_utils",
            "_rebuild_nested_tensor": "_utils",
            "_rebuild_meta_tensor_no_storage": "_utils",
            "_rebuild_wrapper_subclass": "_utils",
            "_rebuild_device_tensor_from_numpy": "_utils",
            "_rebuild_device_tensor_from_cpu_tensor": "_utils",
        }.items()
    },
    "_StorageInfo": "BadInput: torch ",
    "_local_tensor": "BadInput: The parts of DTensors can't be put in place with torch ",
    "_get_default_store _world": "BadInput: The store of the default process group can't be found in torch ",
}
"""What needs a name (`without_names.features`), and how what is raised without it begins; "": it works."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, without what only a type checker sees."""
    left = [tree]
    while left:
        for node in ast.iter_child_nodes(left.pop()):
            if (
                isinstance(node, ast.If)
                and isinstance(node.test, ast.Name)
                and node.test.id == "TYPE_CHECKING"
            ):
                continue
            yield node
            left.append(node)


def defined(trees: list[ast.Module]) -> set[str]:
    """Private names that Holdfast itself gives: of functions, classes, attributes, arguments and slots."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and own(node):
            found.add(node.attr)
    return found


def own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def of_torch(tree: ast.Module) -> set[str]:
    """Names that a module has from torch by importing them."""
    found = set()
    for node in at_run_time(tree):
        if isinstance(node, ast.Import):
            found |= {
                (alias.asname or "torch") for alias in node.names if alias.name.split(".")[0] == "torch"
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def foreign(tree: ast.Module, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Yield each access to a private name that Holdfast does not give itself: lines and names."""
    torchs = of_torch(tree)
    for node in at_run_time(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, path) for path in paths if any(map(private, path.split("."))))
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            yield from ((node.lineno, path) for path in paths if any(map(private, path.split("."))))
        elif isinstance(node, ast.Attribute) and private(node.attr) and not own(node):
            if node.attr not in ours or root(node) in torchs:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            is_torchs = root(node.func) in torchs
            yield from (
                (node.lineno, f"{key.arg}=")
                for key in node.keywords
                if key.arg and private(key.arg) and (is_torchs or key.arg not in ours)
            )
            if isinstance(node.func, ast.Name) and node.func.id in (
                "getattr",
                "setattr",
                "hasattr",
                "delattr",
            ):
                name = node.args[1]
                if (
                    isinstance(name, ast.Constant)
                    and private(str(name.value))
                    and str(name.value) not in ours
                ):
                    yield node.lineno, str(name.value)


@cache
def trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    }


def test_private_names_of_torch_stand_in_one_room() -> None:
    ours = defined([tree for place, tree in trees().items() if place != ROOM])
    elsewhere = {
        (f"{place}:{line}", name)
        for place, tree in trees().items()
        if place != ROOM
        for line, name in foreign(tree, ours)
    }
    assert {(place, name) for place, name in elsewhere if name not in STAYS} == set()
    assert STAYS.keys() - {name for _, name in elsewhere} == set(), "of names that stand nowhere any more"


@pytest.mark.parametrize(
    "code",
    [
        "from torch._utils import thing",
        "from torch import _utils",
        "import torch._dynamo",
        "import torch\ntorch.serialization._new()",
        "import torch.distributed as dist\ndist.distributed_c10d._mine()",
        "def read(tensor):\n    return tensor._spec",
        "def read(tensor):\n    return getattr(tensor, '_spec', None)",
        "import torch\ntorch.TypedStorage(_internal=True)",
    ],
)
def test_a_new_private_name_is_found(code: str) -> None:
    assert list(foreign(ast.parse(code), {"_mine"}))


def test_what_is_not_private_is_not_found() -> None:
    code = (
        "from typing import TYPE_CHECKING\nimport torch\n"
        "if TYPE_CHECKING:\n    from torch._C import thing\n"
        "class A:\n    def f(self, other):\n        return self._x, other._mine, torch.__version__, other.__dict__\n"
    )
    assert list(foreign(ast.parse(code), {"_mine"})) == []


def names_of_the_room() -> list[str]:
    """The names that the room asks for, each by `getattr` with a default."""
    asked = set()
    for node in at_run_time(trees()[ROOM]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            name = node.args[1]
            if isinstance(name, ast.Constant) and private(str(name.value)):
                assert len(node.args) == 3, f"line {node.lineno}: no default"
                asked.add(str(name.value))
    return sorted(asked)


def test_the_room_reads_names_so_that_they_can_be_missing() -> None:
    ours = defined([trees()[ROOM]])
    asked = set(names_of_the_room())
    # Beside them: what `set_local` sets after it has asked for it, and an argument with another way after it.
    assert {name for _, name in foreign(trees()[ROOM], ours)} - asked == {"_internal="}


def answers(asked: dict[str, list[str]]) -> dict[str, dict[str, str]]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.without_names"],
        input=json.dumps(asked),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, str]] = json.loads(run.stdout)
    return found


@pytest.mark.wide
def test_saves_and_loads_work_without_any_one_of_them(tmp_path: Path) -> None:
    names = names_of_the_room()
    assert len(names) > 20
    asked = {name: ["hidden", "gone"] for name in names}
    for name in WITHOUT:
        asked.setdefault(name, []).append("feature")
    found = answers(asked)
    assert {name: ways["hidden"] for name, ways in found.items() if ways.get("hidden")} == {}
    gone = {name: ways["gone"] for name, ways in found.items() if "gone" in ways}
    assert {name: end for name, end in gone.items() if end not in ("", STOCK, KEPT)} == {}
    assert "" in gone.values(), "no name was taken away from torch itself"
    features = {name: ways["feature"] for name, ways in found.items() if "feature" in ways}
    assert {
        name: end
        for name, end in features.items()
        if not (end.startswith(WITHOUT[name]) if WITHOUT[name] else not end)
    } == {}


def test_the_ways_to_take_a_name_away_do_so() -> None:
    """With both of two names gone, of which one stands in for the other, a save says so."""
    found = answers({"_get_default_store _world": ["hidden"], "_get_sequence_number_for_group": ["gone"]})
    assert found["_get_default_store _world"]["hidden"].startswith("BadInput: The store of the default")
    assert found["_get_sequence_number_for_group"]["gone"] in ("", STOCK)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_name_of_a_pickle_has_a_value_that_uses_it() -> None:
    import io
    import pickletools
    import zipfile

    import torch

    for name in WITHOUT:
        if name.startswith("_rebuild") or name == "_get_layout":
            buffer = io.BytesIO()
            torch.save(pickled(name), buffer)
            with zipfile.ZipFile(buffer) as archive:
                named = {str(arg) for _, arg, _ in pickletools.genops(archive.read("archive/data.pkl"))}
            assert any(text.endswith(name) for text in named), name


def test_storages_without_the_private_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from holdfast._core.torch_private import typed_storage

    real = torch.TypedStorage

    def without(*, wrap_storage: torch.UntypedStorage, dtype: torch.dtype) -> object:
        return real(wrap_storage=wrap_storage, dtype=dtype)

    monkeypatch.setattr(torch, "TypedStorage", without)
    storage = torch.arange(4.0).untyped_storage()
    made = typed_storage(storage, torch.float32)
    assert made.dtype == torch.float32
    assert list(made) == [0.0, 1.0, 2.0, 3.0]
