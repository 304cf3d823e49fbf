"""The page of benchmarks, the claims that rest on it, and the tools that make it."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import before_after, peers
from bench.before_after import Sides, compare
from bench.claims import CLAIMS, Claim, broken, rows_of
from bench.machine import file_system
from bench.rows import Results, read_results
from bench.table import ORDER, document
from tests.docs.pages import ROOT, text


@pytest.fixture(scope="module")
def results() -> list[Results]:
    return [read_results(path) for path in sorted((ROOT / "bench/results").glob("*.json"))]


def test_the_page_is_what_the_results_say(results: list[Results]) -> None:
    assert text("docs/benchmarks.md") == document(results)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.page}: {claim.words}")
def test_what_pages_say_about_speed_was_measured(claim: Claim, results: list[Results]) -> None:
    assert claim.words in re.sub(r"\s+", " ", text(claim.page))
    assert all(row.ours is not None for row in rows_of(claim, results))
    assert rows_of(claim, results)


def test_a_claim_that_the_results_contradict_is_named(results: list[Results]) -> None:
    assert not list(broken(results))
    claims = [claim for claim in CLAIMS if claim.least is not None]
    assert len(claims) >= 8
    for claim in claims:
        worse = [
            replace(one, rows=[replace(row, ratio=float(claim.least or 0) * 0.99) for row in one.rows])
            if one.bench == claim.bench
            else one
            for one in results
        ]
        said = [
            sentence for sentence in broken(worse) if f'{claim.page} says "{claim.words}", but' in sentence
        ]
        assert any(repr(row.metric) in sentence for row in rows_of(claim, results) for sentence in said)
        assert all("and the words need" in sentence for sentence in said)
        without = [one for one in results if one.bench != claim.bench]
        assert any(f'{claim.words}", but {claim.bench} has no row' in one for one in broken(without))


def test_every_benchmark_is_run_by_make_bench_and_shown() -> None:
    run = re.search(r"^BENCHES := (.*)$", text("Makefile"), re.MULTILINE)
    assert run is not None
    assert set(run[1].split()) == set(ORDER)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    limit=st.integers(1, 64),
    offset=st.integers(0, 9),
)
def test_batches_hold_all_bytes_in_order_and_no_more_than_the_limit(
    lengths: list[int], limit: int, offset: int
) -> None:
    data = os.urandom(sum(lengths))
    views, start = [], 0
    for length in lengths:
        views.append(memoryview(data)[start : start + length])
        start += length
    found, expected = b"", offset
    for batch in peers.batched(views, limit, offset):
        some = b"".join(batch.buffers)
        assert 0 < len(some) <= limit
        assert len(batch.buffers) <= peers.IOV_BATCH
        assert batch.offset == expected
        found, expected = found + some, expected + len(some)
    assert found == data


def test_a_batch_has_no_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    written = [memoryview(bytes([at % 251])) for at in range(peers.IOV_BATCH * 2 + 1)]
    batches = peers.batched(written, 1 << 20)
    assert [len(batch.buffers) for batch in batches] == [peers.IOV_BATCH, peers.IOV_BATCH, 1]
    peers.write_all(tmp_path / "f", batches)
    back = bytearray(len(written))
    peers.read_all(tmp_path / "f", peers.batched([memoryview(back)], 100))
    assert bytes(back) == b"".join(written) == (tmp_path / "f").read_bytes()


def test_before_and_after_are_medians_of_rounds_and_peers_show_the_drift() -> None:
    def run(ours: float, peer: float, other: float) -> before_after.Found:
        return {
            "save / DCP": Sides(ours, peer, ours * 10, "s"),
            "save / floor": Sides(ours, other, ours * 10, "s"),
            "save / target": Sides(ours, 40.0, ours * 10, "s"),
            "load / DCP": Sides(None, peer, None, "s"),
        }

    rounds = [(run(2.0, 1.0, 3.0), run(1.0, 1.1, 3.0)), (run(4.0, 1.0, 3.0), run(1.0, 1.3, 3.3))]
    (found,) = compare("x", rounds)
    assert found.metric == "save / DCP, floor, target"
    assert (found.before, found.after, found.first_before) == (3.0, 1.0, 30.0)
    assert found.change == pytest.approx(1 / 3)
    assert (found.least, found.most) == (0.25, 0.5)
    assert found.peer == pytest.approx(1.1)
    assert compare("x", []) == []


def test_a_commit_gets_a_tree_which_goes_afterwards() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    with before_after.source_tree("HEAD") as tree:
        assert (tree / "src/holdfast/__init__.py").is_file()
        before_after.check(tree)
    assert not tree.exists()
    with pytest.raises(RuntimeError, match="is not in"):
        before_after.check(Path(ROOT, "docs"))


def test_the_file_system_of_a_folder_is_named() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/dev/shm")) == "tmpfs"
