"""The gate of other projects' tests: what it switches, what it counts, and when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from strangers.__main__ import SUITES, conclude, main, row
from strangers.run import Ended
from strangers.switch import FOLDER, callers, copy_tests

SUITE = "test_checkpoint.py"
TESTS = """
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict_saver as saver
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu


class Test:
    @skip_if_lt_x_gpu(2)
    def test_both(self):
        state = {"w": torch.zeros(2)}
        dcp.load(state, checkpoint_id=self.saved())

    def saved(self):
        dcp.save({"w": torch.ones(2)}, checkpoint_id="it")
        return "it"

    def test_torchs_own(self):
        dcp.save({"w": torch.ones(2)}, checkpoint_id="mine")
        assert torch.load("mine/__0_0.distcp").tolist() == [1, 1]

    def test_nothing(self):
        assert FileSystemReader and get_state_dict and saver

    def test_neither(self):
        raise ValueError("a reason")
"""
DIFFERS = f"{SUITE}::Test::test_torchs_own"


@pytest.fixture
def pytorch(tmp_path: Path) -> Path:
    (tmp_path / "pytorch" / FOLDER).mkdir(parents=True)
    (tmp_path / "pytorch" / FOLDER / SUITE).write_text(TESTS)
    return tmp_path / "pytorch"


def test_only_the_imports_are_switched(pytorch: Path, tmp_path: Path) -> None:
    for ours in (False, True):
        copy_tests(pytorch, (SUITE,), tmp_path / str(ours), ours=ours)
    stock, switched = ((tmp_path / side / SUITE).read_text().splitlines() for side in ("False", "True"))
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


def test_what_goes_to_a_checkpoint_is_found_through_helpers(pytorch: Path) -> None:
    assert callers(pytorch / FOLDER / SUITE) == {"test_both", "saved", "test_torchs_own"}


def test_both_sides_run_and_a_difference_needs_a_reason(
    pytorch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = tmp_path / "expected.toml"
    expected.write_text("difference = []")
    words = ["--pytorch", str(pytorch), "--suite", SUITE, "--expected", str(expected)]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert f"{SUITE:38}     3     2         2     1        1" in said
    assert f"Not expected to differ: {DIFFERS}: FileNotFoundError" in said
    expected.write_text(f'[[difference]]\ntest = "{DIFFERS}"\nreason = "a file of torch DCP"')
    assert main(words) == 0
    assert "    Test::test_torchs_own: a file of torch DCP\n" in capsys.readouterr().out


def test_a_difference_that_is_gone_fails_and_one_that_did_not_run_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    passed = {"a.py::A::x": Ended("passed"), "a.py::A::y": Ended("passed")}
    assert conclude(passed, passed, {*passed}, {}) == 0
    assert conclude(passed, passed, {*passed}, {"b.py::B::z": "GPUs alone"}) == 0
    assert conclude(passed, passed, {*passed}, {"a.py::A::x": "once"}) == 1
    assert "Expected to differ, and does not: a.py::A::x" in capsys.readouterr().out
    assert conclude(passed, {"a.py::A::x": Ended("passed")}, {*passed}, {}) == 1, "a lost test differs"
    assert "A::y: NOT EXPECTED: it did not run" in row(
        "a.py", passed, {"a.py::A::x": Ended("passed")}, set(), {}
    )


def test_without_a_copy_it_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH", raising=False)
    for words in ([], ["--pytorch", str(tmp_path)]):
        assert main(words) == 2
        assert "git clone --depth 1" in capsys.readouterr().err
    (tmp_path / FOLDER).mkdir(parents=True)
    with pytest.raises(SystemExit):
        main(["--pytorch", str(tmp_path), "--suite", "test_nothing.py"])
    assert "test_nothing.py is not in" in capsys.readouterr().err
    assert len(SUITES) == len({*SUITES})
