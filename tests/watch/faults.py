"""Injected faults over eight real ranks of gloo, and what the roll call says of each.

    python -m tests.watch.faults [NAME...]

runs them and prints a table: the fault, what is right, what was said, and what torch's own analysis of flight
records (`torchfrtrace`) says of the same job. What is right stands in `FAULTS`; which cause counts as proven was
written down with the rules, as they told causes of other classes before. A program is in `fault_jobs`. A run is over as soon as the result of the call was told.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from click.testing import CliRunner

from holdfast._tools.cli.doctor import command as doctor
from holdfast._watch.diagnose import diagnose
from holdfast._watch.read import read_all
from holdfast._watch.shared_call import ROLL_CALLS, wait_for_answers
from holdfast._watch.verdict import Diagnosis, listed
from tests.support.hosts import Hosts
from tests.support.waiting import wait_until

RANKS = 8
TIMEOUT = 10.0
"""Seconds of the groups' timeout: a call comes after half of it."""
NETWORK = 0x40000000
"""CLONE_NEWNET of setns(2)."""
LIMIT = 60.0
"""Seconds after which a run is over without a call."""


class Fault(NamedTuple):
    """One way to hang, and what is right to say of it."""

    job: str
    why: str
    """The cause that is proven; "": none can be."""
    ranks: tuple[int, ...] | None
    """Those who are not there; empty: nobody; None: all have a part in it."""
    seconds: float = TIMEOUT
    comes: bool = False
    """Does the rank come in the end? That must be told, too."""
    asked: bool = False
    """Does nothing show the wait, so that somebody asks for the call?"""
    jobs: int = 1
    """How many jobs the ranks are, each with a world and a store of its own."""
    network: str = ""
    """`data`: each rank has a network of its own for its collectives, and all are cut. `hosts`: ranks are on two
    hosts, and the second is cut off."""


FAULTS = (
    Fault("asleep", "", (3,)),
    Fault("with_the_gil", "", (3,)),
    Fault("stopped", "stopped", (3,)),
    Fault("with_a_lock", "", (3,)),
    Fault("in_a_deadlock", "", (3,)),
    Fault("in_storage", "", (3,)),
    Fault("behind_a_server", "", (3,)),
    Fault("behind_a_child", "", (3,)),
    Fault("polls", "", (3,)),
    Fault("spins", "", (3,)),
    Fault("in_its_loader", "", (3,)),
    Fault("in_a_pipeline", "", (3,)),
    Fault("in_a_subgroup", "", (3,)),
    Fault("before_a_group_opens", "", (3,), asked=True),
    Fault("opens_groups_in_another_order", "", (3,), asked=True),
    Fault("before_our_save", "", (3,), 12.0),
    Fault("late", "", (3,), 4 * TIMEOUT, comes=True),
    Fault("late_and_slow_to_answer", "", (3,), 4 * TIMEOUT, comes=True),
    Fault("two_are_late", "", (3, 5)),
    Fault("plans_a_checkpoint", "", (0,)),
    Fault("in_a_long_call", "", (3,)),
    Fault("behind_a_child_that_works", "", (3,)),
    Fault("in_another_order", "cycle", (3,)),
    Fault("one_behind", "", (3,)),
    Fault("leaves_one_out", "", (3,)),
    Fault("one_more", "cycle", (3,)),
    Fault("suppressed", "cycle", (3,)),
    Fault("skips_a_send", "cycle", (3,)),
    Fault("another_operation", "mismatch", (3,)),
    Fault("another_shape", "mismatch", (3,)),
    Fault("fewer_batches", "cycle", (3,)),
    Fault("fewer_batches_and_works", "", (3,)),
    Fault("on_two_threads", "mismatch", None),
    Fault("dies", "died", (3,)),
    Fault("hangs_at_its_exit", "", (3,)),
    Fault("trainer_and_engine", "cycle", None, jobs=2),
    Fault("all_alike", "", (), network="data"),
    Fault("on_a_dead_host", "unreachable", (6, 7), 2 * TIMEOUT, network="hosts"),
)


SILENT = frozenset({"skips_a_send"})
"""Faults of which the result names nobody."""
HEALTHY = Fault("healthy", "", None, 6.0)
"""No fault: nobody may call."""


class Outcome(NamedTuple):
    """What was said of one fault."""

    fault: Fault
    found: Diagnosis | None
    told: list[str]
    """What the ranks have logged."""
    peer: str
    """What torch's analysis of the flight records says."""
    peer_ranks: tuple[int, ...] | None
    """Those that it names; None: nothing."""

    @property
    def who(self) -> tuple[int, ...] | None:
        return self.found.who.ranks if self.found is not None and self.found.who is not None else None

    @property
    def why(self) -> str:
        return self.found.why.kind if self.found is not None and self.found.why is not None else ""

    @property
    def judged(self) -> str:
        if self.who == self.fault.ranks and self.why == self.fault.why:
            return "right"
        wrong_why = self.why not in ("", self.fault.why)
        wrong_who = self.who is not None and not set(self.who) <= set(self.fault.ranks or ())
        return "WRONG" if wrong_why or wrong_who else "silent" if self.who is None else "in part"


class Told(logging.Handler):
    """Writes what the library logs to a file, a line of JSON each."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (lives as long as the process)

    def emit(self, record: logging.LogRecord) -> None:
        self._file.write(json.dumps(record.getMessage()) + "\n")


# -- one rank -----------------------------------------------------------------------------------------------


def serve(rank: int, store_at: tuple[str, int], fault: Fault, folder: str, namespace: str = "") -> None:
    """Be one rank of a job: some steps of training, then the fault."""
    with contextlib.suppress(PermissionError):
        os.setsid()  # with its children it is ended
    root = Path(folder)
    os.dup2(os.open(root / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    os.environ |= {
        "HOLDFAST_ROLL_CALLS": folder,
        "GLOO_SOCKET_IFNAME": "eth0" if fault.network == "hosts" else "lo",
        "OMP_NUM_THREADS": "1",
    }
    import torch
    import torch.distributed as dist

    import holdfast
    from tests.watch.fault_jobs import JOBS, LONG, Job, all_reduce

    torch.set_num_threads(1)
    logging.getLogger("holdfast").addHandler(Told(root / f"told-{rank}"))
    store = dist.TCPStore(*store_at, is_master=False)  # type: ignore[attr-defined]
    size = RANKS // fault.jobs
    number, own = divmod(rank, size)
    store_of_job = dist.PrefixStore(f"job-{number}", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store_of_job, rank=own, world_size=size)
    limit = timedelta(seconds=fault.seconds)
    with inside(namespace):
        train = dist.new_group(timeout=limit, group_desc="train")
    other = dist.new_group(timeout=limit, group_desc="other")
    holdfast.install(checkpoints=False, guard=False)
    session = contextlib.nullcontext() if fault.network != "hosts" else _session()
    with session:
        _wait_for_all(size)
        job = Job(rank, train, other, fault.seconds, folder, store)
        for group in (train, other) * 3:
            all_reduce(group)
        _dump(root, rank)
        threading.Thread(target=_record, args=(root, rank), name="recorder", daemon=True).start()
        try:
            JOBS[fault.job](job)
            (root / f"done-{rank}").touch()
            if fault.comes:
                wait_until(lambda: is_over(root, fault), LIMIT)
        except RuntimeError:  # gloo notices at once that a peer is gone; NCCL does not, and waits
            time.sleep(LONG)


def _session() -> Any:
    """Ranks that watch each other; the kernel's probes are quicker here than in use."""
    import holdfast
    from holdfast._core.roster import links

    links._PROBES.update(TCP_KEEPIDLE=1, TCP_KEEPINTVL=1, TCP_KEEPCNT=2)
    return holdfast.session(warm=False)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Make sockets in another namespace of networks, on this thread and those that it starts."""
    if not namespace:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    with open("/proc/self/ns/net", "rb") as here, open(f"/var/run/netns/{namespace}", "rb") as there:
        try:
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
            assert libc.setns(there.fileno(), NETWORK) == 0
            yield
        finally:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
            assert libc.setns(here.fileno(), NETWORK) == 0


def _wait_for_all(size: int) -> None:
    """A rank that never showed itself can't be looked at by others."""
    from holdfast._core.protocol.call import find_roster
    from holdfast._core.protocol.job import Job
    from holdfast._core.roster.presence import at_key

    roster = find_roster(Job()).base()
    wait_until(lambda: None not in roster.get([at_key(rank) for rank in range(size)]))


def _record(root: Path, rank: int) -> None:
    """Write the flight record when the call is over, as NCCL's watchdog does at the timeout."""
    while not (root / "over").exists():
        time.sleep(0.2)
    _dump(root, rank)


def _dump(root: Path, rank: int) -> None:
    from torch._C import _distributed_c10d as c10d

    from holdfast._core.torch_private import known_groups

    record = pickle.loads(c10d._dump_fr_trace())  # type: ignore[attr-defined]
    # gloo's has no list of groups, and torchfrtrace fails without; NCCL's has it in this form.
    record["pg_config"] = {
        group.name: {"name": group.name, "desc": group.description, "ranks": str(list(group.ranks))}
        for group in known_groups()
    }
    part = root / f"part-{rank}"
    part.write_bytes(pickle.dumps(record))
    part.rename(root / "traces" / f"trace_{rank}")


# -- the driver ---------------------------------------------------------------------------------------------


def run(fault: Fault, folder: Path) -> Outcome:
    """Run a job that hangs in one way, until the result of its call was told."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    context = mp.get_context("forkserver")
    (folder / "traces").mkdir(parents=True)
    with contextlib.ExitStack() as after:
        hosts = Hosts(2 if fault.network == "hosts" else RANKS)
        if fault.network:
            after.enter_context(hosts)
        if fault.network == "hosts":
            command = [sys.executable, "-m", "tests.watch.faults"]
            serving = hosts.start(0, [*command, "store"])
            assert serving.stdout is not None
            port = int(serving.stdout.readline())
            for rank in range(RANKS):
                where = [fault.job, str(rank), hosts.address(0), str(port), str(folder)]
                hosts.start(int(rank >= 6), [*command, "rank", *where])
        else:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for rank in range(RANKS):
                namespace = hosts.name(rank) if fault.network else ""
                where = (rank, ("127.0.0.1", store.port), fault, str(folder), namespace)
                one = context.Process(target=serve, args=where)
                one.start()
                after.callback(_end, one)
        with contextlib.suppress(AssertionError):  # no call: that is a result
            wait_until(lambda: len(list((folder / "traces").iterdir())) == RANKS, 2 * LIMIT)
            if fault.asked:
                asked = CliRunner().invoke(doctor, ["--all", str(folder)])
                (folder / "doctor").write_text(asked.output)
            for host in {"": (), "data": range(RANKS), "hosts": (1,)}[fault.network]:
                hosts.pull(host)
            (folder / "cut").touch()
            wait_until(lambda: is_over(folder, fault) or is_told(folder), LIMIT)
        for call in (folder / ROLL_CALLS).glob("*"):
            wait_for_answers(str(call), 3.0)  # files are written on threads of their own
        before = {path: path.stat().st_mtime_ns for path in (folder / "traces").iterdir()}
        (folder / "over").touch()
        with contextlib.suppress(AssertionError):  # one that is stopped has only its record of before
            wait_until(lambda: all(path.stat().st_mtime_ns > at for path, at in before.items()), 2.0)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: is_over(folder, fault), LIMIT if fault.comes else 0.1)
    calls = folder / ROLL_CALLS
    found = diagnose(read_all([str(folder)])) if calls.is_dir() else None
    return Outcome(fault, found, told(folder), *peer_says(folder / "traces"))


def _end(rank: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.pid, signal.SIGKILL)
    rank.kill()
    rank.join(10)


def told(folder: Path) -> list[str]:
    return [json.loads(line) for path in folder.glob("told-*") for line in path.read_text().splitlines()]


def is_told(folder: Path) -> bool:
    return any(text.startswith("Roll call of") for text in told(folder))


def is_over(folder: Path, fault: Fault) -> bool:
    if fault is HEALTHY:
        return len(list(folder.glob("done-*"))) == RANKS
    came = any("is over, after" in text for text in told(folder))
    return is_told(folder) and (came or not fault.comes)


def peer_says(folder: Path) -> tuple[str, tuple[int, ...] | None]:
    """Return what torch's analysis says of the first collective that does not match, and whom it names."""
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.fr_logger import FlightRecorderLogger
    from torch.distributed.flight_recorder.components.loader import read_dir

    arguments = JobConfig().parse_args([str(folder), "--prefix", "trace_", "--allow-incomplete-ranks"])
    FlightRecorderLogger().set_log_level(logging.CRITICAL)  # else it writes its findings to the terminal
    try:
        details, version = read_dir(arguments)
        found = build_db(details, arguments, version)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {str(error)[:60]}", None
    for one in found.collectives:
        if not one.pass_check or one.missing_ranks:
            others = one.mismatch_collectives or {}
            kinds = sorted({other.type_of_mismatch.state.name for other in others.values()})
            named = set(one.missing_ranks or ()) or set(others)
            what = ", ".join(kinds) or "missing"
            return f"{what} at {one.collective_seq_id} of {one.pg_desc}: {listed(named)}", tuple(
                sorted(named)
            )
    return "nothing", None


def table(outcomes: list[Outcome]) -> str:
    """Return the result as a table of Markdown."""
    lines = ["| fault | who is right | who | why is right | why | judged | torchfrtrace |", "|---" * 7 + "|"]
    for one in outcomes:
        who, why = expected(one.fault)
        cells = (
            f"`{one.fault.job}`",
            who,
            _of(one.who),
            why,
            one.why,
            one.judged,
            one.peer,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def expected(fault: Fault) -> tuple[str, str]:
    """Return who and why is right of a fault, as the table has them."""
    return _of(fault.ranks), fault.why


def score(outcomes: list[Outcome]) -> str:
    """Say how often the roll call is right, and how often torch's analysis names just the ranks to blame."""
    judged = [one.judged for one in outcomes]
    counts = ", ".join(f"{judged.count(word)} {word}" for word in ("right", "in part", "silent", "WRONG"))
    guilty = [one for one in outcomes if one.fault.ranks]
    named = sum(one.peer_ranks == one.fault.ranks for one in guilty)
    return f"{len(outcomes)} faults: {counts}; torchfrtrace names the ranks of {named} of {len(guilty)}"


def _of(ranks: tuple[int, ...] | None) -> str:
    return "-" if ranks is None else listed(ranks) if ranks else "nobody"


def main(names: list[str]) -> None:
    outcomes = []
    for fault in FAULTS:
        if names and fault.job not in names:
            continue
        with tempfile.TemporaryDirectory(prefix="holdfast-fault-") as folder:
            one = run(fault, Path(folder))
        outcomes.append(one)
        print(table([one]).splitlines()[-1], flush=True)
        if one.judged != "right":
            print(*(text for text in one.told if "oll call" in text), sep="\n")
    print(table(outcomes), score(outcomes), sep="\n\n")


def serve_store() -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()  # it serves until its host is gone


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["store"]:
            serve_store()
        case ["rank", name, rank, host, port, folder]:
            serve(int(rank), (host, int(port)), next(one for one in FAULTS if one.job == name), folder)
        case names:
            main(names)
