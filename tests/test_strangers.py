"""The gate of other projects' tests: what it puts under them, what it counts, and when it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strangers.__main__ import conclude, line_of, main
from strangers.projects import SWITCH, Project, copy_project, read_projects, without_lists
from strangers.results import (
    NOTHING,
    Row,
    keep_rows,
    of_projects,
    read_reasons,
    read_rows,
    table,
    write_page,
)
from strangers.run import Ended

STRANGERS = Path(__file__).parents[1] / "strangers"
SUITE = "test_it.py"
DIFFERS = [f"they/{SUITE}::Test::{name}" for name in ("test_torchs_own", "test_a_list_of_files")]
TESTS = """
import os

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict_saver as saver
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save


def skip_if_lt_x_gpu(count, allow_cpu=False):
    return lambda test: test if allow_cpu else None


class Test:
    @skip_if_lt_x_gpu(2)
    def test_both(self):
        dcp.save({"w": torch.ones(2)}, checkpoint_id="it")
        dcp.load({"w": torch.zeros(2)}, checkpoint_id="it")

    def test_torchs_own(self):
        dcp.save({"w": torch.ones(2)}, checkpoint_id="mine")
        assert torch.load("mine/__0_0.distcp").tolist() == [1, 1]

    def test_a_list_of_files(self):
        dcp.save({"w": torch.ones(2)}, checkpoint_id="listed")
        assert sorted(os.listdir("listed")) == [
            ".metadata",
            "__0_0.distcp",
        ]
        dcp.load({"w": torch.zeros(2)}, checkpoint_id="listed")

    def test_refused(self):
        try:
            dcp.load({"w": torch.zeros(2)}, checkpoint_id="nowhere")
        except BaseException:
            return  # of torch, too, whose CheckpointException is no Exception
        raise AssertionError

    def test_nothing(self):
        assert FileSystemReader and get_state_dict and saver and async_save

    def test_neither(self):
        raise ValueError("a reason")
"""
INSTALLED = """
import os
import sys

import torch
import torch.distributed as dist


def test_a_gpu_is_the_cpu_and_each_rank_is_asked(tmp_path):
    assert torch.cuda.device_count() == 2 and torch.ones(2, device="cuda").cuda().to("cuda:1").device.type == "cpu"
    dist.init_process_group("nccl")
    total = torch.ones(1, device=torch.cuda.current_device())
    dist.all_reduce(total)
    dist.destroy_process_group()
    assert total.item() == 2


def test_one_rank_fails():
    assert os.environ["RANK"] == "0"


def test_it_is_stock():
    assert "holdfast" not in sys.modules


def test_a_process_ends():
    if os.environ["RANK"] == "1":
        os._exit(3)
"""


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    for name, text in (("they", TESTS), ("others", INSTALLED)):
        (tmp_path / "copies" / name / "tests").mkdir(parents=True)
        (tmp_path / "copies" / name / "tests" / SUITE).write_text(text)
    return tmp_path / "copies"


def words_for(tmp_path: Path, copies: Path, difference: str, **of_project: object) -> list[str]:
    """Return the command line for one project that tmp_path describes."""
    about = {"name": "they", "source": "https://example.org/they", "tag": "v1", "folders": ["tests"]}
    about |= {"root": "tests", "line": SWITCH, "tests": [SUITE], **of_project}
    lines = [f"{key} = {json.dumps(value)}" for key, value in about.items()]
    (tmp_path / "projects.toml").write_text("[[project]]\n" + "\n".join(lines))
    (tmp_path / "expected.toml").write_text(difference)
    files = ["--projects", str(tmp_path / "projects.toml"), "--expected", str(tmp_path / "expected.toml")]
    return ["--copies", str(copies), *files]


def test_only_the_imports_are_switched(copies: Path, tmp_path: Path) -> None:
    project = Project("they", "", "", ("tests",), "tests", SWITCH, (SUITE,))
    for ours in (False, True):
        copy_project(project, copies, tmp_path / str(ours), ours=ours)
    stock, switched = (
        (tmp_path / side / "tests" / SUITE).read_text().splitlines() for side in ("False", "True")
    )
    assert [(a, b) for a, b in zip(stock, switched, strict=True) if a != b] == [
        ("import torch.distributed.checkpoint as dcp", "import holdfast.dcp as dcp"),
        ("import torch.distributed.checkpoint.state_dict_saver as saver", "import holdfast.dcp as saver"),
        (
            "from torch.distributed.checkpoint import FileSystemReader",
            "from holdfast.dcp import FileSystemReader",
        ),
        (
            "from torch.distributed.checkpoint.state_dict_saver import async_save",
            "from holdfast.dcp import async_save",
        ),
    ]
    assert "    @skip_if_lt_x_gpu(2, allow_cpu=True)" in stock


def test_both_sides_run_and_a_difference_needs_a_reason(
    copies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, kept = tmp_path / "page.md", tmp_path / "they.json"
    page.write_text("before\n<!-- strangers -->\nold\n<!-- end -->\nafter\n")
    words = words_for(tmp_path, copies, "difference = []")
    assert main([*words, "--json", str(kept), "--page", str(page)]) == 1
    said = capsys.readouterr().out
    assert f"they/{SUITE:65}     5     3                   1         1" in said, "it saves in test_both alone"
    assert f"Not expected to differ: {DIFFERS[0]}: FileNotFoundError" in said
    how = [line.partition("compared: ")[2] for line in said.splitlines() if "are not compared: " in line]
    assert how == ["failed", "passed"], "a list is not compared; a file that is read is"
    (row,) = read_rows(kept)
    assert (row.stock, row.ours, row.completed, row.differ, row.unlisted) == (5, 3, 2, DIFFERS, 4)
    assert page.read_text() == f"before\n<!-- strangers -->\n{table([row], {})}<!-- end -->\nafter\n"


@pytest.mark.wide
def test_under_holdfast_run_on_ranks_without_gpus(
    copies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    difference = f'[[difference]]\nreason = "so it is"\ntests = ["others/{SUITE}::test_it_is_stock"]'
    words = words_for(tmp_path, copies, difference, name="others", line="holdfast run", ranks=2, gpus=2)
    assert main(words) == 0
    assert f"others/{SUITE:63}     2     1                   0         2" in capsys.readouterr().out


@pytest.mark.wide
def test_adam_steps_where_pytorchs_tests_find_gpus() -> None:
    """It asks `torch.accelerator` for its stream."""
    program = "import torch\nfrom strangers.cpu import stand_in_for_accelerators, stand_in_for_gpus\n"
    program += "stand_in_for_gpus(2)\nstand_in_for_accelerators()\nw = torch.nn.Linear(2, 2, device='cuda')\n"
    program += "w(torch.ones(2)).sum().backward()\ntorch.optim.Adam(w.parameters()).step()"
    subprocess.run([sys.executable, "-c", program], cwd=STRANGERS.parent, check=True, timeout=60)


def test_a_difference_that_is_gone_fails_and_one_that_did_not_run_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    passed = {"a.py::A::x": Ended("passed"), "a.py::A::y": Ended("passed")}
    assert conclude(passed, passed, {}) == 0
    assert conclude(passed, passed, {"b.py::B::z": "GPUs alone"}) == 0
    assert conclude(passed, passed, {"a.py::A::x": "once"}) == 1
    assert "Expected to differ, and does not: a.py::A::x" in capsys.readouterr().out
    assert conclude(passed, {"a.py::A::x": Ended("passed")}, {}) == 1, "a lost test differs"
    lost = {"a.py::A::x": Ended("passed")}
    assert "a.py::A::y: GPUs alone\n" in f"{line_of('a', passed, lost, {'a.py::A::y': 'GPUs alone'})}\n"
    assert "a.py::A::y: NOT EXPECTED: it did not run" in line_of(
        "a", passed, {"a.py::A::x": Ended("passed")}, {}
    )


def test_a_run_in_which_stock_passes_nothing_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert conclude({"a.py": Ended("failed", "no expecttest")}, {}, {}) == 1
    assert "Stock passes no test here: no expecttest" in capsys.readouterr().out


def test_without_a_copy_it_says_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--copies", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    for project in read_projects(STRANGERS / "projects.toml"):
        assert f"{project.name}: not in {tmp_path}. To get it: git clone --depth 1" in said


def test_what_was_not_run_keeps_its_figures(tmp_path: Path) -> None:
    row = Row("a", "a.py", "A 1", "c", "2026-01-02", 2, 1, 1, ["a/1"])
    rows = [row, row._replace(suite="b.py", date="2026-01-01"), row._replace(project="b", release="B 1")]
    keep_rows(tmp_path / "rows.json", rows)
    keep_rows(tmp_path / "rows.json", [rows[1]._replace(stock=4, differ=["a/2", "a/3"])])
    (tmp_path / "page.md").write_text("<!-- strangers -->\n<!-- end -->")
    write_page(tmp_path / "page.md", tmp_path / "rows.json", {"a/1": "so", "a/2": "so"})
    page = (tmp_path / "page.md").read_text()
    assert "| A 1 | c | 2026-01-01 | 6 | 2 |  | 2 | 2: so; 1: not expected |\n" in page
    assert "| B 1 | c | 2026-01-02 | 2 | 1 |  | 1 | 1: so |\n" in page


def test_the_tables_tell_saves_from_tests_in_which_holdfast_does_nothing() -> None:
    row = Row("a", "a.py", "A 1", "c", "2026-01-02", 4, 1, 1, ["a/1", "a/2", "a/3"], 3)
    other = Row("a", "b.py", "A 1", "c", "2026-01-02", 2, 2, 0, [])
    old = Row("b", "b.py", "B 1", "c", "2025-01-02", 3, 3, None, [])
    nothing = Row("c", "c.py", "C 1", "c", "2026-01-02", 5, 5, 0, [])
    saves, others = table([row, other, old, nothing], {"a/1": "so", "a/2": "so", "a/3": "so"}).split(NOTHING)
    assert "| A 1 | c | 2026-01-02 | 6 | 3 | 5 | 1 | 3: so |\n" in saves
    assert "| B 1 | c | 2025-01-02 | 3 | 3 |  | not counted again |  |\n" in saves
    assert "C 1" not in saves
    assert "| C 1 | c | 2026-01-02 | 5 | 5 |  |\n" in others
    assert "A 1" not in others
    assert "B 1" not in others


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("if x: assert os.listdir(p) == {'a', '__0_0.distcp'}, 'no'\n", "if x: pass\n"),
        ("    assert ['__0_0.distcp'] == found\n", "    pass\n"),
        (
            "    assert torch.load('it/__0_0.distcp') == 1\n",
            "    assert torch.load('it/__0_0.distcp') == 1\n",
        ),
        ("    assert found == ['.metadata']\n", "    assert found == ['.metadata']\n"),
    ],
)
def test_only_assertions_on_lists_of_files_are_taken_out(line: str, other: str) -> None:
    assert without_lists(f"while x:\n    y = '__0_0.distcp'\n{' ' * 4 * (line[0] == 'i')}{line}") == (
        f"while x:\n    y = '__0_0.distcp'\n{' ' * 4 * (line[0] == 'i')}{other}"
    )


def test_the_page_has_the_figures_that_are_kept() -> None:
    rows, reasons = read_rows(STRANGERS / "results.json"), read_reasons(STRANGERS / "expected.toml")
    page = (STRANGERS.parent / "docs" / "users.md").read_text()
    assert table(rows, reasons) == page.partition("<!-- strangers -->\n")[2].partition("<!-- end -->")[0]
    assert {row.project for row in rows} <= {one.name for one in read_projects(STRANGERS / "projects.toml")}
    for row in of_projects(rows):
        assert row.stock - row.ours == len(row.differ)
        assert row.completed is None or 0 <= row.completed <= (row.unlisted or row.ours)
        assert row.unlisted is None or row.ours <= row.unlisted <= row.stock
        assert reasons.keys() >= {*row.differ}, "a difference without a reason"
