"""Every argument of every function that `install()` replaces is decided about: ours uses it, or says why not,
or the call goes to the original. A new argument of an installed version fails here until someone has decided."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest

from holdfast._frameworks.arguments import by_name, taking_those_of
from holdfast._frameworks.frameworks import FRAMEWORKS
from holdfast._frameworks.patching import Replacement
from holdfast._frameworks.replacing import replacements_of
from holdfast._frameworks.settings import Settings
from holdfast.errors import BadInput
from tests.frameworks.test_frameworks_table import source_of

LEFT = {
    "merge_adapter_weights": "without it, adapters are saved apart, which Holdfast does not",
}
"""Arguments that send the call to the framework if they have not their default value."""


def definition(replacement: Replacement) -> ast.FunctionDef | None:
    """The source of a replaced function; None if no installed version has it."""
    for distribution in {one.distribution for one in FRAMEWORKS if one.distribution}:
        try:
            source = source_of(distribution, replacement.module)
        except importlib.metadata.PackageNotFoundError:
            continue
        *path, last = replacement.name.split(".")
        body: list[ast.stmt] = ast.parse(source.read_text(encoding="utf-8")).body if source else []
        for part in path:
            found = next((one for one in body if isinstance(one, ast.ClassDef) and one.name == part), None)
            body = found.body if found is not None else []
        for one in body:
            if isinstance(one, ast.FunctionDef) and one.name == last:
                return one
    return None


REPLACED = [
    replacement
    for framework in FRAMEWORKS
    for replacement in replacements_of(framework, Settings())
    if replacement.part != "guard" and not replacement.adds and definition(replacement) is not None
]


def test_the_replaced_functions_are_found() -> None:
    assert {"megatron.core.dist_checkpointing.serialization.save"} <= set(map(str, REPLACED))
    assert len(REPLACED) > 20


@pytest.mark.filterwarnings("ignore")  # of megatron-core, of what it does not find
@pytest.mark.parametrize("replacement", REPLACED, ids=str)
def test_each_argument_is_decided_about(replacement: Replacement) -> None:
    found = definition(replacement)
    assert found is not None
    names = [one.arg for one in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]
    if replacement.takes is None:
        return  # all are passed on
    first = names[:1]  # the object of a method: ours has another name for it
    assert [name for name in names if name not in (*replacement.takes(), *first, *LEFT)] == []


PREPARING = [
    one
    for one in REPLACED
    if one.name.endswith(("preprocess_fsdp_dtensor_state_dict", "_preprocess_state_dict"))
]


@pytest.mark.parametrize("replacement", PREPARING, ids=str)
def test_a_function_that_is_wrapped_may_be_called_by_its_own_names(replacement: Replacement) -> None:
    found = definition(replacement)
    assert found is not None
    names = [one.arg for one in found.args.args]
    seen: dict[str, Any] = {}
    space: dict[str, Any] = {}
    exec(f"def original({', '.join(names)}):\n return see(locals())", {"see": seen.update}, space)
    replacement.make(space["original"])(**{name: f"the {name}" for name in names})
    assert seen == {name: f"the {name}" for name in names}


def original(state: object, folder: str, strategy: object = None, strict: bool = True) -> tuple[object, ...]:
    raise AssertionError("never called")


def bound(*args: object, **named: object) -> object:
    return by_name(original, ("state", "folder", "strict", "job"), args, named)


def test_positions_are_those_of_the_original() -> None:
    assert bound(1, "a", None, False) == {"state": 1, "folder": "a", "strict": False}
    assert bound(1, folder="a", job=2) == {"state": 1, "folder": "a", "job": 2}


@pytest.mark.parametrize("call", [lambda: bound(1), lambda: bound(1, "a", wrong=1)])
def test_what_the_original_would_refuse_is_a_type_error(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"original\(\): "):
        call()


def test_an_argument_that_nobody_knows_is_refused_unless_it_is_the_default() -> None:
    assert bound(1, "a", strategy=None) == {"state": 1, "folder": "a"}
    with pytest.raises(
        BadInput, match="was given strategy='fast', which this version of Holdfast does not know"
    ):
        bound(1, "a", "fast")


def test_a_function_takes_the_positions_of_another() -> None:
    @taking_those_of(original)
    def ours(state: object, folder: str, *, strict: bool = True, job: object = None) -> object:
        return state, folder, strict, job

    assert ours(1, "a", None, False, job=3) == (1, "a", False, 3)  # type: ignore[misc]
