"""Another user of the host: what he reaches in folders that all can write, and at the doctor's socket.

He is user nobody, in a process of his own; `tests/watch/test_shared_call.py` has what he plants beforehand.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast._core.process import recording as _recording
from holdfast._core.process.heart import heart
from holdfast._core.process.recording import Recorder
from holdfast._groups.audit import doctor
from holdfast._groups.audit.hazards import ProcessFacts
from holdfast._tools.cli import doctor as doctor_command
from holdfast._tools.recorded.event_log import read_events
from holdfast._watch import shared_call
from holdfast.errors import BadInput
from tests.store.faults import open_below
from tests.support.waiting import wait_until

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

PLANTS = """
import os, random, sys, time
folder, victim = sys.argv[1:]
os.setgid(65534); os.setuid(65534); os.umask(0)
def links(path): os.symlink(victim, path)
def second_names(path): os.link(victim, path)
def pipes(path): os.mkfifo(path)
def zeros(path): os.symlink("/dev/zero", path)
def large(path):
    with open(path, "wb") as file: file.truncate(200 << 30)
def folders(path): os.mkdir(path)
def links_to_folders(path): os.symlink(os.path.dirname(victim), path)
kinds = [links, second_names, pipes, zeros, large, folders, links_to_folders]
names = ["roll-calls", "events", "roll-calls/call", "roll-calls/call/job-0", "roll-calls/call/asked",
         "roll-calls/call/rank-0.json", "events/rank-0.jsonl", "events/rank-0.old.jsonl"]
print("begun", flush=True)
done = 0
while True:
    path = os.path.join(folder, random.choice(names))
    for attack in (lambda: os.rename(path, os.path.join(folder, f"taken{random.random()}")),
                   lambda: random.choice(kinds)(path), lambda: os.unlink(path)):
        try:
            attack()
            done += 1
        except OSError:
            pass
    if done % 100 == 0:
        time.sleep(0.001)
"""


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder in which everybody may do anything; others can't reach pytest's own."""
    place = Path(tempfile.mkdtemp(dir="/dev/shm"))
    place.chmod(0o777)
    try:
        yield place
    finally:
        shutil.rmtree(place)


@contextmanager
def as_nobody(program: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, *map(str, words)]
    with subprocess.Popen(command, cwd="/", stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def test_a_user_who_plants_links_all_the_time_reaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks write there stays theirs, what a link leads to is neither written nor read, and no call waits."""
    monkeypatch.setattr(_recording, "LIMIT", 2000)
    with open_folder() as shared, open_folder() as own:
        victim = own / "victim"
        victim.write_text("precious")
        victim.chmod(0o600)
        own.chmod(0o755)
        run, path = shared, os.path.join(shared, "roll-calls", "call")
        recorder = Recorder(str(run), 0, 1)
        done, failed = 0, 0
        with as_nobody(PLANTS, shared, victim) as stranger:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "begun\n"
            ends, longest = time.monotonic() + 6.0, 0.0
            while time.monotonic() < ends:
                began = time.monotonic()
                for step in (
                    lambda: shared_call.take_part(path, "job", 1),
                    lambda: shared_call.parts(path),
                    lambda: shared_call.read_answers(path, [shared_call.JobPart("job", 1, "p")]),
                    lambda: shared_call.waiting_call(str(run), "job"),
                    lambda: shared_call.ask_for_call(str(run), "somebody asks"),
                    lambda: recorder._append(b'{"name":"save.entered","at":1}\n' * 10),
                    lambda: read_events(str(run)),
                ):
                    try:
                        step()
                        done += 1
                    except (OSError, BadInput):
                        failed += 1
                longest = max(longest, time.monotonic() - began)
        assert open_below(shared) == [], "an attack must not cost a descriptor"
        assert victim.read_text() == "precious"
        assert os.stat(victim).st_nlink == 1 or Path("/proc/sys/fs/protected_hardlinks").read_text() == "0\n"
        assert os.listdir(own) == ["victim"]
        assert done > 100
        assert longest < 5.0, "nothing waits for the other end of a pipe"
        for file in (one for one in shared.rglob("*") if not one.is_symlink() and one.is_file()):
            about = file.stat()
            if about.st_uid == 0 and file.suffix != ".jsonl" and not file.name.startswith("victim"):
                assert stat.S_IMODE(about.st_mode) == 0o600, file


def test_who_makes_the_folders_first_keeps_files_from_being_written_and_reaches_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with open_folder() as run:
        for name in ("roll-calls", "events"):
            (run / name).mkdir(mode=0o777)
            os.chown(run / name, NOBODY, NOBODY)
        recorder = Recorder(str(run), 0, 1)
        for _ in range(2):
            recorder._append(b"{}\n")
        assert caplog.text.count("Events can't be recorded") == 1
        done = CliRunner().invoke(doctor_command.command, ["--all", str(run)])
        assert "A roll call can't be asked for" in str(done.exception)
        assert shared_call.waiting_call(str(run), "job") is None
        assert sorted(path.name for path in run.rglob("*")) == ["events", "roll-calls"]


# -- the doctor's socket ---------------------------------------------------------------------------------

FACTS = ProcessFacts(os.getpid(), 0, 1, "2", False, (), {"NCCL_DEBUG": "a value of the job"})
ASKS = """
import os, socket, sys, time
os.setgid(65534); os.setuid(65534)
address, what = bytes.fromhex(sys.argv[1]), sys.argv[2]
def connected():
    one = socket.socket(socket.AF_UNIX)
    one.connect(address)
    return one
if what == "binds":
    one = socket.socket(socket.AF_UNIX)
    one.bind(address)
    one.listen(4)
    print("begun", flush=True)
    while True:
        two, _ = one.accept()
        two.sendall(b'{"pid":1}')
        two.close()
if what == "asks":
    print(connected().recv(100), flush=True)
if what == "waits":
    held = [connected() for _ in range(3)]
    print("begun", flush=True)
    print([one.recv(100) for one in held], flush=True)
print("begun", flush=True)
while what == "floods":
    connected().close()
"""


@contextmanager
def asked(what: str, pid: int) -> Iterator[subprocess.Popen[str]]:
    with as_nobody(ASKS, doctor._address(pid).encode().hex(), what) as process:
        yield process


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def serving() -> Iterator[None]:
    doctor.stop()  # a test before this one may have opened groups in this process, which answers since then
    assert doctor.serve(lambda: FACTS)
    try:
        yield
    finally:
        doctor.stop()


class Beats:
    """A duty of the heart that must go on."""

    interval = 0.2

    def __init__(self) -> None:
        self.at: list[float] = []

    def beat(self) -> None:
        self.at.append(time.monotonic())

    def close(self) -> None: ...


def test_the_doctor_tells_another_user_nothing() -> None:
    with serving(), asked("asks", os.getpid()) as stranger:
        assert line(stranger) == "b''"
        assert doctor.ask(os.getpid()) == FACTS


def test_a_process_without_descriptors_is_not_kept_busy_by_another_user(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It gave 300,000 warnings in 6 s: the connection waits, and can be read all the time."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving():
        beats = Beats()
        heart.begin(beats, 0.0)
        wait_until(lambda: beats.at)
        with asked("waits", os.getpid()) as stranger:
            # The process exists before the limit: `Popen` needs descriptors.
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))
            try:
                assert stranger.stdout is not None
                assert line(stranger) == "begun"
                spent = time.process_time()
                time.sleep(4.0)
                spent_here = time.process_time() - spent
                said = len(caplog.records)
                goes_on = len(beats.at)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            assert 1 <= said <= 3, caplog.text
            assert spent_here < 0.5
            assert goes_on > 8
            assert line(stranger) == str([b""] * 3), "they are served once there are descriptors"
        heart.end(beats)


def test_a_user_who_asks_without_pause_does_not_hold_up_the_heart() -> None:
    with serving():
        beats = Beats()
        heart.begin(beats, 0.0)
        with asked("floods", os.getpid()) as stranger:
            assert line(stranger) == "begun"
            before = len(beats.at), time.process_time()
            time.sleep(3.0)
            spent = time.process_time() - before[1]
            assert len(beats.at) - before[0] > 5
        heart.end(beats)
    assert spent < 0.5, spent


def test_who_listens_in_the_name_of_a_process_is_told_from_it() -> None:
    with asked("binds", os.getpid()) as stranger:
        assert line(stranger) == "begun"
        assert not doctor.serve(lambda: FACTS), "training needs no doctor"
        with pytest.raises(BadInput, match=r"Another process .* listens in the name of process"):
            doctor.ask(os.getpid())
