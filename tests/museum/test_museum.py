"""What the museum's exhibits get: right as often as the page prints, and never wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._watch.verdict import CLASSES
from tests.docs.pages import table, text
from tests.museum.museum import LEVELS, Exhibit, diagnosed, exhibits, judged, peer_names, scores
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
    rows = scores(tmp_path)
    assert table(text("docs/diagnose.md"), "museum") == rows
    right = {(row[0], row[1]): [int(number) for number in row[2].split(" of ")] for row in rows}
    best, aside = right["all", "stacks"], right["kept aside", "stacks"]
    assert best[0] >= 0.9 * best[1]
    assert aside[0] >= 0.66 * aside[1]


def test_torchs_analysis_of_the_same_counts_is_told(tmp_path: Path) -> None:
    named = peer_names(tmp_path)
    guilty = [exhibit for exhibit in named if exhibit.ranks]
    right = sum(named[exhibit] == exhibit.ranks for exhibit in guilty)
    said = f"the {len(named)} exhibits that have some, `torchfrtrace` names the ranks to blame in {right} of {len(guilty)}"
    assert said in " ".join(text("docs/diagnose.md").split())


def test_exhibits_are_machine_output_and_facts() -> None:
    assert len(exhibits()) == 38
    assert {exhibit.kind for exhibit in exhibits()} <= {*CLASSES, "unknown"}
    for exhibit in exhibits():
        assert exhibit.url.startswith("https://github.com/")
        assert exhibit.decided_by in (*LEVELS, "nothing")
        assert exhibit.sections
    checked = [exhibit for exhibit in exhibits() if exhibit.checked != "no"]
    assert len(checked) == 38


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
