"""What the museum's exhibits get: as often right as the page prints, and never wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import table, text
from tests.museum.museum import LEVELS, Exhibit, diagnosed, exhibits, judged, peer_names, scores
from tests.watch.faults import FAULTS


@pytest.mark.parametrize("exhibit", exhibits(), ids=lambda exhibit: exhibit.name)
def test_no_exhibit_gets_a_wrong_answer(exhibit: Exhibit, tmp_path: Path) -> None:
    """At no level of evidence."""
    for level in LEVELS:
        found = diagnosed(exhibit, level, tmp_path)
        assert "wrong" not in judged(exhibit, found), (level, found)
        if found is not None and found.who is None and found.why is None:
            assert found.collect


def test_answers_are_those_of_the_page(tmp_path: Path) -> None:
    """The floor: who in at least 30 of the exhibits, with all evidence."""
    rows = scores(tmp_path)
    assert table(text("docs/diagnose.md"), "museum") == rows
    right = {row[0]: int(row[1].split(" of ")[0]) for row in rows}
    assert right["stacks"] >= 30


def test_torchs_analysis_of_the_same_counts_is_told(tmp_path: Path) -> None:
    named = peer_names(tmp_path)
    guilty = [exhibit for exhibit in named if exhibit.ranks]
    right = sum(named[exhibit] == exhibit.ranks for exhibit in guilty)
    said = f"the {len(named)} exhibits that have some, `torchfrtrace` names the ranks in {right} of {len(guilty)}"
    assert said in " ".join(text("docs/diagnose.md").split())


def test_exhibits_are_machine_output_and_facts() -> None:
    assert len(exhibits()) == 38
    for exhibit in exhibits():
        assert exhibit.url.startswith("https://github.com/")
        assert exhibit.decided_by in (*LEVELS, "nothing")
        assert exhibit.sections
    checked = [exhibit for exhibit in exhibits() if exhibit.checked != "no"]
    assert len(checked) == 38


def test_exhibits_that_are_replayed_name_a_fault() -> None:
    """What the roll call says of each fault over real ranks, `tests.watch.test_faults` keeps."""
    replayed = [exhibit for exhibit in exhibits() if not exhibit.replay.startswith("no, ")]
    assert {one.replay for one in replayed} <= {fault.job for fault in FAULTS}
    assert f"{len(replayed)} of the 38 are replayed" in " ".join(text("docs/diagnose.md").split())


def test_a_wrong_answer_would_be_seen(tmp_path: Path) -> None:
    by_name = {exhibit.name: exhibit for exhibit in exhibits()}
    exhibit = by_name["32-ms-swift-10183-buffers"]
    found = diagnosed(exhibit, "log", tmp_path)
    assert judged(exhibit, found) == ("right", "right")
    assert judged(exhibit._replace(ranks=(3,)), found) == ("wrong", "right")
    assert judged(exhibit._replace(kind="late"), found) == ("right", "wrong")
    assert judged(exhibit._replace(decided_by="nothing", ranks=None, kind="late"), None) == ("right", "right")
