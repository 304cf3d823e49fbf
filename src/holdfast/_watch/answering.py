"""One roll call on one rank: it answers, also for ranks of its host that can't. The rank that started the
call collects the answers, makes the diagnosis, and logs it."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import msgspec

from holdfast import events
from holdfast._core.base.options import ranks_of_this_host, roll_call_folder
from holdfast._core.base.threads import start_thread
from holdfast._core.base.values import Message
from holdfast._core.roster.base import Roster
from holdfast._core.roster.beacon import Beacon
from holdfast._core.roster.lost import Seen, by_kernel, cut_off, see
from holdfast._core.roster.presence import pace, spread
from holdfast._core.roster.process import Identity
from holdfast._watch.collector import Collector
from holdfast._watch.diagnose import diagnose, waited_for_memory
from holdfast._watch.dumps import read_roll_call, read_stacks
from holdfast._watch.evidence import CUT_OFF, Ending, Evidence, Rank, SourceLine, Stack
from holdfast._watch.own_stacks import OwnEvidence, activity_here, stacks_here
from holdfast._watch.places import SHOWN, told
from holdfast._watch.shared_call import ROLL_CALLS, JobPart, folder_of, parts, read_answers, take_part
from holdfast._watch.verdict import TODO, Diagnosis, listed

log = logging.getLogger("holdfast")
GRACE = 0.5
"""Seconds for a rank to answer by itself after it has seen the call."""
LOOKS = 10
"""Number of stack samples with which a rank checks whether it makes progress."""
LEAST = 1.0
"""Minimum duration of this sampling, in seconds."""
SLOW = 3.0
"""Extra seconds, beyond the grace, for the second answer of a rank: its host may be loaded."""
NOTED = 2.0
"""Timeout in seconds for reading from the folder which jobs take part in a call."""
JOINED = 3.0
"""Timeout in seconds for the ranks of other jobs to answer, beyond the time between the two samples."""


class Asked(msgspec.Struct, frozen=True):
    """`roll/<n>`: a roll call; which rank has started it, and why."""

    by: int
    why: str
    pause: float
    """Seconds between the two samples of the stacks."""
    at: float
    """Start time by the caller's clock; also the name of the folder."""
    folder: str = ""
    """The name of the folder if it exists already, made by `holdfast doctor --all` or another job."""


class Answer(msgspec.Struct, frozen=True):
    """`roll/<n>/<rank>`: the answer about one rank. `rank-<rank>.json` has the same content."""

    roll_call: Rank
    members: dict[str, tuple[int, ...]]
    world_size: int
    by: int
    """The rank that answered: the rank itself, or another one on its host."""
    cut_off: dict[int, float] = {}
    """Ranks whose host stopped answering this one, and for how many seconds."""


class Answering:
    """One call on one rank."""

    def __init__(
        self, base: Roster, beacon: Beacon, number: int, asked: Asked, over: threading.Event
    ) -> None:
        self._base, self._beacon, self._number, self._asked, self._over = base, beacon, number, asked, over
        self._pace = pace(base.world_size)
        folder = roll_call_folder()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(asked.at))
        # Don't trust the message: never write outside of this folder.
        is_plain = os.path.basename(asked.folder) == asked.folder and not asked.folder.startswith(".")
        name = (asked.folder if is_plain else "") or f"{stamp}-{number}"
        self._folder = os.path.join(folder, ROLL_CALLS, name) if folder else ""
        self._part: JobPart | None = None
        """This job's part in a call of several jobs."""
        self._writing = threading.Lock()
        self._latest: dict[int, Answer] = {}
        """The newest answer for the file of each rank."""

    def run(self) -> None:
        rank = self._base.rank
        if self._folder and self._asked.by == rank:
            start_thread(self._take_part, "holdfast-roll-call-file")
        look = OwnEvidence(rank, self._beacon.operations)
        found, members = look.found, look.members
        # A rank that was stopped until now is too late: others have answered for it.
        if self._is_over() or not self._put(rank, found, members, is_first=True):
            return
        began, before = time.monotonic(), activity_here()
        near = ranks_of_this_host(rank, self._base.world_size)
        # By then all ranks of this host have checked for the call.
        self._over.wait(self._pace + GRACE + 0.1 * near.index(rank))
        held = self._stand_in(near)
        later = self._later(found, began + self._asked.pause)
        cpu, moved, stalled = (after - then for after, then in zip(activity_here(), before, strict=True))
        span = max(time.monotonic() - began, 0.1)
        # The CPU time of a child that ended in between is missing, so the difference may be negative.
        busy, starved = round(max(cpu, 0.0) / span, 3), round(stalled / span, 3)
        found = look.again(self._beacon.operations, later)
        seen = {"busy": busy, "moved": int(moved), "starved": starved}
        self._put(rank, msgspec.structs.replace(found, **seen), members)
        for other, seen_again in held.items():
            self._put(other, seen_again(), {})
        self._look_at_running(near)
        if self._asked.by == rank:
            self._over.wait(self._pace + GRACE)
            collector = self._gather()
            if self._part is not None and self._part.number:
                return  # the first job of the call tells the result
            if self._folder:
                self._add_other_jobs(collector)
            evidence = collector.evidence()
            log.warning("%s", summary(self._asked.why, diagnose(evidence), evidence, self._folder))
            events.emit("roll_call.told", rank=rank, why=self._asked.why, folder=self._folder)

    def _later(self, found: Rank, until: float) -> tuple[Stack, ...]:
        """Return the stacks of the first sample that shows the main thread in another function, or else at
        another line, or else the last sample. Always takes the whole time, over which the caller measures
        CPU use."""
        span = max(until - time.monotonic(), LEAST)
        first = found.stacks[0].calls if found.stacks else ()
        moved: tuple[Stack, ...] = ()
        is_elsewhere = False
        for look in range(LOOKS):
            # Jitter, so as not to sample in step with a loop of the program.
            self._over.wait(span / LOOKS * (0.5 + spread(look)))
            later = () if is_elsewhere or not first else stacks_here()
            if later and later[0].calls != first:
                is_elsewhere = later[0].calls[0].function != first[0].function
                moved = later if is_elsewhere or not moved else moved
        return moved or stacks_here()

    def _is_over(self) -> bool:
        return self._base.get([f"roll/{self._number}/over"])[0] is not None

    def _put(
        self, rank: int, found: Rank, members: dict[str, tuple[int, ...]], is_first: bool = False
    ) -> bool:
        """Publish the answer for a rank. Return False if the call is over, or another rank answered first."""
        cut_off = self._beacon.watch.cut_off()
        answer = Answer(found, members, self._base.world_size, self._base.rank, cut_off)
        key, message = f"roll/{self._number}/{rank}", msgspec.to_builtins(answer)
        if self._is_over() or (is_first and self._base.claim(key, message).get("by") != answer.by):
            return False
        if not is_first:
            self._base.put(key, message)
        if self._folder:
            self._latest[rank] = answer
            # Storage may be what hangs. The result is logged without it.
            start_thread(lambda: self._write(answer), "holdfast-roll-call-file")
        return True

    def _take_part(self) -> None:
        with suppress(OSError):
            self._part = take_part(self._folder, self._base.job(), self._base.world_size)

    def _write(self, answer: Answer) -> None:
        part = self._part_of_this_job()
        rank = answer.roll_call.rank + part.first
        whole = msgspec.structs.replace(
            answer,
            roll_call=part.rank(answer.roll_call),
            members=part.members(answer.members),
            world_size=part.first + part.world_size,
        )
        path = os.path.join(self._folder, f"rank-{rank}.json")
        try:
            with self._writing, folder_of(self._folder, make=True) as call:
                if self._latest[answer.roll_call.rank] is answer:
                    call.write(f"rank-{rank}.json", msgspec.json.encode(whole))
        except OSError as error:
            log.warning("The roll call's file %s could not be written: %s.", path, error.strerror)

    def _part_of_this_job(self) -> JobPart:
        """Return this job's part as the caller has written it; if that is missing, of a call of one job."""
        job, ends = self._base.job(), time.monotonic() + NOTED
        while time.monotonic() < ends and not self._over.is_set():
            for part in parts(self._folder):
                if part.job == job:
                    return part
            time.sleep(0.1)
        return JobPart(job, self._base.world_size, "")

    def _add_other_jobs(self, to: Collector) -> None:
        """Add the answers from the ranks of the other jobs that take part in this call by now."""
        read: Message = {}
        others: list[JobPart] = []
        done = threading.Event()
        seconds = JOINED + self._asked.pause

        def read_files() -> None:
            ends, whole = time.monotonic() + seconds, False
            others[:] = parts(self._folder)[1:]
            while others and not whole and time.monotonic() < ends:
                found, whole = read_answers(self._folder, others)
                read.update(found)
                time.sleep(0.0 if whole else 0.2)
            done.set()

        # Storage may not answer.
        start_thread(read_files, "holdfast-roll-call-file")
        done.wait(NOTED)
        if others:
            done.wait(seconds)
        for name, answer in list(read.items()):
            read_roll_call(answer, to, name)
        for part in others:
            to.remark("job", part.said(), SourceLine("roll call"))

    def _answers(self, ranks: Sequence[int]) -> dict[int, Message]:
        answers = self._base.get([f"roll/{self._number}/{rank}" for rank in ranks])
        return {rank: answer for rank, answer in zip(ranks, answers, strict=True) if answer is not None}

    def _stand_in(self, near: list[int]) -> dict[int, partial[Rank]]:
        """Answer for silent ranks of this host. Return, by live rank, a function for the second sample."""
        held = {}
        for rank, seen in self._silent(near, self._answers(near)).items():
            found = _seen_from_here(rank, seen)
            if found is None or not self._put(rank, found, {}, is_first=True):
                continue
            if seen.vitals is not None and not seen.ended:
                who = seen.vitals.who
                held[rank] = partial(_seen_again, who, found, time.monotonic(), _cpu(who))
        return held

    def _silent(self, near: list[int], answers: dict[int, Message]) -> dict[int, Seen]:
        silent = sorted(set(near) - answers.keys())
        return see(self._base, silent) if silent else {}

    def _look_at_running(self, near: list[int]) -> None:
        """Dump the stacks of running ranks of this host that have not answered yet. Only one rank does so: a
        process takes one debugger at a time."""
        answers = self._answers(near)
        if self._base.rank != min((rank for rank, one in answers.items() if one["by"] == rank), default=-1):
            return
        for rank, seen in self._silent(near, answers).items():
            found = running(seen.vitals.who) if seen.vitals is not None and seen.there else None
            if found is not None:
                self._put(rank, found, {}, is_first=True)

    def _gather(self) -> Collector:
        collector = Collector()
        everyone = range(self._base.world_size)
        answers = self._answers(everyone)
        ends = time.monotonic() + SLOW
        while (slow := [rank for rank in answers if _is_first(answers[rank])]) and time.monotonic() < ends:
            self._over.wait(self._pace)
            answers |= self._answers(slow)
        for rank, answer in answers.items():
            read_roll_call(answer, collector, f"rank-{rank}.json")
        gone = [rank for rank in everyone if rank not in answers]
        seen_of_gone = see(self._base, gone) if gone else {}
        for rank, seen in seen_of_gone.items():
            if seen.ended:
                collector.note_ending(rank, _ending(seen))
        reported = {rank for answer in answers.values() for rank in map(int, answer.get("cut_off") or ())}
        for rank in cut_off(seen_of_gone, reported):
            self._put(rank, Rank(rank, state=CUT_OFF), {})
            collector.note(rank, state=CUT_OFF)
        collector.note_world(self._base.world_size)
        self._base.put(f"roll/{self._number}/over", {})
        self._base.delete([f"roll/{self._number}/{rank}" for rank in everyone])
        return collector


def _is_first(answer: Message) -> bool:
    found = answer["roll_call"]
    return found.get("busy") is None and not found.get("endings")


def _seen_from_here(rank: int, seen: Seen) -> Rank | None:
    """Inspect a process of this host through the kernel and faulthandler's signal."""
    if seen.ended:
        return Rank(rank, endings=(_ending(seen),))
    if seen.vitals is None or not seen.there:
        return None
    stacks, state = _dumped(seen.vitals.who), seen.held().removeprefix("it is ")
    return Rank(rank, stacks=stacks, state=state) if stacks or state else None


def _seen_again(who: Identity, found: Rank, at: float, cpu: float) -> Rank:
    """Take the second sample. cpu: the CPU time of the process at the first."""
    busy = (_cpu(who) - cpu) / max(time.monotonic() - at, 0.1)
    return msgspec.structs.replace(found, later=_dumped(who), busy=round(busy, 3))


def _dumped(who: Identity) -> tuple[Stack, ...]:
    return _shown(who.stack().splitlines(), "faulthandler", who.rank).stacks


def running(who: Identity) -> Rank | None:
    """Dump a running process with py-spy, if that is installed: a call in C may hold the GIL."""
    program = shutil.which("py-spy")
    if program is None or by_kernel(who).state != "R":  # py-spy would resume a stopped process
        return None
    command = [program, "dump", "--native", "--full-filenames", "--pid", str(who.pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SLOW, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    # Skip the first line, the process's command line: it may contain the number of another rank.
    found = _shown(done.stdout.splitlines()[1:], "py-spy", who.rank)
    return found if found.stacks else None


def _shown(dump: list[str], by: str, rank: int) -> Rank:
    collector = Collector()
    read_stacks(dump, collector, by, rank, is_later=False)
    return collector.evidence().ranks.get(rank, Rank(rank))


def _cpu(who: Identity) -> float:
    now = who.stat()
    return now.cpu if now is not None else 0.0


def _ending(seen: Seen) -> Ending:
    return Ending(seen.ended, SourceLine("kernel"), is_clean=seen.is_success(), is_cause=seen.is_cause())


def summary(why: str, found: Diagnosis, evidence: Evidence, folder: str) -> str:
    """Format the result of a call: one line for each place where ranks are, the fewest ranks first."""
    lines = [f"Roll call of {len(found.heard_of)} of {found.world_size} ranks, because {why}:"]
    known = found.who.known if found.who is not None else ()
    lines += [*found.says.splitlines(), *told(known)]
    if found.why is not None:
        lines.append(TODO[found.why.kind])
    # The facts about a rank begin with its place.
    named = {rank for place in known[:SHOWN] for rank in place.ranks}
    lines += told(place for place in found.places if not named.issuperset(place.ranks))
    lines += [f"Looks like {like.thread} ({like.title})." for like in found.looks_like[:1]]
    if silent := set(range(found.world_size or 0)) - evidence.ranks.keys():
        lines.append(f"{listed(silent)}: no answer. py-spy dump --pid PID, on its host, tells where it is.")
    if short := waited_for_memory(evidence):
        lines.append(f"{short}.")
    lines += [remark.text for remark in evidence.of("job")]
    if folder:
        lines.append(f"holdfast diagnose {folder} tells more.")
    return "\n  ".join(lines)
