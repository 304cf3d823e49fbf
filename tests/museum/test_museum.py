"""What the museum's exhibits get: right as often as the page prints, and never wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._watch.verdict import CLASSES
from tests.docs.pages import table, text
from tests.museum.museum import LEVELS, Exhibit, diagnosed, exhibits, judged, kept_aside, score
from tests.watch.faults import FAULTS, SILENT


@pytest.mark.parametrize("exhibit", exhibits(), ids=lambda exhibit: exhibit.name)
def test_no_exhibit_gets_a_wrong_answer(exhibit: Exhibit, tmp_path: Path) -> None:
    """At no level of evidence; and each observation names a place that exists."""
    for level in LEVELS:
        found = diagnosed(exhibit, level, tmp_path)
        assert judged(exhibit, found) != "wrong", (level, found)
        if found is not None and found.verdict is not None:
            assert found.verdict.seen
            assert all(one.source is not None for one in found.verdict.seen)
        elif found is not None:
            assert found.collect


def test_answers_are_those_of_the_page(tmp_path: Path) -> None:
    """The floor: 90 % with all evidence, and of the exhibits that no rule was written for, two thirds."""
    open_ones = tuple(one for one in exhibits() if one not in kept_aside())
    rows = {
        (title, level): score(some, level, tmp_path / title)
        for title, some in (
            ("all", exhibits()),
            ("rules were written for", open_ones),
            ("kept aside", kept_aside()),
        )
        for level in LEVELS
    }
    shown = [
        [title, level, f"{one.right} of {one.of}", str(one.partly), str(one.silent), str(one.wrong)]
        for (title, level), one in rows.items()
    ]
    assert table(text("docs/diagnose.md"), "museum") == shown
    best = rows["all", "stacks"]
    assert best.right >= 0.9 * best.of
    assert rows["kept aside", "stacks"].right >= 0.66 * rows["kept aside", "stacks"].of


def test_exhibits_are_machine_output_and_facts() -> None:
    assert len(exhibits()) == 38
    assert {exhibit.kind for exhibit in exhibits()} <= {*CLASSES, "unknown"}
    for exhibit in exhibits():
        assert exhibit.url.startswith("https://github.com/")
        assert exhibit.decided_by in (*LEVELS, "nothing")
        assert exhibit.sections
    checked = [exhibit for exhibit in exhibits() if exhibit.checked != "no"]
    assert f"{len(checked)} of the threads were looked at again" in " ".join(text("docs/diagnose.md").split())


def test_exhibits_that_are_replayed_get_their_class() -> None:
    """What the roll call says of each fault over real ranks, `tests.watch.test_faults` keeps."""
    kinds = {fault.job: fault.kind for fault in FAULTS if fault.job not in SILENT}
    replayed = [exhibit for exhibit in exhibits() if not exhibit.replay.startswith("no, ")]
    assert {one.name: kinds[one.replay] for one in replayed} == {one.name: one.kind for one in replayed}
    assert f"{len(replayed)} of the 38 are replayed" in " ".join(text("docs/diagnose.md").split())


def test_a_wrong_answer_would_be_seen(tmp_path: Path) -> None:
    by_name = {exhibit.name: exhibit for exhibit in exhibits()}
    exhibit = by_name["32-ms-swift-10183-buffers"]
    found = diagnosed(exhibit, "log", tmp_path)
    assert judged(exhibit, found) == "right"
    assert judged(exhibit._replace(ranks=(3,)), found) == "wrong"
    assert judged(exhibit._replace(ranks=None), found) == "wrong"
    assert judged(exhibit._replace(kind="late"), found) == "wrong"
    assert judged(exhibit._replace(decided_by="nothing"), None) == "right"
