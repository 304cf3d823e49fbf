"""The pages say what is so: their code runs, what they name exists, their tables are the code's."""

from __future__ import annotations

import ast
import inspect
import os
import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import errors, huggingface
from holdfast._frameworks.torch_dcp.arguments import TAKES
from holdfast._groups.ending.bound import EXIT_LATE
from holdfast._groups.session.shutdown import EXIT_STUCK
from holdfast._tools.cli import COMMANDS, cli
from tests.docs.pages import OURS, PAGES, ROOT, anchors, code, table, text, without_code
from tests.support.processes import ProcessWorld


def readme_on_a_rank(rank: int, folder: str) -> str:
    os.chdir(folder)
    exec(code(text("README.md"))[0][1], {"__name__": "README.md"})
    return sorted(os.listdir("run/step-00000100/data"))[rank]


def test_the_readmes_example_runs_on_every_rank(tmp_path: Path) -> None:
    with ProcessWorld(2) as world:
        files = world.run(readme_on_a_rank, str(tmp_path))
    assert [name.rpartition("-")[2] for name in files] == ["r00000.safetensors", "r00001.safetensors"]


@pytest.mark.usefixtures("elsewhere")
def test_calls_of_torchs_dcp_stay_as_they_are() -> None:
    import torch.distributed.checkpoint as theirs

    for name in ("save", "load", "async_save"):
        wanted = inspect.signature(getattr(theirs, name)).parameters
        ours = inspect.signature(getattr(holdfast.dcp, name)).parameters
        assert list(ours)[: len(wanted)] == list(wanted)
        for argument, parameter in wanted.items():
            assert ours[argument].kind == parameter.kind
            if argument != "async_checkpointer_type":  # ours is of one type
                assert ours[argument].default == parameter.default
    state = {"w": torch.arange(3.0), "step": 3}
    for call in ("save", "async_save"):
        done = getattr(holdfast.dcp, call)(state, checkpoint_id="there", no_dist=True, use_collectives=False)
        if call == "async_save":
            heard: list[Any] = []
            done.add_done_callback(heard.append)
            assert done.result(30).bytes_written > 0
            assert done.exception() is None
            assert heard == [done.upload_completion]
        blank = {"w": torch.zeros(3), "step": 0}
        holdfast.dcp.load(blank, checkpoint_id="there", no_dist=True, process_group=None)
        assert torch.equal(blank["w"], state["w"])
        assert blank["step"] == 3
    theirs.save({"w": state["w"]}, checkpoint_id="theirs", no_dist=True)
    blank["w"].zero_()
    holdfast.dcp.load({"w": blank["w"]}, checkpoint_id="theirs", no_dist=True)
    assert torch.equal(blank["w"], state["w"])
    holdfast.dcp.save(state, storage_writer=theirs.FileSystemWriter("plain"), no_dist=True)
    blank = {"w": torch.zeros(3), "more": torch.ones(2)}
    partial = theirs.DefaultLoadPlanner(allow_partial_load=True)
    holdfast.dcp.load(blank, storage_reader=theirs.FileSystemReader("plain"), planner=partial, no_dist=True)
    assert torch.equal(blank["w"], state["w"])

    class Writer(theirs.FileSystemWriter): ...

    class Planner(theirs.DefaultLoadPlanner): ...

    with pytest.raises(
        errors.BadInput, match=r"no storage_writer= \(Writer\).*Leave .* give checkpoint_id='a'"
    ):
        holdfast.dcp.save(state, storage_writer=Writer("a"), job=holdfast.Job(no_dist=True))
    holdfast.dcp.save(state, storage_writer=Writer("a"), no_dist=True)
    holdfast.dcp.load(state, checkpoint_id="there", planner=Planner(), no_dist=True)


@pytest.mark.parametrize(
    "name",
    [
        "save",
        "load",
        "open",
        "Checkpoints",
        "Job",
        "Options",
        "fetch",
        "session",
        "open_groups",
        "warm_up",
        "audit",
        "install",
    ],
)
def test_tables_of_arguments(name: str) -> None:
    rows = table(text("docs/api.md"), name)
    owner = huggingface if name == "fetch" else holdfast
    parameters = inspect.signature(getattr(owner, name)).parameters.values()
    told = [(row[0], row[1]) for row in rows]
    assert told == [
        (
            p.name,
            "" if p.default is inspect.Parameter.empty else repr(p.default).replace("<factory>", "Options()"),
        )
        for p in parameters
    ]


def test_the_table_of_what_torch_dcps_arguments_do() -> None:
    rows = {
        row[0]: [re.findall(r"\w+", cell) for cell in row[1:]]
        for row in table(text("docs/api.md"), "dcp arguments")
    }
    kinds = {
        name: kind for taken in TAKES.values() for kinds in taken.values() for name, kind in kinds.items()
    }
    assert rows == {
        name.rpartition(".")[2]: [list(kind.honoured), list(kind.moot), list(kind.torchs)]
        for name, kind in kinds.items()
    }


def error_names() -> set[str]:
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    return {kind.__name__ for kind in classes if issubclass(kind, errors.HoldfastError)}


def test_every_public_name_is_in_the_reference() -> None:
    page = text("docs/api.md")
    for name in (*holdfast.__all__, *holdfast.testing.__all__):
        assert re.search(rf"\b{name}\b", page), name
    assert {row[0] for row in table(page, "errors")} == error_names()


def test_every_error_and_exit_code_has_a_line_on_what_to_do() -> None:
    page = text("docs/troubleshooting.md")
    assert {row[0] for row in table(page, "errors")} == error_names() - {
        "HoldfastError",
        "IdleRanks",
        "Unplaced",
    }
    codes = set(map(int, re.findall(r"^\| (\d+) \|", page, re.MULTILINE)))
    assert codes == {1, EXIT_STUCK, EXIT_LATE}


def test_the_table_of_commands() -> None:
    rows = {row[0]: row[1] for row in table(text("docs/commands.md"), "commands")}
    assert {call.split()[1]: does for call, does in rows.items()} == COMMANDS
    for call in rows:
        _, name, *arguments = call.split()
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        takes = [p.human_readable_name for p in command.params if p.param_type_name == "argument"]
        assert " ".join(takes).upper() == " ".join(arguments)
        options = {option for p in command.params for option in p.opts}
        assert ("--json" in options) == (name != "run"), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    body = without_code(page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)]+)\)", body):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = page if not file else (page.parent / file)
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", OURS, ids=lambda page: page.name)
def test_what_is_cited_exists(page: Path) -> None:
    body = page.read_text(encoding="utf-8")
    cited = set(re.findall(r"((?:tests|src|examples|docs|bench)/[\w./-]*\w)(?:::(\w+))?", body))
    for file, test in cited:
        assert (ROOT / file).exists(), file
        if test:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


@pytest.mark.parametrize("page", OURS, ids=lambda page: page.name)
def test_pages_are_for_everybody(page: Path) -> None:
    """No path of one machine, no line too long to read, no trailing blanks."""
    body = page.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(work|root|home|tmp|mnt|usr)/", body)
    for number, line in enumerate(body.split("\n"), 1):
        assert line == line.rstrip(), number
        assert len(line) <= 130 or line.startswith("|"), number


@pytest.mark.parametrize("name", ["demo", "test", "wide", "soak"])
def test_words_of_the_makefile(name: str) -> None:
    assert f"\n{name}:" in text("Makefile")


def test_no_page_installs_a_package_that_is_somebody_elses() -> None:
    """`holdfast` on PyPI is not this library. Ours will be called torch-holdfast, and is not there yet."""
    project = tomllib.loads(text("pyproject.toml"))["project"]
    assert project["name"] == "torch-holdfast"
    pages = [*PAGES, *ROOT.glob("src/**/*.py"), ROOT / "CHANGELOG.md", ROOT / "Makefile"]
    asked = [
        (page.name, found[0])
        for page in pages
        for found in re.finditer(
            r"install[^\n]*?[\s'\"`](holdfast|torch-holdfast)(?=[\[=<>~'\"`\s]|$)",
            page.read_text(encoding="utf-8"),
        )
    ]
    assert not [(page, said) for page, said in asked if "pip" in said or "[" in said], asked
    assert "`pip install .` in a clone" in text("README.md")


def test_no_code_of_a_page_unpickles() -> None:
    for page in PAGES:
        assert not [line for line, block in code(str(page.relative_to(ROOT))) if "pickle.load" in block], page


def test_the_version_stands_in_one_place() -> None:
    assert metadata.version("torch-holdfast") == holdfast.__version__
    assert f"## {holdfast.__version__}" in text("CHANGELOG.md")
    assert "Apache License" in text("LICENSE")


def test_each_decision_is_listed_and_each_number_that_is_missing_is_explained() -> None:
    files = {path.name[:4]: path.name for path in (ROOT / "docs/decisions").glob("[0-9]*.md")}
    listed, missing = text("docs/decisions/README.md").split("## Missing numbers")
    assert re.findall(r"^\| \d{4} \| \[[^]]+\]\(([^)]+)\)", listed, re.MULTILINE) == sorted(files.values())
    explained = re.findall(r"^\| (\d{4}) \|", missing, re.MULTILINE)
    assert sorted([*files, *explained]) == [f"{number:04}" for number in range(1, int(max(files)) + 1)]
