"""What people see of a save or load that takes long."""

from __future__ import annotations

import logging
import os
import pty
import re
import select
import sys
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import events
from holdfast._core.base import bar as _bar
from holdfast._core.protocol import operation

ALONE = holdfast.Job(no_dist=True)


def test_a_log_says_what_a_save_and_a_load_took(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    state = {"w": torch.ones(1 << 20)}
    holdfast.save(state, tmp_path / "it", job=ALONE)
    holdfast.load(state, tmp_path / "it", job=ALONE)
    lines = [record.getMessage() for record in caplog.records if "has moved" in record.getMessage()]
    assert [line.partition(" of ")[0] for line in lines] == ["save", "load"]
    assert all("rank 0 has moved 4 MiB of 4 MiB in " in line for line in lines)


def test_a_long_one_says_how_far_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    monkeypatch.setattr(operation, "TELL_EVERY", 0.0)
    holdfast.save({"w": torch.ones(4, 1 << 20)}, tmp_path / "it", job=ALONE)
    moved = [record.getMessage().partition("has moved ")[2].split(" of ")[0] for record in caplog.records]
    moved = [one for one in moved if one]
    assert len(moved) > 3
    assert moved[-1] == "16 MiB"
    assert moved[0] != moved[-1]


def test_no_more_is_moved_than_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    state: dict[str, object] = {f"w{number}": torch.ones(number) for number in range(5)} | {"step": 3}
    holdfast.save(state, tmp_path / "it", job=ALONE)
    holdfast.load(state, tmp_path / "it", job=ALONE)
    holdfast.async_save(state, tmp_path / "it", job=ALONE).committed(60)
    lines = [record.getMessage() for record in caplog.records if "has moved" in record.getMessage()]
    for line in lines:
        done, total = line.partition("has moved ")[2].partition(" in ")[0].split(" of ")
        assert done == total
    assert len(lines) == 3


def test_the_event_of_the_commit_has_seconds_and_bytes(tmp_path: Path) -> None:
    seen: list[events.Event] = []
    stop = events.subscribe(seen.append)
    try:
        holdfast.save({"w": torch.ones(1 << 20)}, tmp_path / "it", job=ALONE)
    finally:
        stop()
    [committed] = [event for event in seen if event.name == "save.committed"]
    assert 4 << 20 <= committed.fields["bytes"] < 5 << 20
    assert committed.fields["seconds"] > 0


@contextmanager
def terminal() -> Iterator[int]:
    """Make a terminal stderr, on which a bar is drawn each time that bytes have moved; yield its other end."""
    end, other = pty.openpty()
    tty.setraw(other)
    with open(other, "w") as stderr, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setattr(_bar, "own", True)  # a command that a test before has called forbids it
        patch.setattr(_bar, "AFTER", 0.0)
        patch.setattr(_bar, "EVERY", 0.0)
        patch.setattr(sys, "stderr", stderr)
        yield end
    os.close(end)


def shown(end: int) -> str:
    """What has come to the other end of the terminal, which is not at once."""
    sys.stderr.write("\0")
    sys.stderr.flush()
    text = ""
    while not text.endswith("\0"):
        assert wait([end], 60)
        text += os.read(end, 1 << 16).decode()
    return text[:-1]


def test_a_bar_is_drawn_on_a_terminal_and_taken_away(tmp_path: Path) -> None:
    state = {"w": torch.ones(4, 1 << 20)}
    with terminal() as end:
        for call in (holdfast.save, holdfast.load):
            call(state, tmp_path / "it", job=ALONE)
            first, *more, last = shown(end).split("\r\x1b[K")
            assert (first, last) == ("", "")
            assert len(more) > 3
            assert more[0] != more[-1]
            lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in more]  # without colours
            assert re.match(rf"━{{24}} 100% 16\.0/16\.0 MiB [0-9:-]+ {call.__name__} of ", lines[-1]), lines
            assert all(len(line) <= 80 and line.isprintable() for line in lines)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_bar_is_one_line_whatever_the_title_and_the_terminal(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is no markup, and what it is too narrow for is cut."""
    with terminal() as end:
        for columns in ("100", "20", "3"):
            with (
                open(os.dup(sys.stderr.fileno()), "w", encoding=encoding) as stderr,
                monkeypatch.context() as patch,
            ):
                patch.setenv("COLUMNS", columns)
                patch.setattr(sys, "stderr", stderr)
                bar = _bar.Bar("load of /runs/[bold]/\x1b[2J\n" + "long" * 40)
                bar.draw(7 << 20, 5 << 20)
                bar.clear()
                text = shown(end)
            first, line, last = text.split("\r\x1b[K")
            plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
            assert (first, last) == ("", "")
            assert plain.isprintable()
            assert 0 < len(plain) <= int(columns)
            if columns == "100":
                assert "100% 5.0/5.0 MiB" in plain
                assert "load of /runs/[bold]/" in plain


def test_no_bar_where_nobody_waits_or_the_log_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.ones(4, 1 << 20)}
    with terminal() as end:
        holdfast.async_save(state, tmp_path / "it", job=ALONE).result()
        with caplog.at_level(logging.INFO, "holdfast"):
            holdfast.load(state, tmp_path / "it", job=ALONE)
        with monkeypatch.context() as forbidden:
            forbidden.setattr(_bar, "own", False)
            holdfast.load(state, tmp_path / "it", job=ALONE)
        for name, value in (("HOLDFAST_BAR", "0"), ("TERM", "dumb")):
            with monkeypatch.context() as forbidden:
                forbidden.setenv(name, value)
                holdfast.load(state, tmp_path / "it", job=ALONE)
        monkeypatch.setattr(_bar, "AFTER", 3600.0)
        holdfast.load(state, tmp_path / "it", job=ALONE)
        assert shown(end) == ""


def test_a_terminal_that_nobody_reads_holds_nothing_up(tmp_path: Path) -> None:
    with terminal() as end:
        fd = sys.stderr.fileno()
        assert os.isatty(fd)
        os.set_blocking(fd, False)
        room = select.poll()
        room.register(fd, select.POLLOUT)
        while room.poll(500):  # the kernel passes it on, which makes room
            with suppress(BlockingIOError):
                os.write(fd, b"x" * 64)
        os.set_blocking(fd, True)
        holdfast.save({"w": torch.ones(4, 1 << 20)}, tmp_path / "it", job=ALONE)
        os.set_blocking(end, False)
        with suppress(BlockingIOError):
            while True:
                assert b"MiB" not in os.read(end, 1 << 16)
