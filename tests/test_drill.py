"""`python -m drill`: a scenario really runs on both sides, and an expectation that does not hold fails it."""

from __future__ import annotations

from pathlib import Path

import pytest

from drill import exits, late_group, must_go_on, picture, spans
from drill.__main__ import main
from drill.must_go_on import Outcome
from drill.page import SHORT, document, front, with_front
from drill.results import read_results
from drill.scenarios import SCENARIOS
from drill.torchrun import Ended

NAME = "ms-swift-9486"


def test_one_scenario_is_measured_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "results" / "drill.json", tmp_path / "drill.md"
    assert main(["--only", NAME, "--json", str(file), "--page", str(page)]) == 0, capsys.readouterr().err
    results = read_results(file)
    for row in results.rows:
        assert row.stock.named == ()
        assert row.stock.seconds >= 0.9 * late_group.STOCK_S
        assert row.ours.named == (late_group.STUCK,)
    assert page.read_text() == document(results)
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ms-swift 9486")]
    for line, row in zip(lines, results.rows, strict=True):
        assert f"| {len(row.checks)} of {len(row.checks)} |" in line
        assert "Timed out waiting" in line
        assert "| rank 3 |" in line


@pytest.mark.wide
def test_an_expectation_that_does_not_hold_fails_the_drill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCENARIOS, NAME, lambda: late_group.run(stuck=None))  # stock then trains, too
    page = tmp_path / "drill.md"
    assert main(["--only", NAME, "--page", str(page)]) == 1
    assert "not so: stock: the partner of the stopped rank waits" in capsys.readouterr().err
    assert "**not so**" in page.read_text()


@pytest.mark.wide
@pytest.mark.parametrize(
    "jobs",
    [("late", "emergency"), pytest.param(("late", "exports"), marks=pytest.mark.soak)],
    ids=" and ".join,
)
def test_healthy_jobs_go_on_under_torchrun_as_they_do_in_stock(jobs: tuple[str, ...]) -> None:
    """Late, in a handler of a signal, and alone at the end; the seconds are the drill's to judge."""
    rows = must_go_on.run(jobs)
    assert [check for row in rows for check in row.checks[:2] if not check.held] == [], rows
    assert "has waited 1 s for rank 1" in rows[0].ours.message


def test_a_job_that_does_not_end_as_in_stock_is_seen() -> None:
    said = "found: 4.0\n" * 4
    good = Outcome([Ended(0, dict.fromkeys(range(4), 0), 9.0, said, ())], [["model", "terminal"]])
    assert must_go_on.row("writes", good, good).failed == []
    for bad, failures in (
        (good._replace(ended=[good.ended[0]._replace(code=1, codes={0: 1, 1: -15, 2: -15, 3: -15})]), 1),
        (good._replace(files=[["model.part", "terminal"]]), 1),
        (good._replace(ended=[good.ended[0]._replace(said=said.replace("4.0", "3.0"))]), 1),
        (good._replace(ended=[good.ended[0]._replace(seconds=15.0)]), 1),
        (good._replace(ended=[good.ended[0]._replace(said="", seconds=15.0)]), 2),
    ):
        assert len(must_go_on.row("writes", good, bad).failed) == failures


def test_who_is_blamed_on_a_terminal() -> None:
    assert exits.blamed("[rank2]: ValueError: the loss of rank 2 is not a number") == ()
    assert exits.blamed("rank 0 ends: The session ended because of rank 3 (host a)\nrank 3 ends: x") == (3,)
    assert exits.blamed("[rank0]: holdfast: not in that collective: rank 1 (a): b; rank 2 (c): d") == (1, 2)


def test_the_front_page_has_what_was_measured() -> None:
    root = Path(__file__).parents[1]
    results = read_results(root / "drill" / "results" / "drill.json")
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert with_front(readme, results) == readme
    assert len(front(results)) == 4 + len(SHORT)
    assert (root / "docs" / "drill.md").read_text(encoding="utf-8") == document(results)


def test_the_picture_of_the_front_page_is_what_was_measured() -> None:
    measured = picture.read()
    assert picture.SVG.read_text(encoding="utf-8") == picture.draw(measured), "run: python -m drill.picture"
    for run in measured.runs:
        in_collectives = {rank.rank for rank in run.ranks if any(s.does == "collective" for s in rank.spans)}
        came = {rank.rank for rank in run.ranks}
        assert came == set(range(spans.WORLD)) - ({spans.AWAY} if run.away else set())
        assert in_collectives == (set() if run.ours else came)
        assert all(bool(rank.error) == run.away for rank in run.ranks)
        assert all((f"rank {spans.AWAY} (" in rank.error) == (run.away and run.ours) for rank in run.ranks)
