"""Roll calls through a shared folder: requested by `holdfast doctor --all`, or common to several jobs.

A job answers a new folder under `roll-calls` that has no `job-<k>` file of this job yet. The first job to
arrive creates `job-0` exclusively, the next `job-1`, and so on; ranks are numbered through in this order. So
a trainer and an engine with two message stores make one call.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from holdfast._core.base.shared_folder import SharedFolder
from holdfast._core.base.values import NO_JSON, Message
from holdfast._core.ready import ready
from holdfast._watch.collector import RANKS
from holdfast._watch.evidence import Rank

ROLL_CALLS = "roll-calls"
"""The folder in a run folder for the files of its roll calls."""
ASKED = "asked"
YOUNG = 30.0
"""Maximum age in seconds of a call in the folder that is still answered."""
JOBS = 16
SMALL, LARGE = 4096, 64 << 20
"""Maximum size in bytes of a `job-<k>` file, and of a rank's answer."""
_OWN = re.compile(r"^(?:\d+|[0-9a-f]{40})(?::|/|$)|^holdfast ")
"""Group names that are not unique across jobs: torch's (a counter or a digest), and those of Holdfast's own
waits."""


class JobPart(msgspec.Struct, frozen=True):
    """`job-<k>`: one job in a roll call."""

    job: str
    world_size: int
    program: str
    number: int = 0
    first: int = 0
    """The number of the job's rank 0 in the call."""

    def said(self) -> str:
        """Format which ranks of the call belong to the job."""
        last = self.first + self.world_size - 1
        program = "".join(filter(str.isprintable, self.program))[:80]
        return f"ranks {self.first}-{last} are ranks 0-{self.world_size - 1} of {program}"

    def rank(self, rank: Rank) -> Rank:
        """Return the evidence about a rank, renumbered for the call."""
        change = msgspec.structs.replace
        return change(
            rank,
            rank=rank.rank + self.first,
            operations=tuple(change(one, group=self.group(one.group)) for one in rank.operations),
            progress=tuple(change(one, group=self.group(one.group)) for one in rank.progress),
        )

    def group(self, name: str) -> str:
        """Return a group's name within the call: different groups of two jobs may share a name."""
        return f"job {self.number} {name}" if self.number and is_own(name) else name

    def members(self, members: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the members of groups local to this job, renumbered for the call."""
        return {
            self.group(name): tuple(rank + self.first for rank in ranks)
            for name, ranks in members.items()
            if is_own(name)
        }


def is_own(group: str) -> bool:
    """Return whether a group's name is generated, not given by the program: then it is within one job."""
    return _OWN.match(group) is not None


def folder_of(path: str, make: bool = False, of_anyone: bool = False) -> SharedFolder:
    """Open the folder of a call, under `roll-calls` in a folder that others may write to."""
    above, name = os.path.split(path)
    base, middle = os.path.split(above)
    if middle != ROLL_CALLS:  # files that a user has collected
        return SharedFolder(path, make=make, of_anyone=of_anyone)
    return SharedFolder(base, middle, name, make=make, of_anyone=of_anyone)


def ask_for_call(folder: str, why: str) -> str:
    """Request a call from the jobs that use this folder (HOLDFAST_ROLL_CALLS); return the call's folder."""
    path = os.path.join(folder, ROLL_CALLS, f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-asked")
    with folder_of(path, make=True) as call:
        call.write(ASKED, msgspec.json.encode(why))
    return path


def waiting_call(folder: str, job: str) -> tuple[str, str] | None:
    """Return the name of the newest call if this job takes no part in it yet, and the reason for the call.

    Calls by other users than root are ignored.
    """
    try:
        with SharedFolder(folder, ROLL_CALLS) as calls:
            name = max(calls.list(), default="")
        path = os.path.join(folder, ROLL_CALLS, name)
        if not name or time.time() - os.lstat(path).st_mtime > YOUNG:
            return None
        known = parts(path)
        if any(part.job == job for part in known):
            return None
        if known:
            return name, "another job that shares its folder has called"
        with folder_of(path) as call:
            return name, msgspec.json.decode(call.read(ASKED, SMALL), type=ready(str))
    except (OSError, *NO_JSON):
        return None


def parts(path: str, of_anyone: bool = False) -> list[JobPart]:
    """Return the jobs that take part in a call so far. of_anyone: also if another user owns the folder."""
    found: list[JobPart] = []
    with suppress(OSError, *NO_JSON), folder_of(path, of_anyone=of_anyone) as call:
        for number in range(JOBS):
            part = msgspec.json.decode(call.read(f"job-{number}", SMALL), type=ready(JobPart))
            if not (0 < part.world_size <= RANKS and part.first == sum(one.world_size for one in found)):
                break
            found.append(part)
    return found


def take_part(path: str, job: str, world_size: int) -> JobPart | None:
    """Register this job in a call; return None if the call has the maximum number of jobs."""
    program = f"{os.path.basename(sys.argv[0])} (pid {os.getpid()})"
    with folder_of(path, make=True) as call:
        for number in range(JOBS):
            known = parts(path)[:number]
            part = JobPart(job, world_size, program, number, sum(one.world_size for one in known))
            with suppress(FileExistsError):
                call.write(f"job-{number}", msgspec.json.encode(part), exclusive=True)
                return part
    return None


def read_answers(path: str, jobs: Iterable[JobPart]) -> tuple[Message, bool]:
    """Return the answers so far of the ranks of jobs, by file name, and whether all ranks have answered
    twice."""
    found: Message = {}
    whole = False
    with suppress(OSError), folder_of(path) as call:
        whole = True
        for rank in (job.first + rank for job in jobs for rank in range(job.world_size)):
            try:
                answer = msgspec.json.decode(call.read(f"rank-{rank}.json", LARGE))
                found[f"rank-{rank}.json"] = answer
                whole = whole and bool(answer["roll_call"]["later"] or answer["roll_call"]["endings"])
            except (OSError, *NO_JSON, LookupError, TypeError):
                whole = False
    return found, whole


def wait_for_answers(path: str, seconds: float) -> bool:
    """Wait until all ranks of the jobs in a call have answered twice, or until the timeout; return whether
    any rank has answered."""
    ends = time.monotonic() + seconds
    while True:
        jobs = parts(path)
        found, whole = read_answers(path, jobs)
        if (jobs and whole) or time.monotonic() > ends:
            return bool(found)
        time.sleep(0.2)
