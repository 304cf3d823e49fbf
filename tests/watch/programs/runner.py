"""Runs small programs on real ranks of gloo, and calls the roll in their middle.

    python -m tests.watch.programs.runner [--keep ARCHIVE] [healthy|sick] [NAME...]

A program in `healthy` or `sick` is a script of a user of PyTorch, started as torchrun starts it: `RANK`, `WORLD_SIZE`
and so on are in its environment, and it is `__main__`. It touches the file that `READY` names when a call becomes
interesting; the call is asked for one second later, as `holdfast doctor --all` does. A healthy program then goes on
to its end. `--keep` stores the answers of each program in a zip archive.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import os
import runpy
import signal
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from holdfast._watch.evidence import Evidence
from holdfast._watch.read import read_all
from holdfast._watch.shared_call import ROLL_CALLS, ask_for_call, parts, read_answers, wait_for_answers
from tests.support.interpreters import Interpreter
from tests.watch.faults import Told, told

HERE = Path(__file__).parent
KINDS = ("healthy", "sick")
WORLD = 4
LIBRARY = f"/usr/lib/python{sys.version_info.major}.{sys.version_info.minor}"
"""Where recordings say that Python is."""
LIMIT = 60.0
"""Seconds after which a program is ended."""
AFTER_READY = 1.0
"""Seconds from the first file of a rank that is ready to the call."""


class Ran(NamedTuple):
    """How a program went."""

    evidence: Evidence
    """What its ranks have answered; empty if nobody has."""
    answered: tuple[int, ...]
    """Ranks that have answered for themselves, at both looks."""
    told: list[str]
    """What the ranks have logged."""
    codes: tuple[int | None, ...]
    """The exit code of each rank; None of those that the runner has ended."""
    output: str
    """What the ranks have printed, stderr included."""
    seconds: float

    @property
    def is_healthy(self) -> bool:
        return self.codes == (0,) * WORLD


def programs(kind: str) -> list[Path]:
    """List the programs of one table."""
    return sorted(path for path in (HERE / kind).glob("*.py") if path.stem != "__init__")


# -- one rank -----------------------------------------------------------------------------------------------


class Rank(Interpreter):
    """A process that runs a script as `python script.py` does."""

    def __init__(self, script: Path, rank: int, port: int, folder: Path) -> None:
        super().__init__()
        self._what = (str(script), rank, port, folder)

    def become(self) -> None:
        script, rank, port, folder = self._what
        with contextlib.suppress(PermissionError):
            os.setsid()  # with its children it is ended
        out = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.close(out)
        faulthandler.dump_traceback_later(
            LIMIT - 10, file=2
        )  # says where a rank is that will not end in time
        os.environ |= environment(rank, port, folder)
        logging.getLogger("holdfast").addHandler(Told(folder / f"told-{rank}"))
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")

    def raised(self, error: BaseException) -> BaseException:
        return error.with_traceback(_from(self._what[0], error.__traceback__))


def _from(script: str, trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that `python script.py` would show."""
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace


def environment(rank: int, port: int, folder: Path) -> dict[str, str]:
    """Return what torchrun sets, and what the runner does."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "program",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HOLDFAST_ROLL_CALLS": str(folder),
        "READY": str(folder / f"ready-{rank}"),
        "RUN_FOLDER": str(folder / "run"),
    }


# -- the driver ---------------------------------------------------------------------------------------------


def run(script: Path, folder: Path) -> Ran:
    """Run a program until its call is answered, a healthy one until its end. The folder has what it has written."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    begun = time.monotonic()
    ends = begun + LIMIT
    is_healthy = script.parent.name == "healthy"
    (folder / "run").mkdir(parents=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [Rank(script, rank, store.port, folder) for rank in range(WORLD)]
    answered: tuple[int, ...] = ()
    try:
        for rank in ranks:
            rank.start()

        def has_failed() -> bool:
            codes = [rank.exitcode for rank in ranks]
            return None not in codes or (is_healthy and any(codes))

        _wait(lambda: has_failed() or any(folder.glob("ready-*")), ends)
        if any(folder.glob("ready-*")):
            time.sleep(AFTER_READY)
            call = ask_for_call(str(folder), "somebody asks")
            _wait(lambda: has_failed() or _has_result(folder), ends)
            wait_for_answers(call, 3.0)  # files are written on threads of their own
            found, _ = read_answers(call, parts(call))
            looks = [one["roll_call"] for one in found.values() if one["by"] == one["roll_call"]["rank"]]
            answered = tuple(one["rank"] for one in looks if one["later"])
        if is_healthy:
            _wait(lambda: has_failed() or all(rank.exitcode is not None for rank in ranks), ends)
        codes = tuple(rank.exitcode for rank in ranks)
    finally:
        for rank in ranks:
            _end(rank)
    calls = folder / ROLL_CALLS
    evidence = read_all([str(folder)]) if answered else Evidence()
    output = "".join(
        f"--- rank {path.name.partition('-')[2]}\n{path.read_text(errors='replace')}"
        for path in sorted(folder.glob("output-*"))
        if path.stat().st_size
    )
    assert calls.is_dir() or not answered
    return Ran(evidence, answered, told(folder), codes, output, time.monotonic() - begun)


def _wait(true: Any, ends: float) -> None:
    while not true() and time.monotonic() < ends:
        time.sleep(0.05)


def _has_result(folder: Path) -> bool:
    return any(text.startswith("Roll call of") for text in told(folder))


def _end(rank: Rank) -> None:
    if rank.pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, signal.SIGKILL)
    rank.kill()
    rank.join(10)


# -- recordings ---------------------------------------------------------------------------------------------


def keep(folder: Path, archive: Path, name: str) -> None:
    """Store the answers of a run in an archive, without the paths of this machine: one object for each program, by
    the names of their files."""
    call = max((folder / ROLL_CALLS).iterdir())
    texts = {file.name: _portable(file.read_text(), folder) for file in call.glob("rank-*.json")}
    whole = json.dumps({name: json.loads(texts[name]) for name in sorted(texts)}, separators=(",", ":"))
    pack(archive, {**unpacked(archive), name: whole})


def pack(archive: Path, texts: dict[str, str]) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_LZMA) as file:
        for name in sorted(texts):
            file.writestr(zipfile.ZipInfo(name), texts[name], zipfile.ZIP_LZMA)  # without the time of now


def unpacked(archive: Path) -> dict[str, str]:
    """Return what `keep` has stored, by program."""
    if not archive.exists():
        return {}
    with zipfile.ZipFile(archive) as file:
        return {name: file.read(name).decode() for name in file.namelist()}


def _portable(text: str, folder: Path) -> str:
    paths = sysconfig.get_paths()
    root = HERE.parents[2]
    places = {
        str(folder): "/app/run",
        paths["purelib"]: f"{LIBRARY}/site-packages",
        os.path.realpath(paths["purelib"]): f"{LIBRARY}/site-packages",
        paths["stdlib"]: LIBRARY,
        os.path.realpath(paths["stdlib"]): LIBRARY,
        str(root): "/app",
        str(root.resolve()): "/app",
        os.path.realpath(sys.prefix): "/usr",
        str(Path.home()): "/app",
    }
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(place, places[place])
    return text


def recorded(text: str) -> Evidence:
    """Read the answers of one program that `keep` has stored."""
    with tempfile.TemporaryDirectory(prefix="holdfast-recorded-") as folder:
        call = Path(folder, ROLL_CALLS, "recorded")
        call.mkdir(parents=True)
        for name, answer in json.loads(text).items():
            (call / name).write_text(json.dumps(answer))
        return read_all([folder])


def main() -> None:
    """Run programs, and print a line for each."""
    parser = argparse.ArgumentParser(description="Run programs of the two tables.")
    parser.add_argument("--keep", type=Path, metavar="ARCHIVE")
    parser.add_argument("names", nargs="*", metavar="healthy|sick|NAME")
    given = parser.parse_args()
    kinds = [kind for kind in KINDS if kind in given.names] or KINDS
    names = set(given.names) - set(KINDS)
    for script in (script for kind in kinds for script in programs(kind)):
        if names and script.stem not in names:
            continue
        with tempfile.TemporaryDirectory(prefix="holdfast-program-") as folder:
            ran = run(script, Path(folder))
            is_good = ran.answered == tuple(range(WORLD)) and ran.is_healthy
            if given.keep is not None and ran.answered and (is_good or script.parent.name == "sick"):
                keep(Path(folder), given.keep, script.stem)
        codes = " ".join("-" if code is None else str(code) for code in ran.codes)
        name = f"{script.parent.name}/{script.stem}"
        print(f"{name:40} answered {ran.answered}, codes {codes}, {ran.seconds:.0f} s", flush=True)
        if script.parent.name == "healthy" and not is_good:
            print(ran.output[-6000:], flush=True)


if __name__ == "__main__":
    main()
