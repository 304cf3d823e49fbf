"""An error tells its reader only of arguments that the function which was called has."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import dcp, huggingface
from holdfast._core.base.values import shortened
from holdfast.errors import HoldfastError

SOURCE = Path(holdfast.__file__).parent
megatron: Any = None
if importlib.util.find_spec("megatron") is not None:
    import tests.frameworks.megatron.preload  # noqa: F401 (imports megatron-core without its warnings)
    from holdfast import megatron


def arguments_in(text: str) -> set[str]:
    """What a text names as `argument=`, but for those of a function that it names: `install(guard=...)`."""
    return set(re.findall(r"(?<![\w.-])([a-z_]+)=(?!=)", re.sub(r"\w+\([^()]*\)", "", text)))


# -- as they stand in the source ---------------------------------------------------------------------

RAISED_BY: dict[str, list[Callable[..., Any]]] = {
    "_groups/lifecycle/warm_up.py": [holdfast.warm_up],
    "_frameworks/torch_dcp/arguments.py": [dcp.save, dcp.async_save, dcp.load],
    "_models/huggingface/adapters.py": [huggingface.export_adapter],
    "_models/huggingface/export.py": [huggingface.export],
    "_models/huggingface/importing.py": [huggingface.import_],
    "_models/huggingface/published_tensors.py": [huggingface.export],
    "_models/huggingface/quantizing.py": [huggingface.export],
    "_frameworks/megatron/checkpointing.py": [megatron.load] if megatron else [],
    "_core/io/renamed.py": [holdfast.load],
    "_core/layout/grid.py": [holdfast.Grid],
    "_models/huggingface/fetch.py": [huggingface.fetch],
    "_core/loading/job.py": [holdfast.load, holdfast.Checkpoints.restore],
    "_core/loading/rest.py": [holdfast.load, holdfast.Checkpoints.restore],
    "_core/loading/tied.py": [holdfast.load, holdfast.Checkpoints.restore],
    "_models/equality/engine.py": [holdfast.engine.fingerprint],
    "_models/equality/fingerprints.py": [
        holdfast.fingerprint,
        *([megatron.fingerprint] if megatron else []),
    ],
    "_models/equality/same.py": [holdfast.same],
    "_core/background/local_save.py": [holdfast.Checkpoints],
    "_core/plan/agreement.py": [holdfast.save, holdfast.async_save, holdfast.Checkpoints.save],
    "_core/protocol/call.py": [holdfast.save, holdfast.load, dcp.save, dcp.load, huggingface.export],
    "_core/run/owner.py": [holdfast.Checkpoints],
    "_core/run/preemption.py": [holdfast.Preemption],
    "_core/state/tensors.py": [holdfast.PerRank],
    "_core/store/retention.py": [
        holdfast.Checkpoints.save,
        *([megatron.Checkpoints.save] if megatron else []),
    ],
    "_frameworks/torch_dcp/calls.py": [dcp.load],
}
"""Who can raise the hints of a file that name arguments. Where functions differ, the hint is made for each
(`lenient` in LoadRequest), and the calls below show it."""


def hints() -> Iterator[tuple[str, str]]:
    """(file, text) of each hint; the values in it are left out."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg in ("hint", "lenient"):
                parts = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
                yield path.relative_to(SOURCE).as_posix(), " ".join(str(part) for part in parts)


def test_hints_name_arguments_of_the_functions_that_raise_them() -> None:
    naming = {(file, text) for file, text in hints() if arguments_in(text)}
    assert len(naming) > 10
    assert {file for file, _ in naming} <= RAISED_BY.keys(), "who can raise it?"
    for file, text in naming:
        for function in RAISED_BY[file]:
            assert arguments_in(text) <= set(inspect.signature(function).parameters), (file, text)


# -- as a caller gets them ---------------------------------------------------------------------------

W = {"w": torch.zeros(2)}
MORE = {"w": torch.zeros(2), "more": torch.zeros(2)}
OTHER_SHAPE = {"w": torch.zeros(3)}
EMPTY = {"w": {}}
NOTHING: dict[str, Any] = {}
KEPT = {"w": torch.zeros(2), "step": torch.nn.Linear}
STATES = {"more": MORE, "shape": OTHER_SHAPE, "empty": EMPTY, "nothing": NOTHING, "kept": KEPT}


def saved(folder: Path) -> Path:
    holdfast.save({"w": torch.ones(2)}, folder / "run" / "step-00000001", job=holdfast.Job(no_dist=True))
    return folder / "run" / "step-00000001"


def sharded(state: Any) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor

    return {
        name: ShardedTensor.from_rank_offsets(name, value) if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def background(state: Any, folder: Path) -> None:
    holdfast.async_save(state, folder).result()


LOADS: dict[str, tuple[Callable[[Any, Path], Any], list[Callable[..., Any]]]] = {
    "load": (lambda state, folder: holdfast.load(state, folder), [holdfast.load]),
    "dcp.load": (lambda state, folder: dcp.load(state, checkpoint_id=folder), [dcp.load]),
    "Checkpoints.restore": (
        lambda state, folder: holdfast.Checkpoints(folder.parent).restore(state),
        [holdfast.Checkpoints, holdfast.Checkpoints.restore],
    ),
}
SAVES: dict[str, tuple[Callable[[Any, Path], Any], list[Callable[..., Any]]]] = {
    "save": (lambda state, folder: holdfast.save(state, folder), [holdfast.save]),
    "async_save": (background, [holdfast.async_save]),
    "dcp.save": (lambda state, folder: dcp.save(state, checkpoint_id=folder), [dcp.save]),
    "Checkpoints.save": (
        lambda state, folder: holdfast.Checkpoints(folder.parent, asynchronous=False).save(2, state),
        [holdfast.Checkpoints, holdfast.Checkpoints.save],
    ),
}
if megatron:
    LOADS["megatron.load"] = (lambda state, folder: megatron.load(sharded(state), folder), [megatron.load])
    SAVES["megatron.save"] = (lambda state, folder: megatron.save(sharded(state), folder), [megatron.save])


def said_by(call: Callable[[], Any]) -> str:
    with pytest.raises(HoldfastError) as caught:
        call()
    return str(caught.value)


def check(text: str, functions: list[Callable[..., Any]]) -> None:
    assert arguments_in(text) <= {
        name for function in functions for name in inspect.signature(function).parameters
    }, text


@pytest.mark.parametrize("what", ["more", "shape", "empty", "nothing"])
@pytest.mark.parametrize("name", LOADS)
def test_what_a_load_says(name: str, what: str, tmp_path: Path) -> None:
    folder, (load, functions) = saved(tmp_path), LOADS[name]
    if (name == "megatron.load" and what in ("empty", "nothing")) or (name, what) == ("dcp.load", "nothing"):
        load(STATES[what], folder)  # there, nothing need be asked for
        return
    text = said_by(lambda: load(STATES[what], folder))
    check(text, functions)
    if what == "more":
        assert arguments_in(text) == {"planner" if name == "dcp.load" else "strict"}, "how to load the others"


@pytest.mark.parametrize("name", SAVES)
def test_what_a_save_says_of_a_class(name: str, tmp_path: Path) -> None:
    folder, (save, functions) = saved(tmp_path), SAVES[name]
    check(said_by(lambda: save(KEPT, folder)), functions)


@pytest.mark.parametrize("name", [*LOADS, *SAVES])
def test_what_is_said_where_ranks_can_not_find_each_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (call, functions) = saved(tmp_path), {**LOADS, **SAVES}[name]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = said_by(lambda: call(W, folder))
    assert "torch.distributed is not initialised" in text
    check(text, functions)
    assert "job=holdfast.Job(no_dist=True)" in text


@pytest.mark.parametrize("name", ["export", "import_"])
def test_the_same_of_published_models(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, function = saved(tmp_path), getattr(huggingface, name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    like = {"like": folder} if name == "export" else {}
    check(said_by(lambda: function(folder, tmp_path / "out", **like)), [function])


@pytest.mark.parametrize("function", [dcp.save, dcp.load, dcp.async_save])
def test_a_call_without_a_folder(function: Callable[..., Any]) -> None:
    text = said_by(lambda: function("c"))
    assert "names no folder" in text
    check(text, [function])


def test_names_that_are_gone(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    text = said_by(lambda: holdfast.save({"x": 1}, folder, expected="previous"))
    assert "expected=None" in text
    check(text, [holdfast.save])
    run = holdfast.Checkpoints(folder.parent, asynchronous=False)
    check(said_by(lambda: run.save(2, {"x": 1}, expected="previous")), [type(run), type(run).save])


def test_a_wrong_argument_of_checkpoints_names_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"^Checkpoints\.__init__\(\) got an unexpected keyword argument 'more'"
    ):
        holdfast.Checkpoints(tmp_path, more=1)  # type: ignore[call-arg]


def test_a_text_is_cut_after_a_word() -> None:
    text = "one two three " * 40
    cut = shortened(text)
    assert len(cut) <= 202
    assert cut.endswith(" …")
    assert text.startswith(cut.removesuffix("…"))
    assert shortened("x" * 300) == "x" * 200 + " …"
    assert shortened("short") == "short"
