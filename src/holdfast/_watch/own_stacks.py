"""Evidence of this process: the stacks of its threads, its pending collectives, and its phase."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import FrameType

import msgspec
import torch.distributed as dist

from holdfast import events
from holdfast._core.process.exits import uncaught
from holdfast._core.roster.beacon import Presence
from holdfast._core.roster.process import activity, memory_stall
from holdfast._core.torch_private import flight_records, known_groups
from holdfast._watch.collector import Collector
from holdfast._watch.dumps import MOST_CALLS, RecordedGroups, groups_of, operations_of, progress_of
from holdfast._watch.evidence import (
    AT_EXIT,
    OPERATION,
    OURS,
    ROLL_CALL,
    Ending,
    Frame,
    GroupOperation,
    Rank,
    Stack,
    is_of_a_library,
)
from holdfast._watch.log_lines import CONSEQUENCE
from holdfast._watch.names import group_name
from holdfast._watch.own_calls import calls_of, number_of, variables
from holdfast._watch.own_threads import runs, with_joined
from holdfast._watch.shared_call import is_own

_OPENS = "_new_process_group_helper"
"""torch's function that creates a process group."""
_OF_A_PEER = {"send", "recv", "broadcast"}
"""torch's functions that wait for one rank."""


def stacks_here() -> tuple[Stack, ...]:
    """Return the stacks of the program's threads, the main thread first."""
    frames = sys._current_frames()
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not main)
    ours = [
        ("MainThread" if thread is main else thread.name, thread.ident, frames[thread.ident])
        for thread in threads
        if thread.ident in frames and (not thread.name.startswith("holdfast-") or thread.name == OPERATION)
    ]
    return with_joined([_stack(*one) for one in ours], [frame for _, _, frame in ours])


def activity_here() -> tuple[float, float, float]:
    """Return the CPU seconds of the program's threads and children, the bytes they have transferred, and the
    seconds that the host was stalled on memory; zeros where that can't be read. A child that starts or ends
    counts as a transfer, too."""
    with suppress(OSError, ValueError):
        cpu, moved = activity()
        ours = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("holdfast-")}
        return sum(cpu[thread] for thread in cpu.keys() - ours), float(sum(moved)), memory_stall()
    return 0.0, 0.0, 0.0


def _stack(thread: str, ident: int | None, frame: FrameType | None) -> Stack:
    # Read all line numbers first: the thread may be running.
    read: list[tuple[FrameType, int | None]] = []
    while frame is not None and len(read) < MOST_CALLS:
        read.append((frame, frame.f_lineno))
        frame = frame.f_back
    calls = tuple(Frame(one.f_code.co_name, one.f_code.co_filename, line) for one, line in read)
    # The main thread counts as ended as soon as `threading._shutdown`, a visible frame, joins the others.
    has_ended = thread == "MainThread" and not threading.main_thread().is_alive()
    if has_ended and calls[-1].function != "_shutdown":
        calls += (AT_EXIT,)
    names = _names(frame for frame, _ in read)
    if not is_of_a_library(calls[0]):
        names |= calls_of([one for one, _ in read])
    else:
        names |= runs(read[0][0])
    return Stack(thread, calls, ROLL_CALL, names, str(ident))


def _names(frames: Iterable[FrameType]) -> dict[str, str]:
    """Return the group that a thread is creating, as no record has it yet, or else the group of the function
    of torch that it is in, and the rank that it waits for."""
    for frame in frames:
        code = frame.f_code
        if code.co_name == _OPENS:
            known = variables(frame)
            ranks = known.get("global_ranks_in_group")
            members = ",".join(map(str, ranks)) if isinstance(ranks, list) else ""
            return {"group_name": str(known.get("group_name")), "members": members}
        if code.co_filename.endswith("distributed_c10d.py"):
            known = variables(frame)
            if "group" in known:
                return _group(known) | (_peer(known) if code.co_name in _OF_A_PEER else {})
    return {}


def _group(known: Mapping[str, object]) -> dict[str, str]:
    group = known["group"] or dist.group.WORLD
    with suppress(RuntimeError):  # the group is destroyed
        name, description = (str(getattr(group, f"group_{what}", "")) for what in ("name", "desc"))
        return {"in": group_name(name, description)} if name else {}
    return {}


def _peer(known: Mapping[str, object]) -> dict[str, str]:
    peer, local = (known.get(f"{of}src", known.get(f"{of}dst")) for of in ("", "group_"))
    if not isinstance(peer, int) and isinstance(local, int):
        with suppress(ValueError, RuntimeError):  # the group is destroyed
            peer = dist.get_global_rank(known.get("group") or dist.group.WORLD, local)  # type: ignore[arg-type]
    return {"peer": str(peer), **_message(known)} if isinstance(peer, int) else {}


def _message(known: Mapping[str, object]) -> dict[str, str]:
    """Return what tells a message from others, by the variables of `send` or `recv`."""
    work, tag = known.get("work"), known.get("tag")
    found = {"tag": str(tag)} if isinstance(tag, int) else {}
    group = known.get("group") or dist.group.WORLD
    with suppress(RuntimeError):  # the group is destroyed
        found["of"] = str(getattr(group, "group_name", ""))
    return found | ({"message": number_of(work)} if work is not None else {})


class OwnEvidence:
    """The evidence about this rank: a first sample and, some seconds later, a second one."""

    def __init__(self, rank: int, presences: list[Presence]) -> None:
        collector, self._groups = Collector(), list[RecordedGroups]()
        self._at = time.time()
        for record in flight_records(entries=True):
            self._groups.append(operations_of(record, collector, ROLL_CALL, rank, self._at))
        members = {group_name(group.name, group.description): group.ranks for group in known_groups()}
        # Groups named by the program may have members from another job.
        self.members = {name: ranks for name, ranks in members.items() if is_own(name) and min(ranks) == rank}
        """Members of the groups in which this rank is the first; another rank reports the rest."""
        for presence in presences:
            if (own := _operation(presence)) is not None:
                collector.note_operation(rank, own)
                # The first rank that has come reports the members.
                if rank == min(set(presence.participants) - set(presence.waiting_for or ()), default=None):
                    self.members[own.group] = tuple(presence.participants)
        recorded = collector.evidence().ranks.get(rank, Rank(rank))
        self.found = msgspec.structs.replace(
            recorded, stacks=stacks_here(), phase=events.phase_now(), endings=_raised()
        )

    def again(self, presences: list[Presence], later: tuple[Stack, ...]) -> Rank:
        """Return the evidence, updated with current sequence numbers: a completed operation was no hang.

        later: the stacks of the second sample.
        """
        passed = time.time() - self._at
        # Collectives since then have their numbers in the entries, which take longer to read.
        by_entries = any(groups.have_messages for groups in self._groups)
        progress = {
            one.group: one
            for record, groups in zip(flight_records(entries=by_entries), self._groups, strict=False)
            for one in progress_of(record, groups_of(record) if by_entries else groups, ROLL_CALL)
        }
        waits = {(one.group, one.number) for one in map(_operation, presences) if one is not None}

        def is_over(one: GroupOperation) -> bool:
            if one.is_ours:
                return (one.group, one.number) not in waits
            is_done = one.group in progress and one.number <= progress[one.group].completed
            return is_done and not self._has_failed(one, passed)

        operations = tuple(
            msgspec.structs.replace(one, state="completed") if one.is_pending and is_over(one) else one
            for one in self.found.operations
        )
        if any(one.is_pending and self._has_failed(one, passed) for one in self.found.operations):
            # After a timeout the program may be elsewhere: keep the stacks from before.
            return msgspec.structs.replace(self.found, operations=operations)
        newest = tuple(progress.values()) or self.found.progress
        return msgspec.structs.replace(self.found, operations=operations, progress=newest, later=later)

    def _has_failed(self, one: GroupOperation, passed: float) -> bool:
        """Return whether an operation has reached its timeout: the record shows only that it is over."""
        return one.limit is not None and one.seconds is not None and one.seconds + passed >= one.limit


def _raised() -> tuple[Ending, ...]:
    """Return the error that ended the program, if any, while the process is exiting."""
    error = None if threading.main_thread().is_alive() else uncaught()
    if error is None:
        return ()
    what = "".join(traceback.format_exception_only(error)).strip()[:300]
    return (Ending(what, ROLL_CALL, is_cause=CONSEQUENCE.search(what) is None),)


def _operation(presence: Presence) -> GroupOperation | None:
    """Return one of Holdfast's own waits as an operation of a group; None if it waits for no rank."""
    # A key is `<kind>/<signature>/<generation>.<number>/<attempt>` (`rendezvous.meet`).
    group, _, number = presence.operation.rpartition("/")[0].rpartition(".")
    if not presence.waiting_for or not number.isdecimal():
        return None
    return GroupOperation(f"{OURS}{group}", int(number) + 1, presence.title, "started", ROLL_CALL)
