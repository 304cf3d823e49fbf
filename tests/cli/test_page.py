"""`holdfast inspect --html`: the page is small at any size, shows what is there, and runs nothing of a checkpoint.

Those that need a browser look for a Chromium (tests/support/browser.py), and are skipped without one.
"""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast._core.format.index import Index
from holdfast._core.io.index_file import open_index
from holdfast._core.store.local import open_store
from holdfast._tools.checkpoints.page import COLUMNS, NODES, page_of
from tests.cli import pages
from tests.cli.conftest import Run, flip
from tests.support.browser import Browser, data_of, in_browser

ALONE = holdfast.Job(no_dist=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.small_run(tmp_path_factory.mktemp("pages") / "run", {pages.HOSTILE: torch.zeros(3)})


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pages.large_index(tmp_path_factory.mktemp("pages") / "step-00024000")


def written(data: dict[str, Any], name: str) -> list[int]:
    """The strip of a name, which is a path through the tree."""
    import base64

    strips = np.frombuffer(base64.b64decode(data["strips"]), np.uint8).reshape(-1, len(data["written"]))
    at, left = 0, name
    while left:
        at, left = next(
            (i, left[len(node[1]) :].removeprefix("."))
            for i, node in enumerate(data["nodes"])
            if i and node[0] == at and (left == node[1] or left.startswith(node[1] + "."))
        )
    shares: list[int] = strips[data["nodes"][at][6]].tolist()
    return shares


def wrote(index: Index, name: str) -> set[int]:
    columns = index.select(index.find([name]))
    return set(columns.file_rank[columns.file].tolist())


def test_the_page_of_a_run_has_its_steps_and_why_they_stay(small: Path) -> None:
    data = data_of(page_of(small, time.time()))
    assert [(row[0], row[5]) for row in data["run"]["steps"]] == [
        (1200, "one of the newest 3"),
        (1100, "one of the newest 3"),
        (1000, "one of the newest 3, every 500 steps"),
        (700, "best loss"),
        (500, "every 500 steps"),
    ]
    assert data["run"]["rules"].endswith("the newest 3, one every 500 steps, the one with the lowest loss.")
    sizes = dict(data["run"]["sizes"])
    assert sizes[1200] > sizes[500]
    on_disk = sum(path.stat().st_size for path in small.rglob("*.safetensors"))
    assert data["run"]["together"][-1] == [1200, on_disk]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}", data["run"]["steps"][0][3])
    assert data["checkpoint"]["title"].startswith("Step 1200, committed ")


def test_what_each_rank_wrote_is_that_of_the_index(small: Path) -> None:
    data = data_of(page_of(small / "step-00001200", time.time()))["checkpoint"]
    assert (data["ranks"], data["width"]) == (8, 1)
    with open_index(open_store(small / "step-00001200")) as index:
        for name in index.names():
            if name.startswith(("model.", "optimizer.")):
                shares = written(data, name)
                assert {rank for rank, share in enumerate(shares) if share} == wrote(index, name), name
        chunks = index.select()
        nbytes, rank = chunks.chunk_bytes(), chunks.file_rank[chunks.file]
        assert data["written"] == [int(nbytes[rank == one].sum()) for one in range(8)]
    assert data["nodes"][0][1] == "all"
    layers = next(i for i, node in enumerate(data["nodes"]) if node[1] == "layers")
    assert [node[1] for node in data["nodes"] if node[0] == layers] == list(map(str, range(14)))
    assert data["nodes"][0][4] == sum(total[3] for total in data["totals"])


def test_a_thousand_ranks_and_five_thousand_tensors_are_a_small_page(large: Path) -> None:
    page = page_of(large, time.time())
    assert len(page.encode()) < 1_000_000
    data = data_of(page)["checkpoint"]
    assert (data["ranks"], data["width"], len(data["written"])) == (1024, 8, COLUMNS)
    assert len(data["nodes"]) > 5000
    expert = written(data, "model.decoder.layers.17.mlp.experts.linear_fc1.weight5")
    with open_index(open_store(large)) as index:
        ranks = wrote(index, "model.decoder.layers.17.mlp.experts.linear_fc1.weight5")
    assert {column for column, share in enumerate(expert) if share} == {rank // 8 for rank in ranks}


def test_more_names_than_a_page_holds_are_in_the_sums(tmp_path: Path) -> None:
    state = {f"{'abc'[i % 3]}.{i}.w": torch.zeros(1) for i in range(3 * NODES)} | {"few.w": torch.zeros(5)}
    holdfast.save(state, tmp_path / "c", job=ALONE)
    page = page_of(tmp_path / "c", time.time())
    data = data_of(page)["checkpoint"]
    assert len(data["nodes"]) <= NODES
    assert data["nodes"][0][3:5] == [3 * NODES + 1, 3 * NODES + 5]
    assert data["cut"].startswith("18,000 names")
    assert len(page) < 2_000_000


def test_forged_numbers_make_no_large_page(large: Path, tmp_path: Path) -> None:
    from holdfast._core.format.index_layout import encode

    with open_index(open_store(large)) as index:
        columns = index.select()
    columns.file_rank = columns.file_rank.copy()
    columns.file_rank[0], columns.file_rank[1] = -5, 2**31 - 1
    about = {
        "step": "x",
        "ranks": 10**40,
        "created": "soon",
        "metrics": [[1]],
        "retention": {"keep": "x"},
        "grid": "y" * 5000,
    }
    (tmp_path / "index.safetensors").write_bytes(encode(columns, about))
    page = page_of(tmp_path, time.time())
    data = data_of(page)["checkpoint"]
    assert data["ranks"] == 2**31
    assert len(data["written"]) <= COLUMNS
    assert len(page) < 2_000_000


def test_nothing_in_a_name_ends_the_data(small: Path) -> None:
    page = page_of(small, time.time())
    assert page.count("<script") == page.count("</script>") == 2
    assert "onerror" in page
    assert "<img" not in page


def test_a_damaged_newest_step_leaves_the_list_of_steps(small: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(small, tmp_path / "run"))
    flip(run / "step-00001200" / "index.safetensors", -100)
    data = data_of(page_of(run, time.time()))
    assert data["checkpoint"] is None
    assert data["run"]["steps"][0][1].startswith("damaged: ")


def test_why_each_step_of_a_run_stays_or_goes(small: Path, tmp_path: Path, run: Run) -> None:
    folder = Path(shutil.copytree(small, tmp_path / "run"))
    for step in (650, 800):  # left by a run with other rules
        shutil.copytree(small / "step-00001100", folder / f"step-{step:08d}")
    shutil.copytree(small / "step-00001100", folder / "step-850")
    (folder / "step-00000860").symlink_to(small / "step-00001100")
    (folder / "iter_0000870").mkdir()
    (folder / "iter_0000870" / ".metadata").write_bytes(b"x")
    (folder / "step-00000880" / "data").mkdir(parents=True)
    flip(folder / "step-00000500" / "index.safetensors", -100)
    result = run("inspect", folder)
    assert result.stderr == ""
    rows = {int(line.split()[0]): line for line in result.stdout.splitlines()[3:-1]}
    others = "never removed: a link, or made or named by others"
    expected = {650: "goes at the next save", 800: "goes at the next save", 700: "best loss"}
    expected |= dict.fromkeys((850, 860, 870), others) | {880: "not committed", 1100: "one of the newest 3"}
    for step, words in expected.items():
        assert words in rows[step], rows[step]
    assert "not committed" in rows[880]
    assert not any(word in rows[880] + rows[500] for word in ("goes", "never", "newest"))
    with holdfast.Checkpoints(
        folder, keep=3, keep_every=500, best="loss", best_mode="min", asynchronous=False, job=ALONE
    ) as checkpoints:
        checkpoints.save(1000, {"w": torch.zeros(1)}, metrics={"loss": 1.69}, expected=None)
        gone = set(rows) - {880} - set(checkpoints.steps())
    assert gone == {650, 800}


def test_a_step_that_is_read_now_says_so(small: Path, run: Run) -> None:
    from holdfast._core.store.pins import Pin

    pin = Pin(open_store(small / "step-00000700"))
    try:
        shown = run("inspect", small).stdout
    finally:
        pin.close()
    assert [line.split()[0] for line in shown.splitlines() if "is being read" in line] == ["700"]
    assert "is being read" not in run("inspect", small).stdout


def test_the_command_writes_the_page(small: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "page.html"
    assert run("inspect", small, "--html", out).stdout.startswith(f"{out}: ")
    assert out.read_text().startswith("<!doctype html>")
    for arguments, code, words in (
        (["--html", tmp_path], 2, "can't be written"),
        (["--html", tmp_path / "no" / "page.html"], 2, "can't be written"),
        (["--html", out, "--json"], 2, "--html shows everything"),
        (["--html", out, "--name", "x"], 2, "--html shows everything"),
    ):
        result = run("inspect", small, *arguments)
        assert (result.exit_code, words in result.stderr) == (code, True), result.stderr


# -- in a browser ------------------------------------------------------------------------------------


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_a_run_of_eight_ranks(small: Path, tmp_path: Path, scheme: str) -> None:
    with Browser() as browser:
        browser.show(page_of(small, time.time()), tmp_path / "page.html", scheme)
        text = browser.evaluate("document.body.innerText")
        for piece in (
            "one of the newest 3, every 500 steps",
            "best loss",
            "Step 1200",
            "By module and dtype",
        ):
            assert piece in text
        # The hostile name is there, as a text, and has done nothing.
        assert pages.HOSTILE in browser.evaluate("document.querySelector('.tree').textContent")
        assert browser.evaluate("document.title") == "run"
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert browser.evaluate("document.querySelectorAll('rect').length") == 8
        light = browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(247, 248, 250)"
        assert light == (scheme == "light")
        # A rank that wrote all of a tensor, and one that wrote nothing: what a pointer at them reads.
        read = """(x => { const rows = [...document.querySelectorAll('.row')];
            const strip = rows.find(row => row.textContent.includes('embedding')).querySelector('.strip');
            const place = strip.getBoundingClientRect();
            strip.dispatchEvent(new MouseEvent('mousemove', {clientX: place.left + place.width * x}));
            return document.querySelector('.read').textContent; })"""
        assert browser.evaluate(f"{read}(0.01)") == "rank 0 wrote about 256 KiB of model.embedding.weight"
        assert browser.evaluate(f"{read}(0.99)") == "rank 7 wrote nothing of model.embedding.weight"


@in_browser
def test_a_browser_shows_a_thousand_ranks_with_few_elements(large: Path, tmp_path: Path) -> None:
    with Browser() as browser:
        browser.show(page_of(large, time.time()), tmp_path / "page.html")
        assert browser.evaluate("document.querySelectorAll('*').length") < 3000
        assert browser.evaluate("document.querySelectorAll('rect').length") == COLUMNS
        layers = """[...document.querySelectorAll('.row .name')].map(one => one.firstChild.childNodes[1]?.data?.trim())
            .filter(one => /^[0-9]+$/.test(one))"""
        assert browser.evaluate(layers) == list(map(str, range(64)))  # layer 10 after layer 9
        toggle = """(name => { [...document.querySelectorAll('button')].find(one => one.textContent.includes(name)).click();
            return document.querySelectorAll('.row').length; })"""
        before = browser.evaluate("document.querySelectorAll('.row').length")
        assert browser.evaluate(f"{toggle}('▸17 ')") == before + 3
        assert browser.evaluate(f"{toggle}('mlp.experts')") == before + 3 + 36
        assert browser.evaluate(f"{toggle}('▸17 ')") == before


@in_browser
def test_a_browser_runs_no_other_script_in_the_page(small: Path, tmp_path: Path) -> None:
    """Should a name ever get into the markup."""
    page = page_of(small, time.time())
    broken = page.replace("<main>", "<main><script>document.title='owned'</script>" + pages.HOSTILE)
    assert broken != page
    (tmp_path / "page.html").write_text(broken)
    with Browser() as browser:
        browser.open(tmp_path / "page.html")
        assert browser.evaluate("document.title") == "run"
        refused = [entry["entry"]["text"] for entry in browser.of("Log.entryAdded")]
        assert any("Content Security Policy" in text for text in refused)
