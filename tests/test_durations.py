"""What a run of the suite says of its own time."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.support.durations import FILES, slowest_files


def report(nodeid: str, when: Literal["setup", "call", "teardown"], seconds: float) -> pytest.TestReport:
    return pytest.TestReport(nodeid, ("", 0, ""), {}, "passed", None, when, duration=seconds)


def test_the_time_of_a_file_is_that_of_its_tests_and_their_fixtures() -> None:
    reports = [
        report("tests/a.py::one", "setup", 1.0),
        report("tests/b.py::one[x::y]", "call", 2.5),
        report("tests/a.py::one", "call", 0.25),
        report("tests/a.py::two", "teardown", 2.0),
        report("tests/c.py::one", "call", 0.1),
    ]
    assert [line.split() for line in slowest_files(reports, 0.2)] == [
        ["3.25s", "2", "tests", "tests/a.py"],
        ["2.50s", "1", "tests", "tests/b.py"],
        ["5.85s", "4", "tests", "in", "3", "files"],
    ]
    assert (
        len(list(slowest_files([report(f"{at}.py::x", "call", 1) for at in range(FILES + 5)], 0)))
        == FILES + 1
    )
