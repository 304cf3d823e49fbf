"""The state of a process from the kernel: whether it is alive, how it ended, what it is doing.

Nothing here needs a Python thread of that process, which may hold the GIL for minutes, or be stopped.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import secrets
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from stat import S_ISSOCK
from typing import NamedTuple
from weakref import WeakSet

import msgspec

from holdfast._core.base.threads import members

GONE = "ZX"
"""State letters of a process that has ended; its parent may not have asked for its exit code yet."""
HELD = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "in a system call, mostly of storage"}
"""The meaning of the state letters of processes that can't run."""
ENDED = "its process has ended"
"""The description of an ended process whose exit code is unknown."""
OOM = "the kernel has killed in this cgroup, as its memory was full"
UNSEEN = "?"
"""In place of a state letter that could not be read; not a sign that the process has ended."""
DUMP_WITHIN = 0.5
"""Seconds to wait for the stack of another process."""
REST = 0.05
"""Seconds without a wake-up after which a thread counts as resting."""
_SIGNALS = range(57, 49, -1)
"""Real-time signals that are tried for `StackDump`; few programs use them."""
_DUMP = "holdfast-stack"
"""Begins the names of the files in memory that stacks are written to; the number of the signal follows."""


class Stat(NamedTuple):
    """From /proc/PID/stat."""

    state: str
    cpu: float
    """Seconds of CPU time, all threads."""
    started: str
    """Start time in clock ticks; distinguishes processes with the same pid."""
    exit_status: int
    """Wait status, as for `os.waitstatus_to_exitcode`; only valid for an ended process."""


def _read(path: str) -> str:
    with suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
        return file.read().strip()
    return ""


def stat(pid: int) -> Stat | None:
    """Return the /proc entry of a process; None if it does not exist.

    Raises OSError if it can't be read, such as without free file descriptors; that proves nothing.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # The process name, in parentheses, may contain blanks and parentheses itself. So fields are
            # counted from the last one; the state is field 3 of proc(5).
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if len(fields) < 50:
        raise OSError(f"/proc/{pid}/stat has {len(fields)} fields")
    ticks = os.sysconf("SC_CLK_TCK")
    return Stat(fields[0], (int(fields[11]) + int(fields[12])) / ticks, fields[19], int(fields[49]))


def waits_in(pid: int) -> str:
    """Return the function of the kernel in which the main thread of a process sleeps; "" if it is awake, or
    if the kernel does not tell. Raises OSError if that can't be read."""
    with open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
        found = file.read().strip()
    return "" if found == "0" else found


@cache
def _of_this_process(pid: int) -> tuple[str, str, str]:
    """Return host, machine and start time of this process. The pid is an argument because a fork has
    another."""
    # Two processes with the same machine can see each other's pids. The host name would not do: a container
    # has its own pid namespace, in which pids mean other processes.
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    machine = f"{_read('/proc/sys/kernel/random/boot_id')}/{namespace}"
    started = ""
    with suppress(OSError):  # no /proc
        me = stat(pid)
        started = me.started if me is not None else ""
    return socket.gethostname(), machine, started


def oom_kills() -> int:
    """Return the number of OOM kills in this process's cgroup; 0 if unknown."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        root, name = ("/memory", "memory.oom_control") if kinds else ("", "memory.events")
        for place in (path, ""):  # a container may not see the path that its host has
            told = dict(
                one.split(" ", 1) for one in _read(f"/sys/fs/cgroup{root}{place}/{name}").splitlines()
            )
            if "oom_kill" in told:
                return int(told["oom_kill"])
    return 0


def memory_stall() -> float:
    """Return the total memory stall time in seconds (PSI) of this process's cgroup, or else of this machine:
    waits for free memory and for reclaimed pages. 0 if the kernel does not report it."""
    own = [line[3:] for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::")]
    for place in (*(f"/sys/fs/cgroup{path}/memory.pressure" for path in own), "/proc/pressure/memory"):
        if (found := re.search(r"^some .* total=(\d+)", _read(place))) is not None:
            return int(found[1]) / 1e6
    return 0.0


@cache
def _oom_kills_before(pid: int) -> int:
    """Return the number of OOM kills when this process first published its identity."""
    return oom_kills()


class Identity(msgspec.Struct, frozen=True):
    """The constant properties of a process; a part of its presence message."""

    rank: int
    host: str = ""
    pid: int = 0
    machine: str = ""
    started: str = ""
    token: str = ""
    """Random; the listener at `port` sends it first."""
    address: str = ""
    port: int = 0
    """A TCP port on which it listens (`links.Listener`); 0: none."""
    dump_signal: int = 0
    dump_file: int = 0
    """The signal on which it writes the stack of its main thread, and its descriptor that this goes to; 0: it
    does not."""

    def is_of_this_machine(self) -> bool:
        """Return whether /proc here shows that process."""
        return bool(self.started) and self.machine == _of_this_process(os.getpid())[1]

    def stat(self) -> Stat | None:
        """Return its /proc entry; None if there is none. Only for a process of this machine."""
        try:
            now = stat(self.pid)
        except OSError:
            return Stat(UNSEEN, 0.0, self.started, 0)
        return now if now is not None and now.started == self.started else None

    def state(self) -> str:
        """Return its state letter; "" if it has ended."""
        now = self.stat()
        return now.state if now is not None and now.state not in GONE else ""

    def how_it_ended(self) -> str:
        """Return a description of its end, with the exit code while the kernel still knows it."""
        last = self.stat()
        if last is None or last.state not in GONE:
            return ENDED
        code = os.waitstatus_to_exitcode(last.exit_status)
        if code >= 0:
            return f"its process has ended with exit code {code}"
        if -code == signal.SIGKILL and oom_kills() > _oom_kills_before(os.getpid()):
            return f"its process was killed by SIGKILL; {OOM}"
        with suppress(ValueError):
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process was killed by signal {-code}"

    def exited_with_0(self) -> bool:
        """Return whether it has ended with exit code 0, as far as the kernel still knows."""
        last = self.stat()
        return last is not None and last.state in GONE and last.exit_status == 0

    def rests(self) -> bool:
        """Return whether its main thread stays blocked in one system call for `REST` seconds."""
        before = wakes(self.pid)
        time.sleep(REST)
        # In this order: a thread that goes on between the two looks, and sleeps again, is asleep still.
        return 0 < before == wakes(self.pid) and self.state() == "S"

    def stack(self) -> str:
        """Have a process of this machine dump the stack of its main thread, and return it; "" if it does not.

        faulthandler's signal handler writes it, which needs no GIL. Only while that thread rests: of frames
        that change meanwhile, its own or those of other threads, the handler ends the process by SIGSEGV.
        """
        if not self.dump_signal or not self.rests():
            return ""
        # The message may be old, or a stranger's: what counts is that this process has such a file, and that
        # its name has the signal for which `StackDump` has set a handler there. Most others end a process.
        caught = _status(self.pid, "SigCgt")
        if not caught or not int(caught, 16) >> (self.dump_signal - 1) & 1:
            return ""
        path = f"/proc/{self.pid}/fd/{self.dump_file}"
        try:
            if not _is_dump(path, self.dump_signal):
                return ""
            with _open_process(self.pid) as process, open(path, "r+b") as file:
                if not self.state() or not _is_dump(f"/proc/self/fd/{file.fileno()}", self.dump_signal):
                    return ""
                file.truncate(0)
                signal.pidfd_send_signal(process, self.dump_signal)
                ends, size = time.monotonic() + DUMP_WITHIN, -1
                while time.monotonic() < ends and (size <= 0 or os.fstat(file.fileno()).st_size != size):
                    size = os.fstat(file.fileno()).st_size
                    time.sleep(0.02)
                return file.read(1 << 20).decode(errors="replace")
        except OSError:  # it has ended meanwhile, or belongs to another user
            return ""


@contextmanager
def _open_process(pid: int) -> Iterator[int]:
    """Yield a pidfd: a signal sent through it can't reach another process that reuses the pid."""
    process = os.pidfd_open(pid)
    try:
        yield process
    finally:
        os.close(process)


def _is_dump(path: str, number: int) -> bool:
    return number in _SIGNALS and os.readlink(path).startswith(f"/memfd:{_DUMP}-{number} ")


def _status(pid: int, field: str) -> str:
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(field + ":"):
            return line.partition(":")[2].strip()
    return ""


def wakes(thread: int) -> int:
    """Return how many times a thread has blocked and been woken so far; 0 if unknown."""
    return int(_status(thread, "voluntary_ctxt_switches") or 0)


own_sockets: WeakSet[socket.socket] = WeakSet()
"""Holdfast's own connections, whose traffic does not count as activity of the program."""


def sockets() -> Iterator[socket.socket]:
    """Yield every socket of this process except `own_sockets`, for inspection only."""
    own = {one.fileno() for one in members(own_sockets)}
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if number not in own and S_ISSOCK(os.fstat(number).st_mode):
                # With this flag Python changes nothing; else `socket.setdefaulttimeout` of the program would
                # make every socket return at once.
                one = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=number)
                try:
                    yield one
                finally:
                    one.detach()


def listens(port: int) -> bool:
    """Return whether this process listens on a TCP port."""
    with suppress(OSError):  # no /proc
        for one in sockets():
            with suppress(OSError, IndexError):
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and one.getsockname()[1] == port:
                    return True
    return False


def this_process(rank: int) -> Identity:
    """Return the identity of this process, without a port."""
    pid = os.getpid()
    _oom_kills_before(pid)
    host, machine, started = _of_this_process(pid)
    return Identity(rank, host, pid, machine, started, secrets.token_hex(8))


class StackDump:
    """A signal handler with which other processes of this host get the stack of this one (`Identity.stack`);
    installed while it has users."""

    def __init__(self) -> None:
        self.signal = self.file = 0
        self._users: set[object] = set()

    def begin(self, user: object) -> None:
        if not self._users:
            self._register()
        self._users.add(user)

    def end(self, user: object) -> None:
        self._users.discard(user)
        if not self._users and self.signal:
            faulthandler.unregister(self.signal)
            os.close(self.file)
            self.signal = self.file = 0

    def _register(self) -> None:
        # Of handlers in C, `faulthandler.register` of the program among them, only the kernel knows.
        masks = [int(_status(os.getpid(), field) or "0", 16) for field in ("SigCgt", "SigIgn")]
        free = [number for number in _SIGNALS if not any(mask >> (number - 1) & 1 for mask in masks)]
        if not free:
            return
        with suppress(OSError, AttributeError):  # another system than Linux
            file = os.memfd_create(f"{_DUMP}-{free[0]}")
            # The reader cuts it to nothing first.
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
            faulthandler.register(free[0], file, all_threads=False)
            self.signal, self.file = free[0], file


stack_dump = StackDump()


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process."""
    children: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            children += map(int, _read(f"/proc/{pid}/task/{task}/children").split())
    return children


_POLLING = ("gloo_", "pt_gloo_", "pt_nccl_", "pt_tcpstore_")
"""Name prefixes of torch's and gloo's polling threads. They use a few per cent of a core on a busy machine
without any work of their own; the bytes that they transfer are counted. torch 2.6 names none of them."""


def activity() -> tuple[dict[int, float], list[int]]:
    """Return seconds of CPU time, by the id of each thread of this process and of each child, with 0 for
    threads that have ended, without threads that only wait for messages; and counts of the bytes that they
    have moved so far, in files and over TCP connections of this process that are not Holdfast's."""
    family = [os.getpid()]
    for pid in family:
        family += children_of(pid)
    cpu, total = {}, time.process_time()
    for thread in os.listdir("/proc/self/task"):
        # In nanoseconds: `stat` counts in hundredths, which many threads together would blur.
        ran = _read(f"/proc/self/task/{thread}/schedstat").split()
        seconds = int(ran[0]) / 1e9 if ran else 0.0
        total -= seconds
        if not _read(f"/proc/self/task/{thread}/comm").startswith(_POLLING):
            cpu[int(thread)] = seconds
    cpu[0] = total
    for pid in family[1:]:
        with suppress(OSError):
            now = stat(pid)
            cpu[pid] = now.cpu if now is not None else 0.0
    return cpu, [*family, *map(_bytes_of, family), sum(map(_bytes_over, sockets()))]


def _bytes_of(pid: int) -> int:
    # Without `rchar`: it counts what is read of /proc, too.
    counted = ("wchar", "read_bytes", "write_bytes")
    lines = (line.partition(": ") for line in _read(f"/proc/{pid}/io").splitlines())
    return sum(int(value) for name, _, value in lines if name in counted)


def _bytes_over(connection: socket.socket) -> int:
    """Return the bytes that a TCP connection has received, and sent with success."""
    with suppress(OSError, struct.error):
        # struct tcp_info of linux/tcp.h: bytes_acked and bytes_received, since Linux 4.1.
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        return sum(struct.unpack_from("=2Q", info, 120))
    return 0
