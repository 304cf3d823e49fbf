"""The page of the rooms says what is so: its tables name what exists, and its routes are those of traced
calls."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from tests.docs.pages import ROOT, text
from tests.support.processes import ProcessWorld
from tests.support.routes import trace

PAGE = "docs/architecture.md"
SOURCE = ROOT / "src" / "holdfast"


def listed(route: str) -> list[str]:
    """The functions of a route on the page."""
    found = re.search(rf"<!-- route: {route} -->\n(.*?)<!-- end -->", text(PAGE), re.DOTALL)
    assert found, route
    return re.findall(r"- `([\w.]+)`", found[1])


def missing(route: str, call: Callable[[], Any]) -> list[str]:
    """The functions that the page lists and a traced call does not enter, or not in that order."""
    entered = iter(trace(call).functions)
    return [name for name in listed(route) if name not in entered]


def state() -> dict[str, Any]:
    return {"model": {"w": torch.randn(8, 8)}, "step": 1}


def plain_routes(rank: int, folder: str) -> dict[str, list[str]]:
    """What is missing of each route; the last one is traced through another call, so that something must
    be."""
    save, load, save_async = (
        lambda: holdfast.save(state(), f"{folder}/a"),
        lambda: holdfast.load(state(), f"{folder}/a"),
        lambda: holdfast.async_save(state(), f"{folder}/b").committed(),
    )
    return {
        "save": missing("save", save),
        "load": missing("load", load),
        "async_save": missing("async_save", save_async),
        "another": missing("load", save),
    }


def megatron_route(rank: int, folder: str) -> list[str]:
    from tests.integrations.megatron.cpu import use_cpu

    use_cpu()
    from holdfast import megatron

    return missing("megatron", lambda: megatron.save({"w": torch.ones(2)}, folder))


def test_the_routes_are_those_of_traced_calls(tmp_path: Path) -> None:
    """In new processes: CPython 3.11 can loop for ever where code that ran before is profiled."""
    with ProcessWorld(1) as world:
        (found,) = world.run(plain_routes, str(tmp_path))
        assert world.run(megatron_route, str(tmp_path / "megatron")) == [[]]
    assert found.pop("another")
    assert found == {"save": [], "load": [], "async_save": []}


def test_every_package_is_a_room_on_the_page_in_the_order_of_the_contract() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text(PAGE).partition("## Where is")[0], re.MULTILINE)
    rooms = [set(re.findall(r"`(\w+)`", row)) for row in rows]
    there = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert there <= set().union(*rooms), there - set().union(*rooms)
    contract = tomllib.loads(text("pyproject.toml"))["tool"]["importlinter"]["contracts"][0]["layers"]
    layers = [{name.strip().removeprefix("holdfast.") for name in layer.split("|")} for layer in contract]
    order = [next(at for at, layer in enumerate(layers) if room <= layer or room & layer) for room in rooms]
    assert order == sorted(order)


def test_answers_name_what_exists() -> None:
    answers = text(PAGE).partition("## Where is")[2].partition("## The four")[0]
    for file, name in re.findall(r"`([\w/]+\.py)`, `([\w.]+)`", answers):
        source = (SOURCE / file).read_text(encoding="utf-8")
        assert re.search(rf"(?:def|class) {name.rpartition('.')[2]}\b", source), (file, name)


@pytest.mark.parametrize(
    "package", [path.parent for path in SOURCE.rglob("__init__.py")], ids=lambda path: path.name
)
def test_every_package_says_what_it_is_for(package: Path) -> None:
    assert (package / "__init__.py").read_text(encoding="utf-8").startswith('"""')
