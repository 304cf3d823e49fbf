"""Evidence of this process: the stacks of its threads, its pending collectives, and its phase."""

from __future__ import annotations

import dis
import inspect
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from types import CodeType, FrameType

import msgspec

from holdfast import events
from holdfast._exits import uncaught
from holdfast._roster.beacon import Presence
from holdfast._roster.process import activity, memory_stall, wakes
from holdfast._torch_private import flight_records, known_groups
from holdfast._watch.collector import Collector
from holdfast._watch.dumps import MOST_CALLS, operations_of
from holdfast._watch.evidence import (
    AT_EXIT,
    OPERATION,
    Call,
    Ending,
    Operation,
    Rank,
    Source,
    Stack,
    is_of_a_library,
)
from holdfast._watch.log_lines import CONSEQUENCE
from holdfast._watch.shared_call import is_own
from holdfast._watch.ways import way_of

_HERE = Source("roll call")
_OPENS = "_new_process_group_helper"
"""torch's function that opens a group."""
_GIVE_LOCALS = {"locals", "vars", "eval", "exec"}


def stacks_here(ways: bool = False) -> tuple[Stack, ...]:
    """Return where the threads of the program are, the main thread first; with `ways`, also where they can
    go from there, which takes some milliseconds."""
    frames = sys._current_frames()
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not main)
    return tuple(
        _stack("MainThread" if thread is main else thread.name, frames[thread.ident], ways)
        for thread in threads
        if thread.ident in frames and (not thread.name.startswith("holdfast-") or thread.name == OPERATION)
    )


def activity_here() -> tuple[float, float, int, float]:
    """Return the seconds of CPU time of the program's threads and children, the bytes that these have moved,
    how often the main thread has waited and gone on, and the seconds in which the machine has waited for
    memory; zeros where that can't be read. A child that comes or goes counts as movement, too."""
    with suppress(OSError, ValueError):
        cpu, moved = activity()
        ours = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("holdfast-")}
        woken = wakes(threading.main_thread().native_id or 0)
        return sum(cpu[thread] for thread in cpu.keys() - ours), float(sum(moved)), woken, memory_stall()
    return 0.0, 0.0, 0, 0.0


def _stack(thread: str, frame: FrameType | None, with_ways: bool) -> Stack:
    # All are read first: the thread may go on meanwhile.
    read: list[tuple[FrameType, int, int | None]] = []
    while frame is not None and len(read) < MOST_CALLS:
        read.append((frame, frame.f_lasti, frame.f_lineno))
        frame = frame.f_back
    calls = tuple(Call(one.f_code.co_name, one.f_code.co_filename, line) for one, _, line in read)
    # The main thread counts as ended from the joins of `threading._shutdown` on, a call that can be seen.
    has_ended = thread == "MainThread" and not threading.main_thread().is_alive()
    if has_ended and calls[-1].function != "_shutdown":
        calls += (AT_EXIT,)
    ways = [
        None if is_of_a_library(call) else way_of(one.f_code, at, _variables(one))
        for call, (one, at, _) in zip(calls, read, strict=False)
        if with_ways
    ]
    # A group that is being opened stands in no record yet.
    opened = [_variables(one).get("group_name") for one, _, _ in read if one.f_code.co_name == _OPENS]
    names = {"group_name": str(opened[0])} if opened else {}
    return Stack(thread, calls, _HERE, names, ways=tuple(ways))


def _variables(frame: FrameType) -> Mapping[str, object]:
    """Return the variables of a frame, and change nothing in it.

    Before Python 3.13, a function that is looked at keeps a dict of all its values to its end: tensors that
    it deletes are not freed. It is the dict that `locals()` gives, and a debugger writes back from it.
    """
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return frame.f_locals
    if frame.f_trace is not None or _gives_locals(frame.f_code):
        return {}
    kept = frame.f_locals
    found = dict(kept)
    kept.clear()
    return found


def _gives_locals(code: CodeType) -> bool:
    """Return whether a function calls what has the dict of its values; `model.eval` is none of them."""
    return not _GIVE_LOCALS.isdisjoint(code.co_names) and any(
        one.opname == "LOAD_GLOBAL" and one.argval in _GIVE_LOCALS for one in dis.get_instructions(code)
    )


def evidence_here(rank: int, presences: list[Presence]) -> tuple[Rank, dict[str, tuple[int, ...]]]:
    """Return what is known of this rank and of its operations, and the members of the groups of which it is
    the first."""
    collector = Collector()
    for record in flight_records(entries=True):
        operations_of(record, collector, _HERE, rank)
    for presence in presences:
        if (operation := _operation(presence)) is not None:
            collector.note_operation(rank, operation)
    recorded = collector.evidence().ranks.get(rank, Rank(rank))
    members = {
        f"{group.name}:{group.description}" if group.description else group.name: group.ranks
        for group in known_groups()
    }
    # Of groups that the program has named itself, some members may be of another job.
    members = {name: ranks for name, ranks in members.items() if is_own(name) and min(ranks) == rank}
    for presence in presences:
        operation, waited_for = _operation(presence), set(presence.waiting_for or ())
        # The first that is in it tells.
        if operation is not None and rank == min(set(presence.participants) - waited_for, default=None):
            members[operation.group] = tuple(presence.participants)
    stacks, phase = stacks_here(ways=True), events.phase_now()
    return msgspec.structs.replace(recorded, stacks=stacks, phase=phase, endings=_raised()), members


def _raised() -> tuple[Ending, ...]:
    """Return what has ended the program, if it was an error and the process is still there."""
    error = None if threading.main_thread().is_alive() else uncaught()
    if error is None:
        return ()
    what = "".join(traceback.format_exception_only(error)).strip()[:300]
    return (Ending(what, _HERE, is_cause=CONSEQUENCE.search(what) is None),)


def _operation(presence: Presence) -> Operation | None:
    """Return a wait of Holdfast's own as an operation of a group; None if it waits for nobody."""
    # A key is `<kind>/<signature>/<generation>.<number>` (`rendezvous.History.begin`).
    group, _, number = presence.operation.rpartition(".")
    if not presence.waiting_for or not number.isdecimal():
        return None
    return Operation(f"holdfast {group}", int(number) + 1, presence.title, "started", _HERE)
