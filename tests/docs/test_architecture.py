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
from holdfast._core.loading.job import LoadJob
from holdfast._core.loading.request import LoadRequest
from tests.docs.pages import ROOT, text
from tests.support.processes import ProcessWorld
from tests.support.routes import handed, trace

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
    from tests.frameworks.megatron.cpu import use_cpu

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


def handed_jobs(rank: int, folder: str) -> list[set[str]]:
    holdfast.save(state(), folder)
    return [handed(lambda: holdfast.load(state(), folder), kind) for kind in (LoadJob, LoadRequest)]


def test_a_load_hands_its_job_to_the_protocol_alone(tmp_path: Path) -> None:
    """Other functions get the values that they need."""
    with ProcessWorld(1) as world:
        ((jobs, requests),) = world.run(handed_jobs, str(tmp_path / "c"))
    assert jobs == {"_core.protocol.core.load_steps"}
    assert "_core.loading.plan.plan_load" in requests


def screen() -> str:
    """The first screen of the page: the picture and the table of packages."""
    return text(PAGE).partition("## Interfaces")[0]


def cells(section: str) -> list[list[str]]:
    """The cells of the rows of all tables in a section, without the heads."""
    rows = re.findall(r"^\| .*\|$", section, re.MULTILINE)
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in rows]


def contracts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(text("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    return found


def test_the_page_opens_with_one_screen_of_a_picture_and_a_sentence_for_each_package() -> None:
    assert screen().count("\n") <= 45
    assert "```mermaid" in screen()
    _, *rows = cells(screen())
    for package, sentence, start in rows:
        assert re.fullmatch(r"[A-Z][^.]*\.", sentence), package
        assert (SOURCE / start.strip("`")).exists(), start


def test_the_core_of_the_picture_is_the_one_that_the_contract_names() -> None:
    """In the order of imports, from the bottom."""
    drawn = re.search(r"core\[\"<b>core</b>(.*?)\"]", screen(), re.DOTALL)
    assert drawn
    steps = [re.findall(r"\w+", step) for step in drawn[1].replace("<br/>", " ").split("→") if step.strip()]
    wall = next(
        contract for contract in contracts() if contract["name"] == "The core knows no published model"
    )
    named = {name.removeprefix("holdfast._core.") for name in wall["source_modules"]}
    assert sorted(name for step in steps for name in step) == sorted(named)
    layers = [set(re.findall(r"holdfast\._core\.(\w+)", layer)) & named for layer in contracts()[0]["layers"]]
    assert [set(step) for step in steps] == [layer for layer in reversed(layers) if layer]


def test_interfaces_and_walls_are_there() -> None:
    section = text(PAGE).partition("## Interfaces")[2].partition("## Where is")[0]
    interfaces, walls = section.split("| contract | wall |")
    _, *rows = cells(interfaces)
    for name, file, who in rows:
        source = (SOURCE / file.strip("`")).read_text(encoding="utf-8")
        assert re.search(rf"^class {name.strip('`')}\b", source, re.MULTILINE), name
        for cited in re.findall(r"`([\w/]+\.py)`", who):
            assert (SOURCE / cited).exists(), cited
    assert {wall for wall, _ in cells(walls)} == {contract["name"] for contract in contracts()}


def test_every_package_is_a_room_on_the_page_in_the_order_of_the_contract() -> None:
    rows = re.findall(r"^\| (`[\w/]+`(?:, `[\w/]+`)*) \|", screen(), re.MULTILINE)
    rooms = [set(re.findall(r"`([\w/]+)`", row)) for row in rows]
    packages = {path.parent for path in SOURCE.glob("*/__init__.py")}
    for wing in ("_core", "_models", "_tools"):  # each of their packages is a room
        packages |= {path.parent for path in (SOURCE / wing).glob("*/__init__.py")} - {SOURCE / wing}
        packages -= {SOURCE / wing}
    there = {path.relative_to(SOURCE).as_posix() for path in packages}
    assert there <= set().union(*rooms), there - set().union(*rooms)
    layers = [
        {name.strip().removeprefix("holdfast.").replace(".", "/") for name in layer.split("|")}
        for layer in contracts()[0]["layers"]
    ]
    order = [next(at for at, layer in enumerate(layers) if room <= layer or room & layer) for room in rooms]
    assert order == sorted(order)


def test_every_question_is_answered_by_one_file() -> None:
    _, *rows = cells(text(PAGE).partition("## Where is")[2].partition("## install")[0])
    for question, answer, _ in rows:
        file = re.fullmatch(r"`([\w/]+\.py)`(?:, `[\w.]+`)?", answer)
        assert file, question
        assert (SOURCE / file[1]).exists(), answer
    asked = " ".join(question for question, *_ in rows)
    for word in ("writer of a replica", "published", "wait ended", "DTensor", "published model"):
        assert word in asked


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
