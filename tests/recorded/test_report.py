"""`holdfast report` and `holdfast watch`: of a job of eight real ranks, of a thousand simulated ones, and of files
that nobody can have written.

Those that need a browser look for a Chromium (tests/support/browser.py), and are skipped without one.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from holdfast._core.process.recording import BEGUN, ENDED, EVENTS, EventLine
from holdfast._tools.cli import cli
from holdfast._tools.recorded import calls
from holdfast._tools.recorded.live import Looker, State
from holdfast._tools.recorded.report import RecordedRun, facts, page_of
from holdfast._tools.recorded.trace import write_trace
from holdfast.errors import BadInput
from tests.recorded.late_job import LATE, recorded
from tests.recorded.runs import GONE, HOSTILE, SLOW, STUCK, simulated
from tests.support.browser import Browser, data_of, in_browser
from tests.support.cpu_time import cpu_seconds
from tests.support.processes import ProcessWorld

OTHERS = "ranks 0-2, 4-7"
LATE_IS_NAMED = (
    r"ranks 0-2, 4-7 wait in all_reduce #\d+ of group 1:train for \d+ s; rank 3 has not come to it"
)


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="holdfast")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[State]]:
    """A run of eight ranks, and what `watch` saw of it meanwhile."""
    folder, states = tmp_path_factory.mktemp("real") / "run", []
    folder.mkdir()
    with ProcessWorld(8) as world:
        world.start(recorded, str(folder))
        looker, ends = Looker(str(folder)), time.monotonic() + 60
        while time.monotonic() < ends and not world.collect_some(0.3):
            states.append(looker.look(time.time()))
        for result in world.collect(30):
            result.get()
    return folder, states


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("large") / "run")


# -- eight real ranks -----------------------------------------------------------------------------------------


def test_watch_tells_who_is_behind_while_the_job_runs(real: tuple[Path, list[State]]) -> None:
    _, states = real
    # On a busy machine it may also be the last in another call.
    late = [state for state in states if state.behind == (LATE,)]
    assert all(re.match(r"(save|load) of step \d, for \d+ s; behind: rank 3: ", state.call) for state in late)
    behind = [state for state in late if state.call.startswith("save of step 2, ")]
    assert behind
    assert behind[-1].last_save.startswith("step 1, ")
    assert re.search(r": \d+\.\d s, 32 MiB, [\d.]+ [MG]B/s$", behind[-1].last_save)
    waits = [doing for state in behind for doing in state.doing if doing.ranks == OTHERS]
    assert {doing.does for doing in waits} <= {
        "in no call of Holdfast",
        "save entered",
        "save assigning",
        "save writing",
        "save written",
    }
    works = {(one.ranks, one.phase) for state in states for one in state.doing}
    assert {("rank 3", "compute metrics"), (OTHERS, "eval")} <= works


def test_watch_tells_of_the_roll_call_and_its_end(real: tuple[Path, list[State]]) -> None:
    folder, states = real
    told = [state.roll_calls[0] for state in states if state.roll_calls]
    assert any("not known to be over" in text or "have answered" in text for text in told)
    end = Looker(str(folder)).look(time.time())
    assert re.search(rf", (?:is over|has ended[^:]*): {LATE_IS_NAMED}", end.roll_calls[0])
    assert (end.ranks, end.world, end.call, end.behind) == (8, 8, "", ())


def test_the_calls_of_the_report_are_those_of_the_job(real: tuple[Path, list[State]]) -> None:
    found = facts(RecordedRun(str(real[0])), time.time())
    assert (found["title"], found["ranks"], found["world"], found["skipped"]) == ("run", 8, 8, 0)
    calls = {call["title"]: call for call in found["calls"] if call["title"].startswith(("save", "load"))}
    assert [(title, call["outcome"], call["ranks"]) for title, call in calls.items()] == [
        ("save of step 1", "committed", 8),
        ("save of step 2", "committed", 8),
        ("load of step 2", "loaded", 8),
    ]
    for call in calls.values():
        assert 32 << 20 <= call["bytes"] < 33 << 20
    assert calls["save of step 2"]["seconds"] > 3.5
    assert [step[0] for step in found["steps"]] == [2, 1]
    (wait,) = (wait for wait in found["waits"] if wait["title"] == "save of step 2")
    assert (wait["late"], wait["came"]) == ("rank 3", True)
    assert wait["seconds"] > 1
    assert re.match(LATE_IS_NAMED, found["roll_calls"][0]["says"])


def test_the_report_names_the_rank_that_is_unlike_the_others(
    real: tuple[Path, list[State]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "NOTABLE", 2.0)  # on a busy machine others are late, too, but not by seconds
    data = data_of(page_of(RecordedRun(str(real[0])), time.time()))
    notes = {row["label"]: row["note"] for row in data["timeline"]["rows"]}
    assert list(notes) == [f"rank {rank}" for rank in range(8)]
    assert [label for label, note in notes.items() if note] == ["rank 3"]
    assert re.match(
        r"came to the save of step 2 \d\.\d s after the first; the median is 0\.", notes["rank 3"]
    )
    (call,) = data["roll_calls"]
    guilty = [block for block in call["tree"] if block[6]]
    assert {block[2] for block in guilty} == {"rank 3"}
    assert any("compute (" in line for block in guilty for line in block[1])
    late = next(iter(RecordedRun(str(real[0])).called)).evidence.ranks[3]
    again = next(stack for stack in late.later if stack.thread == late.stacks[0].thread)
    seen = "moves" if again.calls != late.stacks[0].calls else "still there at the second look"
    assert any(block[4].startswith(f"is, {seen}") for block in guilty), guilty
    waiting = next(block for block in call["tree"] if block[2] == OTHERS and block[4])
    assert re.match(r"waits, .*, all_reduce #\d+ of 1:train pending", waiting[4])


def spans_of(run: RecordedRun) -> dict[tuple[int, int], list[dict[str, Any]]]:
    file = io.StringIO()
    count = write_trace(run, file)
    trace = json.loads(file.getvalue())
    assert len(trace["traceEvents"]) == count
    spans = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in "MXi"
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append(event)
    return spans


def test_the_trace_has_the_same_times_and_its_spans_nest(real: tuple[Path, list[State]]) -> None:
    """Spans of one track that overlap without nesting are what viewers of the format drop."""
    run = RecordedRun(str(real[0]))
    tracks = spans_of(run)
    assert {rank for rank, _ in tracks} == set(range(8))
    for spans in tracks.values():
        ends: list[int] = []
        for span in spans:  # by begin
            while ends and ends[-1] <= span["ts"]:
                ends.pop()
            assert not ends or span["ts"] + span["dur"] <= ends[-1]
            ends.append(span["ts"] + span["dur"])
    late = [span for (rank, _), spans in tracks.items() for span in spans if rank == LATE]
    saved = next(span for span in late if span["name"] == "save of step 2")
    call = next(call for call in run.calls if call.title == "save of step 2").ranks[LATE]
    assert call.end is not None
    assert saved["dur"] / 1e6 == pytest.approx(call.end - call.begin, abs=1e-3)
    assert {"eval", "compute metrics", "train"} <= {span["name"] for span in late}


def test_watch_does_not_show_an_old_run_as_one_of_now(tmp_path: Path) -> None:
    folder = simulated(tmp_path / "run", 4, 2)  # of some days ago
    told = command("watch", folder, "--once")
    assert told.exit_code == 0, told.output
    head, *lines = told.output.splitlines()
    assert re.search(r", and nothing was recorded for \d+ (?:h|days)$", head)
    assert not any(line.split()[:1] == ["now"] for line in lines)
    assert any(line.split()[:1] == ["then"] for line in lines)
    assert any(line.split()[:2] == ["ranks", "did"] for line in lines)


def test_watch_tells_of_a_save_that_failed_and_of_ranks_that_ended(tmp_path: Path) -> None:
    """The program of all ranks but one ended by itself; that one was killed."""
    folder = simulated(tmp_path / "run", 4, 0)
    at = time.time() - 60
    for rank in range(4):
        saved = [
            EventLine(f"save.{name}", at, 1, "run/1", {"bytes": 4000}) for name in ("entered", "committed")
        ]
        saved[1].at += 0.5
        failed = [EventLine(f"save.{name}", at + 9, 2, "run/2") for name in ("entered", "failed")]
        failed[1].at += 20
        late = EventLine(
            "save.late", at + 19, 2, "run/2", {"ranks": [2], "waited": 10.0, "what": "enter the save"}
        )
        lines = [EventLine(BEGUN, at, fields={"world": 4}), *saved]
        lines += [] if rank == 2 else [*failed, late, EventLine(ENDED, at + 30)]
        log = folder / EVENTS / f"rank-{rank}.jsonl"
        log.write_bytes(msgspec.json.Encoder().encode_lines(sorted(lines, key=lambda line: line.at)))
    state = Looker(str(folder)).look(at + 60)
    assert state.last_save == "step 1, 60 s ago: 0.5 s, 15.62 KiB, 32 kB/s"
    assert state.failed_save == "step 2, 31 s ago: failed after 20.0 s; late to enter the save: rank 2"
    assert {(one.ranks, one.does) for one in state.doing} == {
        ("rank 2", "in no call of Holdfast"),
        ("ranks 0-1, 3", "recording ended"),
    }
    assert "not known to be over" in state.roll_calls[0]
    with (folder / EVENTS / "rank-2.jsonl").open("ab") as log_of_2:
        log_of_2.write(msgspec.json.encode(EventLine(ENDED, at + 31)) + b"\n")
    assert "its end was not recorded" in Looker(str(folder)).look(at + 60).roll_calls[0]


def test_watch_on_a_terminal_draws_in_place_and_ends_by_ctrl_c(tmp_path: Path) -> None:
    """A real terminal, whose program gets Ctrl-C as a signal."""
    main, other = pty.openpty()
    program = [sys.executable, "-m", "holdfast", "watch", str(simulated(tmp_path, 100)), "--every", "0.2"]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    # A job in the background of a shell, as this suite may be, ignores Ctrl-C, and so would its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(program, stdin=other, stdout=other, stderr=other, env=env)
    finally:
        signal.signal(signal.SIGINT, before)
    os.close(other)
    shown = b""
    ends = threading.Timer(60, process.kill)  # then there is nothing more to read
    ends.start()
    try:
        while shown.count(b"save of step 2000") < 2:
            shown += os.read(main, 1 << 16)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        ends.cancel()
        process.kill()
        process.wait()
        os.close(main)
    assert b"\x1b[1A" in shown or b"\x1b[2K" in shown  # it goes up, and writes over the lines before
    assert b"behind: rank 77" in shown


def test_once_and_without_a_terminal_lines_are_plain(real: tuple[Path, list[State]]) -> None:
    told = command("watch", real[0], "--once")
    assert told.exit_code == 0
    assert "\x1b" not in told.stdout
    assert "8 ranks" in told.stdout.splitlines()[0]
    assert "last save  step 2, " in told.stdout
    assert json.loads(command("watch", real[0], "--json").stdout)["world"] == 8


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_eight_ranks(real: tuple[Path, list[State]], tmp_path: Path, scheme: str) -> None:
    with Browser() as browser:
        browser.show(page_of(RecordedRun(str(real[0])), time.time()), tmp_path / "page.html", scheme)
        text = browser.evaluate("document.body.innerText")
        for piece in (
            "; rank 3 ",
            "save of step 2",
            "Unlike the others",
            "waits for others",
        ):
            assert piece in text
        assert browser.evaluate("document.querySelectorAll('.time .label').length") == 8
        assert browser.evaluate("document.querySelector('.block.guilty b').textContent") == "rank 3"
        read = """(row => { const canvas = document.querySelector('.time canvas'), place = canvas.getBoundingClientRect();
            for (let x = 0; x < 1; x += .002) {
                const at = {clientX: place.left + place.width * x, clientY: place.top + 6 + row * 23 + 9};
                canvas.dispatchEvent(new PointerEvent('pointermove', at));
                const text = document.querySelector('.read').textContent;
                if (text.includes('save assigning (save of step 2)')) return text;
            }})"""
        # Rank 0 has waited for rank 3, to say which rank writes the step's number.
        found = re.search(
            r"rank 0 \(host \S+, pid \d+\) at [\d:.]+: .*save assigning \(save of step 2\), ([\d.]+) s",
            browser.evaluate(f"{read}(0)"),
        )
        assert found
        assert float(found[1]) > 3
        coloured = """(() => { const canvas = document.querySelector('.time canvas');
            const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
            for (let i = 0; i < pixels.length; i += 4) seen.add(pixels.slice(i, i + 3).join());
            return [...seen]; })()"""
        assert {"224,162,59", "59,123,224"} <= set(browser.evaluate(coloured))  # waits, and moves bytes
        # A click on a save looks closer at it.
        before = browser.evaluate(coloured.replace("[...seen]", "canvas.toDataURL()"))
        browser.evaluate(
            "[...document.querySelectorAll('button.link')].find(one => one.textContent == 'save of step 1').click()"
        )
        assert browser.evaluate(coloured.replace("[...seen]", "canvas.toDataURL()")) != before


# -- a thousand ranks -----------------------------------------------------------------------------------------


@pytest.mark.wide
def test_a_thousand_ranks_are_a_small_page_made_in_seconds(large: Path) -> None:
    began = time.thread_time()
    page = page_of(RecordedRun(str(large)), time.time())
    assert time.thread_time() - began < 20
    assert len(page.encode()) < 1_000_000
    data = data_of(page)
    rows = {row["label"]: row for row in data["timeline"]["rows"]}
    assert list(rows) == [f"rank {GONE}", f"rank {SLOW}", "ranks 0-76, 78-612, 614-999"]
    assert rows["rank 77"]["note"] == "not in the save of step 2000"
    assert re.match(
        r"in writing of the save of step 500 for 19\.\d s; the median is 3\.2 s", rows["rank 613"]["note"]
    )
    band = rows["ranks 0-76, 78-612, 614-999"]
    assert (band["count"], len(band["members"])) == (998, 77)
    first, *others = data["roll_calls"][0]["tree"]
    assert others[0][2:4] == [f"rank {STUCK}", 1]  # before the block of the 999
    assert first[3] == 1000


@pytest.mark.wide
def test_the_time_of_a_report_grows_with_the_ranks_only(tmp_path: Path) -> None:
    seconds = {}
    for world in (100, 400):
        folder = simulated(tmp_path / str(world), world, 10)
        seconds[world] = cpu_seconds(partial(page_of, RecordedRun(str(folder)), time.time()))
    assert seconds[400] < 12 * seconds[100]


@in_browser
def test_a_browser_shows_a_thousand_ranks_with_few_elements(large: Path, tmp_path: Path) -> None:
    with Browser() as browser:
        browser.show(page_of(RecordedRun(str(large)), time.time()), tmp_path / "page.html")
        assert browser.evaluate("document.querySelectorAll('*').length") < 1000
        text = browser.evaluate("document.body.innerText")
        assert (
            "Of 998 ranks that are like each other, or by less than the 2 above, 77 are drawn: ranks 0-76,"
            in text
        )
        assert browser.evaluate("document.querySelector('.time canvas').clientHeight") < 600


# -- bad input ------------------------------------------------------------------------------------------------


def hostile(folder: Path) -> Path:
    """Logs that nobody can have written, beside one that is whole."""
    logs = folder / EVENTS
    logs.mkdir(parents=True)
    good = [
        EventLine("save.entered", 10.0, 1, HOSTILE),
        EventLine("phase.entered", 10.5, fields={"phase": HOSTILE}),
        EventLine("save.raised", 11.0, 1, HOSTILE, {"message": HOSTILE, "seconds": 1.0}),
    ]
    bad = [
        b'{"name":"save.entered","at":-1}',
        b'{"name":"save.entered","at":1e300}',
        b'{"name":"save.entered","at":1,"step":"x"}',
        b'{"name":3,"at":1}',
        b"[" * 5000,
        b"\xff\x00\xfe",
        b'{"name":"save.entered","at":1,"path":"' + b"x" * (3 << 20) + b'"}',
    ]
    odd = [
        b'{"name":"save.writing","at":12,"step":' + b"9" * 18 + b',"fields":{"seconds":1e308,"bytes":[1]}}',
        b'{"name":"save.late","at":12,"fields":{"ranks":[-1,"x",1e30,{}],"waited":"long","what":{"a":1}}}',
        b'{"name":"phase.left","at":13,"fields":{"phase":[],"seconds":-5}}',
        b'{"name":"record.begun","at":14,"fields":{"world":1e17,"host":"\\u001b[31m","pid":{}}}',
    ]
    text = msgspec.json.Encoder().encode_lines(good) + b"\n".join([*bad, *odd])
    (logs / "rank-0.jsonl").write_bytes(text + b'\n{"name":"half a li')
    (logs / "rank-999999.jsonl").write_bytes(text)
    os.mkfifo(logs / "rank-1.jsonl")
    (logs / "rank-2.jsonl").symlink_to("/dev/zero")
    (logs / "other.txt").write_bytes(b"x")
    called = folder / "roll-calls" / "not-a-time"
    called.mkdir(parents=True)
    (called / "rank-0.json").write_text('{"roll_call": {"rank": "x"}}')
    return folder


def test_hostile_files_are_skipped_and_counted(tmp_path: Path) -> None:
    folder = hostile(tmp_path / "run")
    run = RecordedRun(str(folder))
    assert (run.skipped, list(run.ranks)) == (7, [0, 1, 2])
    page = page_of(run, time.time())
    assert len(page) < 100_000
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page
    assert "\x1b" not in page
    spans_of(run)
    for arguments in (("--once",), ("--json",)):
        told = command("watch", folder, *arguments)
        assert told.exit_code == 0, told.output
        assert "\x1b" not in told.stdout
    assert "7 lines of the logs can't be read" in command("watch", folder, "--once").stdout


@in_browser
def test_a_browser_shows_hostile_texts_as_texts(tmp_path: Path) -> None:
    page = page_of(RecordedRun(str(hostile(tmp_path / "run"))), time.time())
    with Browser() as browser:
        browser.show(page, tmp_path / "page.html")
        assert browser.evaluate("document.title") == "run"
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert "</script><script>" in browser.evaluate("document.body.textContent")


@pytest.mark.parametrize("name", ["report", "watch"])
def test_bad_input_ends_in_one_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "missing", tmp_path / "file"):
        told = command(name, place, "--json")
        assert (told.exit_code, told.stdout) == (2, "")
        hint = "Give the one that HOLDFAST_EVENTS names in the job."
        assert told.stderr == f"holdfast: {place} is no folder of this host. {hint}\n"
    (tmp_path / "empty").mkdir()
    told = (
        command(name, tmp_path / "empty") if name == "report" else command(name, tmp_path / "empty", "--once")
    )
    assert "HOLDFAST_EVENTS" in told.output
    assert told.exit_code == (2 if name == "report" else 0)


def test_a_page_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    small = simulated(tmp_path / "run", 4, 1)
    for option in ("--html", "--trace"):
        told = command("report", small, option, tmp_path)
        assert (told.exit_code, told.stderr) == (
            2,
            f"holdfast: {tmp_path} can't be written: Is a directory.\n",
        )


def test_a_run_without_events_shows_its_steps(real: tuple[Path, list[State]], tmp_path: Path) -> None:
    shutil.copytree(real[0] / "step-00000001", tmp_path / "run" / "step-00000001")
    data = data_of(page_of(RecordedRun(str(tmp_path / "run")), time.time()))
    assert "timeline" not in data
    assert [step[0] for step in data["steps"]] == [1]
    with pytest.raises(BadInput, match="has no events, roll calls or steps"):
        RecordedRun(str(tmp_path / "run" / "step-00000001" / "data"))


def test_diagnose_does_not_take_events_for_evidence(tmp_path: Path) -> None:
    folder = simulated(tmp_path / "run", 4, 1)
    shutil.rmtree(folder / "roll-calls")
    (folder / "job.log").write_text("[rank2]: ValueError: bad sample\n")
    told = command("diagnose", folder, "--json")
    assert json.loads(told.stdout)["heard_of"] == [2]
