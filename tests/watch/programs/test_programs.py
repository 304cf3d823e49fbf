"""Two tables of programs: jobs that go on, which no sentence may blame, and jobs that hang, of which `who` is right in
at least 34 of 40, and `why` is wrong in none. They were written before the rules, and without a look at them."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest

from holdfast._watch.diagnose import diagnose
from tests.docs.pages import text
from tests.watch.programs import judging
from tests.watch.programs.judging import WHYS, label
from tests.watch.programs.runner import HERE, WORLD, programs, run

PYTHONS = sorted(path.stem for path in (HERE / "recorded").glob("*.zip"))
LEAST = 34 / 40
judged = cache(judging.judged)


@pytest.mark.parametrize("python", PYTHONS)
def test_no_healthy_program_gets_a_cause(python: str) -> None:
    healthy = [one for one in judged(HERE / "recorded" / f"{python}.zip") if one.kind == "healthy"]
    assert len(healthy) >= 30
    assert [str(one) for one in healthy if one.said_why] == []


@pytest.mark.parametrize("python", PYTHONS)
def test_who_is_right_of_sick_programs_and_why_is_never_wrong(python: str) -> None:
    sick = [one for one in judged(HERE / "recorded" / f"{python}.zip") if one.kind == "sick"]
    assert len(sick) >= 40
    assert [str(one) for one in sick if one.is_why_wrong] == []
    right = sum(one.is_who_right for one in sick)
    assert right >= math.ceil(LEAST * len(sick)), [str(one) for one in sick if not one.is_who_right]


def test_each_program_says_what_is_right() -> None:
    for script in programs("sick"):
        who, why = label(script)
        assert set(who) <= set(range(WORLD)), script.stem
        assert why in WHYS, script.stem


def test_the_page_has_the_scores() -> None:
    """docs/diagnose.md says how often each table is right, on each Python that was recorded."""
    page = " ".join(text("docs/diagnose.md").split())
    for python in PYTHONS:
        every = judged(HERE / "recorded" / f"{python}.zip")
        sick = [one for one in every if one.kind == "sick"]
        healthy = sum(one.kind == "healthy" for one in every)
        causes = sum(bool(one.said_why) and not one.is_why_wrong for one in sick)
        right = sum(one.is_who_right for one in sick)
        grouped = sum(one.grouped == one.who for one in sick)
        row = f"| {python} | {healthy} | 0 | {len(sick)} | {right} | {grouped} | {causes} | 0 |"
        assert row in page


@pytest.mark.soak
@pytest.mark.parametrize("script", programs("healthy"), ids=lambda path: path.stem)
def test_a_healthy_program_goes_on_and_gets_no_cause(script: Path, tmp_path: Path) -> None:
    ran = run(script, tmp_path)
    assert ran.is_healthy, ran.output
    assert ran.answered == tuple(range(WORLD))
    assert diagnose(ran.evidence).why is None


@pytest.mark.soak
@pytest.mark.parametrize("script", programs("sick"), ids=lambda path: path.stem)
def test_a_sick_program_gets_no_wrong_cause(script: Path, tmp_path: Path) -> None:
    found = diagnose(run(script, tmp_path).evidence)
    assert found.why is None or found.why.kind in WHYS[label(script)[1]], found
