"""Evidence of this process: the stacks of its threads, its pending collectives, and its phase."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from types import FrameType

import msgspec

from holdfast import events
from holdfast._roster.process import activity
from holdfast._torch_private import flight_records, known_groups
from holdfast._watch.collector import Collector
from holdfast._watch.dumps import MOST_CALLS, operations_of
from holdfast._watch.evidence import Call, Rank, Source, Stack

_HERE = Source("roll call")


def stacks_here() -> tuple[Stack, ...]:
    """Return where the threads of the program are, the main thread first."""
    frames = sys._current_frames()
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not main)
    return tuple(
        Stack("MainThread" if thread is main else thread.name, _calls(frames[thread.ident]), _HERE)
        for thread in threads
        if thread.ident in frames and not thread.name.startswith("holdfast-")
    )


def activity_here() -> tuple[float, float]:
    """Return the seconds of CPU time of the main thread, and the bytes that this process and its children
    have moved; zeros where that can't be read. A child that comes or goes counts as movement, too."""
    with suppress(OSError, ValueError):
        cpu, moved = activity()
        return cpu.get(threading.main_thread().native_id or 0, 0.0), float(sum(moved))
    return 0.0, 0.0


def _calls(frame: FrameType | None) -> tuple[Call, ...]:
    calls: list[Call] = []
    while frame is not None and len(calls) < MOST_CALLS:
        calls.append(Call(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(calls)


def evidence_here(rank: int) -> tuple[Rank, dict[str, tuple[int, ...]]]:
    """Return what is known of this rank, and the members of the groups in which it waits."""
    collector = Collector()
    for record in flight_records(entries=True):
        operations_of(record, collector, _HERE, rank)
    recorded = collector.evidence().ranks.get(rank, Rank(rank))
    pending = {one.group for one in recorded.operations if one.is_pending}
    members = {
        f"{group.name}:{group.description}" if group.description else group.name: group.ranks
        for group in known_groups()
    }
    found = msgspec.structs.replace(recorded, stacks=stacks_here(), phase=events.phase_now())
    # The first member tells it, as all would tell the same.
    return found, {name: ranks for name, ranks in members.items() if name in pending and min(ranks) == rank}
