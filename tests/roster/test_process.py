"""What the kernel says of real processes: whether they are there, how they ended, what they do."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from holdfast._core.base.stacks import where_dumped
from holdfast._core.roster import process
from holdfast._core.roster.lost import see
from holdfast._core.roster.memory import MemoryRoster
from holdfast._core.roster.presence import Vitals, at_key
from holdfast._core.roster.process import (
    UNSEEN,
    Identity,
    StackDump,
    activity,
    listens,
    own_sockets,
    sockets,
    stat,
    this_process,
)
from tests.support.threads import in_a_fork
from tests.support.waiting import wait_until

REPOSITORY = str(Path(__file__).parents[2])
SHOW_IDENTITY = """
import sys, time, msgspec, faulthandler
from holdfast._core.roster.process import stack_dump, this_process
from tests.support.gil import hold_the_gil
if "dump" in sys.argv:
    stack_dump.begin(0)
who = msgspec.structs.replace(this_process(1), dump_signal=stack_dump.signal, dump_file=stack_dump.file)
print(msgspec.json.encode(who).decode(), flush=True)
"""


@contextmanager
def other(does: str, *words: str) -> Iterator[tuple[Identity, subprocess.Popen[str]]]:
    """Another process, which shows its identity first."""
    command = [sys.executable, "-c", SHOW_IDENTITY + does, *words]
    made = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert made.stdout is not None
        yield msgspec.json.decode(made.stdout.readline(), type=Identity), made
    finally:
        made.kill()
        made.wait(10)
        for pipe in (made.stdin, made.stdout):
            assert pipe is not None
            pipe.close()


def test_a_process_is_told_from_another_that_has_its_pid() -> None:
    me = this_process(0)
    assert me.is_of_this_machine()
    assert me.state() == "R"
    before = msgspec.structs.replace(me, started=str(int(me.started) - 1))
    assert before.state() == ""
    assert before.how_it_ended() == "its process has ended"
    assert not before.exited_with_0()
    assert not msgspec.structs.replace(me, machine="boot/pid:[1]").is_of_this_machine()
    assert not Identity(0).is_of_this_machine()


@pytest.mark.parametrize(
    ("does", "sent", "how"),
    [
        ("", 0, "its process has ended with exit code 0"),
        ("sys.exit(3)", 0, "its process has ended with exit code 3"),
        ("time.sleep(60)", signal.SIGKILL, "its process was killed by SIGKILL"),
        ("time.sleep(60)", signal.SIGTERM, "its process was killed by SIGTERM"),
        ("time.sleep(60)", 45, "its process was killed by signal 45"),
    ],
)
def test_how_a_process_has_ended_is_known_until_its_parent_has_asked(does: str, sent: int, how: str) -> None:
    with other(does) as (who, child):
        if sent:
            assert who.state() in "SR"
            child.send_signal(sent)
        wait_until(lambda: not who.state())
        assert who.how_it_ended() == how
        assert who.exited_with_0() == (not sent and not does)
        child.wait()
        assert who.stat() is None
        assert who.how_it_ended() == "its process has ended"
        assert not who.exited_with_0()


IN_A_SMALL_CGROUP = """
import os, sys, time
import msgspec
from holdfast._core.roster import process
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
me = process.this_process(0)
for needs in (1 << 20, 1 << 30):
    pid = os.fork()
    if not pid:
        open("/proc/self/oom_score_adj", "w").write("1000")  # this one, and not its parent
        needed = bytearray(needs)
        time.sleep(60)
    child = msgspec.structs.replace(me, pid=pid, started=process.stat(pid).started)
    if needs == 1 << 20:
        os.kill(pid, 9)
    ends = time.monotonic() + 30
    while child.state() and time.monotonic() < ends:
        time.sleep(0.05)
    print(child.how_it_ended())
"""


NEEDS_MORE_MEMORY = """
import mmap, os, sys, tempfile, time
from holdfast._core.roster.process import memory_stall
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
file = tempfile.TemporaryFile(dir=sys.argv[2])
for _ in range(260):
    file.write(os.urandom(1 << 20))
file.flush()
pages, before, ends = mmap.mmap(file.fileno(), 0), memory_stall(), time.monotonic() + 30
while memory_stall() < before + 0.1 and time.monotonic() < ends:
    sum(pages[::4096])
print(memory_stall() - before)
"""


@contextmanager
def small_cgroup() -> Iterator[str]:
    """A folder of a cgroup of 200 MiB, of version 1 or 2."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    version, path = min(
        (0, path) if kinds == "memory" else (1, path) for _, kinds, path in groups if kinds in ("", "memory")
    )
    root = Path("/sys/fs/cgroup", *(("memory",) if version == 0 else ()), path.lstrip("/"))
    folder = root / f"holdfast-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.max" if version else "memory.limit_in_bytes")).write_text(str(200 << 20))
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        yield str(folder)
    finally:
        wait_until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


def printed_in(folder: str, program: str, *args: str) -> list[str]:
    command = [sys.executable, "-c", program, folder, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.splitlines()


def test_a_process_that_the_kernel_has_killed_for_its_memory_is_told() -> None:
    """Another SIGKILL is not told so."""
    with small_cgroup() as folder:
        told = printed_in(folder, IN_A_SMALL_CGROUP)
    killed = "its process was killed by SIGKILL"
    assert told == [killed, f"{killed}; {process.OOM}"]


def test_waiting_for_memory_is_seen() -> None:
    """The pages of a file that it uses all the time are taken from it, and read again."""
    if not Path("/proc/pressure/memory").exists():
        pytest.skip("this kernel does not tell who waits for memory")
    with small_cgroup() as folder:
        [seconds] = printed_in(folder, NEEDS_MORE_MEMORY, "/var/tmp")  # on a disk
    assert float(seconds) >= 0.1


def test_the_state_of_a_process_shows_while_it_can_do_nothing() -> None:
    with other("time.sleep(60)") as (who, child):
        wait_until(lambda: who.state() == "S")
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: who.state() == "T")
        child.send_signal(signal.SIGCONT)
        wait_until(lambda: who.state() == "S")


def test_a_process_that_can_not_be_looked_at_has_not_ended() -> None:
    """This one has no descriptor left, and so can't read /proc: that is its own trouble."""

    def look() -> None:
        roster = MemoryRoster(0, 2)
        who = msgspec.structs.replace(this_process(1), pid=os.getppid(), started=parent)
        roster.put(at_key(1), msgspec.to_builtins(Vitals(who)))
        assert not see(roster, [1])[1].ended
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with pytest.raises(OSError, match="Too many open files"):
            stat(who.pid)
        seen = see(roster, [1])[1]
        assert (seen.ended, seen.there, seen.state, seen.held()) == ("", True, UNSEEN, "")

    parent = this_process(0).started
    in_a_fork(look)


# -- stacks -----------------------------------------------------------------------------------------


def test_a_process_that_holds_the_gil_has_its_stack_written() -> None:
    does = "def compute():\n    hold_the_gil(60)\ncompute()"
    with other(does, "dump") as (who, _):
        wait_until(lambda: "hold_the_gil" in who.stack())
        for _ in range(3):  # each replaces the last
            where = where_dumped(who.stack())
            assert where.startswith("its main thread is at "), where
            assert where.count("hold_the_gil") == 1
            assert "compute" in where
        assert who.stack().count("most recent call first") == 1
        assert who.state()


BUSY = """
def work():
    while True:
        sorted(range(9), key=lambda number: -number)
        try:
            with lock: raise ValueError
        except ValueError: pass
        one = threading.Thread(target=list, args=([1],)); one.start(); one.join()
import threading
lock = threading.Lock()
for _ in range(2): threading.Thread(target=work, daemon=True).start()
work()
"""


def test_a_process_that_runs_is_not_disturbed() -> None:
    """faulthandler's handler walks frames without the GIL: of code that runs it ends the process by SIGSEGV,
    after some tens of signals."""
    with other(BUSY, "dump") as (who, child):
        ends = time.monotonic() + 5
        while time.monotonic() < ends and child.poll() is None:
            who.stack()
        assert child.poll() is None


def test_a_stopped_process_writes_no_stack_and_is_not_waited_for_long() -> None:
    with other("time.sleep(60)", "dump") as (who, child):
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: who.state() == "T")
        begun = time.monotonic()
        assert who.stack() == ""
        assert time.monotonic() - begun < process.DUMP_WITHIN + 2.0


def test_a_signal_that_nobody_catches_is_not_sent() -> None:
    """It would end the process."""
    with other("time.sleep(60)", "dump") as (who, _):
        unhandled = msgspec.structs.replace(who, dump_signal=who.dump_signal - 1)
        assert unhandled.stack() == ""
        time.sleep(0.2)
        assert who.state()
        assert "most recent call first" in who.stack()
    assert who.stack() == ""


def test_a_signal_that_is_not_ours_is_not_sent() -> None:
    """Whoever writes the message: only the process itself says, by the name of its file, which one is."""
    does = """
import signal
for number in (signal.SIGTERM, signal.SIGINT, stack_dump.signal - 1):
    signal.signal(number, lambda *_: print(number, flush=True))
print("ready", flush=True)
time.sleep(60)
"""
    with other(does, "dump") as (who, child):
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for number in (signal.SIGTERM, signal.SIGINT, who.dump_signal - 1):
            assert msgspec.structs.replace(who, dump_signal=int(number)).stack() == ""
        assert "most recent call first" in who.stack(), "its handlers were not called: it rests still"
        child.send_signal(signal.SIGKILL)
        assert child.stdout.read() == ""


def test_a_process_that_has_ended_its_session_is_not_sent_a_signal() -> None:
    with other("sys.stdin.readline(); stack_dump.end(0); print(flush=True); time.sleep(60)", "dump") as (
        who,
        child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        assert who.stack() == ""
        time.sleep(0.2)
        assert who.state()


def test_a_descriptor_that_has_become_another_file_is_not_touched(tmp_path: Path) -> None:
    """The message that names it is older than that: the process could renew none, as it holds the GIL."""
    does = "import os; os.dup2(os.open(sys.argv[2], os.O_RDWR), stack_dump.file); print(flush=True); time.sleep(60)"
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_text("weights")
    with other(does, "dump", str(checkpoint)) as (who, child):
        assert child.stdout is not None
        child.stdout.readline()
        assert who.stack() == ""
        assert who.state()
    assert checkpoint.read_text() == "weights"


def caught() -> int:
    return int(process._status(os.getpid(), "SigCgt"), 16)


def test_a_signal_that_the_program_uses_is_left_to_it(tmp_path: Path) -> None:
    def use() -> None:
        with open(tmp_path / "mine", "w", encoding="utf-8") as mine:
            faulthandler.register(57, mine)  # which the `signal` module does not know of
            signal.signal(56, lambda *_: None)
            before = caught()
            dump = StackDump()
            dump.begin("a")
            dump.begin("b")
            assert dump.signal not in (0, 56, 57)
            assert caught() == before | 1 << dump.signal - 1
            dump.end("a")
            dump.end("a")
            assert dump.signal
            file = dump.file
            dump.end("b")
            assert (dump.signal, dump.file) == (0, 0)
            assert caught() == before
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(file)
            os.kill(os.getpid(), 57)
        assert "most recent call first" in (tmp_path / "mine").read_text()

    in_a_fork(use)


def test_a_process_without_a_free_signal_writes_no_stacks() -> None:
    def use() -> None:
        for number in range(40, 60):
            signal.signal(number, signal.SIG_IGN)
        dump = StackDump()
        dump.begin("a")
        assert (dump.signal, dump.file) == (0, 0)
        dump.end("a")

    in_a_fork(use)


# -- what a process does --------------------------------------------------------------------------------


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 names no thread of gloo")
def test_threads_that_wait_for_messages_of_gloo_are_no_activity() -> None:
    """They look at a clock, and use more of a core the busier the machine is."""

    def use() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        dist.all_reduce(torch.ones(1))
        names = {
            int(thread): Path(f"/proc/self/task/{thread}/comm").read_text().strip()
            for thread in os.listdir("/proc/self/task")
        }
        cpu, _ = activity()
        waits = {thread for thread, name in names.items() if name.startswith(("gloo_", "pt_gloo_"))}
        assert waits
        assert not waits & cpu.keys()
        assert threading.get_native_id() in cpu
        assert sum(cpu.values()) <= time.process_time()

    in_a_fork(use)


def test_activity_is_cpu_time_files_and_connections_of_a_process_and_its_children(tmp_path: Path) -> None:
    def use() -> None:
        def moves_nothing(act: Callable[[], object]) -> bool:
            idle = activity()[1]
            act()
            return activity()[1] == idle

        def compute() -> None:
            ends = time.process_time() + 0.3
            while time.process_time() < ends:
                pass

        before = activity()[0]
        # At some time: where memory is short, the kernel reads pages of programs again, which counts.
        wait_until(lambda: moves_nothing(lambda: time.sleep(0.3)))
        wait_until(lambda: moves_nothing(compute))
        me = threading.get_native_id()
        assert activity()[0][me] - before[me] > 0.2
        idle = activity()[1]
        (tmp_path / "f").write_bytes(bytes(1 << 16))
        written = activity()[1]
        assert written != idle
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
            with near, far:
                moved = activity()[1]
                near.send(b"x")
                assert far.recv(1) == b"x"
                wait_until(lambda: activity()[1] != moved)
        child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        wait_until(lambda: activity()[0].get(child.pid, 0.0) > 0.5)
        child.kill()
        child.wait()

    in_a_fork(use)


def test_sockets_may_be_added_while_others_are_looked_at() -> None:
    def use() -> None:
        ended = threading.Event()
        kept = [socket.socket() for _ in range(200)]
        for one in kept:
            own_sockets.add(one)

        def connect() -> None:
            while not ended.is_set():
                with socket.socket() as one:
                    own_sockets.add(one)

        sys.setswitchinterval(1e-6)
        thread = threading.Thread(target=connect)
        thread.start()
        try:
            for _ in range(600):
                next(sockets(), None)
            assert not {one.fileno() for one in kept} & {one.fileno() for one in sockets()}
        finally:
            ended.set()
            thread.join()

    in_a_fork(use)


def test_the_beat_is_no_activity() -> None:
    def use() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
        with near, far:
            own_sockets.add(near)
            own_sockets.add(far)
            before = activity()[1]
            near.send(b"beat")
            assert far.recv(4) == b"beat"
            time.sleep(0.1)
            assert activity()[1] == before

    in_a_fork(use)


def test_the_ports_of_this_process_are_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert listens(port)
            assert not listens(client.getsockname()[1]), "a connection is no listener"
        with other("", "") as (_, child):
            child.wait()
    assert not listens(port)
    with other(
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
        "time.sleep(60)"
    ) as (_, child):
        assert child.stdout is not None
        assert not listens(int(child.stdout.readline())), "it is another process that listens"


def test_a_look_at_sockets_changes_and_closes_none() -> None:
    def is_blocking(one: socket.socket) -> bool:
        return not fcntl.fcntl(one, fcntl.F_GETFL) & os.O_NONBLOCK

    ours, theirs = socket.socketpair()
    before = os.listdir("/proc/self/fd")
    socket.setdefaulttimeout(60.0)  # of the program
    try:
        with ours, theirs:
            assert {ours.fileno(), theirs.fileno()} <= {one.fileno() for one in sockets()}
            assert is_blocking(ours)
            assert not listens(1)
            next(sockets())
            ours.send(b"open")
            assert theirs.recv(4) == b"open"
            assert len(os.listdir("/proc/self/fd")) <= len(before)
    finally:
        socket.setdefaulttimeout(None)


def test_sockets_may_come_and_go_while_they_are_looked_at() -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for one in socket.socketpair():
                one.close()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(50):
            listens(1)
    finally:
        stop.set()
        thread.join()
