"""Each command on what is no checkpoint and may have no end: one sentence, in little time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from tests.support.wide import wide

pytestmark = pytest.mark.timeout(600)
MARKS = (
    "index.safetensors",
    "step-00000001/index.safetensors",
    "model.safetensors",
    ".metadata",
    "latest",
    "events/rank-0.jsonl",
    "log.txt",
)
"""Names by which a place is taken for something that is read."""
SECONDS, MEMORY = 30.0, 300 << 10
"""That a command may take, of one processor; and KiB of memory beyond those of what it imports."""
TRIES = f"""
import json, os, resource, sys
import torch
import holdfast
from holdfast._tools.cli import COMMANDS, cli, doctor
from holdfast._watch import packed
packed.PATIENCE = doctor.ANSWERED = 0.2
for name in COMMANDS:
    cli.get_command(None, name)
out = os.dup(1)
for line in sys.stdin:
    words = json.loads(line)
    if not os.fork():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS:.0f}, {SECONDS:.0f}))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            cli.main(words)
        except SystemExit as error:
            code = error.code
        except BaseException as error:
            code = repr(error)
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(out, json.dumps([code, more]).encode() + b"\\n")
        os._exit(0)
    _, status = os.wait()
    if status:
        os.write(out, json.dumps(["status " + str(status), 0]).encode() + b"\\n")
"""


def fifo(path: Path) -> None:
    os.mkfifo(path)


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(200 << 30)


def commands(place: str, good: str, out: str) -> list[list[str]]:
    """What reads a place; `import` and `export` read it as `same` does."""
    return [
        *([name, place] for name in ("inspect", "verify", "latest", "reindex", "diagnose")),
        ["report", place, "--html", f"{out}.html"],
        ["watch", place, "--once"],
        ["doctor", "--all", place],
        ["same", place, good],
        ["diff", good, place],
    ]


def tries_of(make: Callable[[Path], None], root: Path, good: str) -> list[list[str]]:
    """The commands on places that `make` makes below a folder: one itself, and one for each of MARKS."""
    root.mkdir()
    make(root / "itself")
    tries = commands(str(root / "itself"), good, str(root / "out"))
    for number, mark in enumerate(MARKS):
        path = root / str(number) / mark
        path.parent.mkdir(parents=True)
        make(path)
        tries += commands(str(root / str(number)), good, str(root / f"out{number}"))
    return tries


@pytest.mark.parametrize("make", wide((fifo, zero, hole), suite=(fifo,)))
def test_what_has_no_end_is_refused_or_passed_over(make: Callable[[Path], None], tmp_path: Path) -> None:
    good = str(tmp_path / "good")
    holdfast.save({"w": torch.ones(3)}, good, job=holdfast.Job(no_dist=True))
    tries = tries_of(make, tmp_path / "odd", good)
    done = subprocess.run(  # one process imports, and forks for each command
        [sys.executable, "-W", "ignore", "-c", TRIES],
        input="".join(json.dumps(words) + "\n" for words in tries),
        capture_output=True,
        text=True,
        timeout=500,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(tries), done.stderr[-2000:]
    wrong = []
    for words, (code, more) in zip(tries, found, strict=True):
        # Nothing can be known of the weights: that is no success.
        good_codes = (1, 2) if words[0] in ("verify", "same", "diff") else (0, 1, 2)
        if code not in good_codes or more > MEMORY:
            wrong.append((words, code, more))
    assert not wrong
