"""Reads job logs as streams of any size; only lines with a known keyword are parsed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import BinaryIO

from holdfast._watch import log_lines as form
from holdfast._watch import looks_like
from holdfast._watch.collector import RANKS, Collector
from holdfast._watch.evidence import UNKNOWN, Ending, Frame, GroupOperation, GroupProgress, SourceLine
from holdfast._watch.marks import Marks
from holdfast._watch.names import group_name
from holdfast._watch.own_words import OwnWords

BLOCK = 4 << 20
"""Bytes per read."""
LONGEST = 1 << 16
"""Maximum number of bytes parsed of a line."""
_CAUSES = {-9: "SIGKILL, as the kernel does when memory is full", -11: "SIGSEGV", -7: "SIGBUS", -8: "SIGFPE"}
"""Signals that neither a watchdog nor a launcher sends, unless another rank ended before."""


@cache
def _keys() -> tuple[bytes, ...]:
    """Return the keywords, searched one by one: a single pattern of all would be slow."""
    found = list(form.KEYS)
    for part, longest, _ in looks_like.lines():
        if not any(key.decode() in part.part for key in found):
            found.append(longest.encode())
    return tuple(found)


def _places(block: bytes, end: int) -> Iterator[int]:
    for key in _keys():
        at = block.find(key, 0, end)
        while at >= 0:
            yield at
            at = block.find(key, at + len(key), end)


def lines_that_tell(
    file: BinaryIO, look: Callable[[bytes], None] | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each line that has one of the keywords, in bounded memory.

    look: called with each block of whole lines, before these are yielded.
    """
    number, rest, owed, width = 1, b"", 0, None
    while True:
        read = file.read(BLOCK)
        block = rest + read.replace(b"\0", b"")  # UTF-16, or a file that was cut while it was written
        width = form.width(block[: 1 << 20]) if width is None else width
        # The last line may continue in the next block, within bounds.
        whole = len(block) if not read or len(rest) >= BLOCK else block.rfind(b"\n") + 1
        if not read and block[-1:].isdigit():
            whole = block.rfind(b"\n") + 1  # the log is being written: its last number may lack digits
        rest = block[whole:]
        if width:
            block = form.unbroken(block[:whole], width)
        if look is not None:
            look(block[:whole])
        places, at, counted = iter(sorted(_places(block, whole))), 0, 0
        place = next(places, whole + 1)
        while True:
            while place < at:
                place = next(places, whole + 1)  # another keyword in the same line
            found, owed = (at, owed - 1) if owed else (place, 0)
            if found >= whole:
                break
            # Progress bars overwrite one line many times.
            start = max(at, block.rfind(b"\n", at, found) + 1, block.rfind(b"\r", at, found) + 1)
            stop = whole
            for end in (b"\n", b"\r"):
                stop = where if (where := block.find(end, found, stop)) >= 0 else stop
            line, at = block[start:stop][:LONGEST], stop + 1
            number += block.count(b"\n", counted, start)
            counted = start
            if any(head in line for head in form.HEADS):
                owed = form.FOLLOW
            yield number, line
        number += block.count(b"\n", counted, whole)
        if not read:
            return


def is_of_one_rank(file: BinaryIO, rank: int) -> bool:
    """Return whether no line is marked as another rank's: `worker-3.log` may be the log of a host."""
    for _, raw in lines_that_tell(file):
        line = form.without_prefix(raw)
        summed = form.SUMMARY_RANK.match(line.text)
        told = int(summed[1]) if summed is not None else line.rank
        if told not in (None, rank) or line.is_of_a_host:
            return False
    return True


class LogReader:
    """Reads one log into a collector."""

    def __init__(self, collector: Collector, name: str, rank: int | None = None) -> None:
        """rank: the rank of this log; None if it may contain several."""
        self._to, self._name, self._own = collector, name, rank
        self._own_words = OwnWords(collector)
        self._marks = Marks()
        self._frames: dict[str, Frame | None] = {}
        """The last frame of each open traceback, by stream."""
        self._chained: set[str] = set()
        """Streams with an error that was a consequence: later errors there are consequences, too."""
        self._known: set[tuple[object, ...]] = set()
        self._failed: int | None = None
        self._failed_at: float | None = None
        self._is_root = False
        self._sent: set[str] = set()
        """The pids of processes that torchrun has ended."""
        self._stack: tuple[int | None, list[Frame]] | None = None
        """The rank of the unfinished stack of a failed collective, and its calls so far."""
        self._srun_told = False
        self._processes: dict[str, tuple[int, int]] = {}
        """By host and pid: the process's rank in its largest communicator, and the size of that."""
        self._opening: dict[tuple[str, int], int] = {}
        """By communicator and rank in it: the global rank, while the communicator opens."""

    def read(self, file: BinaryIO) -> None:
        for number, raw in lines_that_tell(file, self._marks.look):
            line = form.without_prefix(raw)
            line = line._replace(rank=self._marks.rank(line))
            source = SourceLine(self._name, number)
            self._to.hidden += line.repeated
            rank = line.rank if line.rank is not None else self._own
            if rank is not None:
                self._to.note(rank, last=source)
            if self._own_words.read(line, source) or self._failed_stack(line.text, rank):
                continue
            text = line.text
            self._to.alike(looks_like.parts_of_line(text), text, source)
            if (backend := form.BACKEND.search(text)) is not None:
                self._to.once("backend", text, source, "gloo" if "loo" in backend[0] else "nccl")
            if form.OVER.search(text) is not None:
                self._to.once("ended", text, source, self._name)
            known = not self._is_of_this_hang(text) or self._watchdog(text, rank, source)
            known = known or self._aborts(text, rank, source)
            known = known or self._nccl(text, source) or self._by_itself(text, source)
            if not known or text.startswith("RuntimeError"):
                self._python(line, rank, source)

    def _is_of_this_hang(self, text: str) -> bool:
        """Return whether a line belongs to the first hang in the log. The log may continue with a restart of
        the job, and sequence numbers of two starts must not be compared."""
        when = form.WHEN.search(text)
        if when is None or not ("atchdog" in text or "NCCL work" in text):
            return True
        limit = form.TIMEOUT.search(text)
        return self._to.is_near(_seconds(when), int(limit["limit"]) / 1000 if limit is not None else None)

    # -- torch's stack of the collective that has failed ------------------------------------------------

    def _failed_stack(self, text: str, rank: int | None) -> bool:
        if "Stack trace of the failed collective:" in text:
            self._stack = rank, []
        elif self._stack is not None and (call := form.CALLED.match(text)) is not None:
            whose, calls = self._stack
            if int(call[1]) == len(calls):
                calls.append(Frame(call[2], call[3], int(call[4])))
                self._to.note_calls(whose, tuple(calls))
        else:
            return False
        return True

    # -- torch ------------------------------------------------------------------------------------------

    def _watchdog(self, text: str, rank: int | None, source: SourceLine) -> bool:
        if (found := form.TIMEOUT.search(text)) is not None:
            number = int(found["number"] or UNKNOWN)
            sizes = tuple(int(found[name]) for name in ("in", "out") if found[name] is not None)
            # torch logs the same timeout several times.
            key = (rank, found["rank"], number, found["op"], sizes)
            if key not in self._known and len(self._known) < RANKS:
                self._known.add(key)
                seconds = int(found["ms"] or found["limit"]) / 1000
                own, op = int(found["rank"]), found["op"]
                one = GroupOperation(
                    "", number, op, "timed out", source, sizes, seconds=seconds, group_rank=own
                )
                self._to.note_operation(rank, one)
        if (found := form.STATUS.search(text)) is not None and rank is not None:
            # Without the GUID, the number of the group is local to the rank.
            group = group_name(found["guid"] or f"PG {found['pg']}", found["desc"] or found["old_desc"])
            progress = GroupProgress(group, int(found["enqueued"]), int(found["done"]), source)
            self._to.note_progress(rank, progress)
        if (found := form.STUCK.search(text)) is not None:
            self._to.remark("heartbeat", text, source, str(rank))
        if (error := form.CUDA.search(text)) is not None and rank is not None:
            cause = "ECC" in error[1] or "illegal" in error[1]
            self._to.note_ending(rank, Ending(error[1], source, is_cause=cause))
        return found is not None or "Watchdog caught" in text

    # -- gloo, and any code in C++ ----------------------------------------------------------------------

    def _aborts(self, text: str, rank: int | None, source: SourceLine) -> bool:
        if (size := form.UNEXPECTED_SIZE.search(text)) is not None:
            self._to.remark("size", text, source, "" if rank is None else str(rank), size[1], size[2])
        elif form.TERMINATED.match(text):
            # What was thrown, and whether it follows from another rank's end, is in the next line, if at all.
            self._to.note_ending(rank, Ending(text[:300], source, is_cause=False))
        else:
            return False
        return True

    # -- NCCL -------------------------------------------------------------------------------------------

    def _nccl(self, text: str, source: SourceLine) -> bool:
        if (found := form.NCCL.search(text)) is None:
            return False
        process, said = f"{found['host']}:{found['pid']}", found["text"]
        if (init := form.INIT.search(said)) is not None:
            rank, size = int(init[1]), int(init[2])
            if size > self._processes.get(process, (0, 0))[1] and len(self._processes) < RANKS:
                self._processes[process] = rank, size
            # For a smaller communicator, use the rank in the largest one.
            key, own = (init[3], rank), self._processes.get(process, (rank, 0))[0]
            is_open = init[4] == "COMPLETE"
            own = self._opening.pop(key, own) if is_open else self._opening.setdefault(key, own)
            self._to.note_opening(init[3], size, own, source, is_open)
        elif found["kind"] == "WARN" and form.NCCL_MEMORY.search(said):
            rank = self._processes.get(process, (-1, 0))[0]
            self._to.remark("nccl memory", said, source, str(rank) if rank >= 0 else "")
        elif "Connection closed by" in said:
            self._to.remark("peer closed", said, source)
        return True

    # -- launchers and Python -----------------------------------------------------------------------------

    def _by_itself(self, text: str, source: SourceLine) -> bool:
        """Read a self-contained line, or a line from the summary of failures by torchrun or srun."""
        if (size := form.WORLD.search(text)) is not None:
            self._to.note_world(int(size[1]))
        if (print_ := form.FINGERPRINT.search(text)) is not None:
            self._to.remark("fingerprint", text, source, *(value or "" for value in print_.groups()))
        elif (barrier := form.BARRIER.search(text)) is not None:
            self._to.remark("barrier", text, source, barrier[1].replace(" ", ""))
        elif "Root Cause" in text:
            self._is_root = True
        elif (sent := form.SENT.search(text)) is not None:
            if len(self._sent) < RANKS:
                self._sent.add(sent[1] or sent[2])
        elif (when := form.SUMMARY_TIME.match(text)) is not None:
            self._failed_at = _seconds(when)
        elif (failed := form.SUMMARY_RANK.match(text)) is not None:
            self._failed = int(failed[1])
        elif (code := form.SUMMARY_CODE.match(text)) is not None and self._failed is not None:
            number = int(code[1])
            cause = self._is_root and number in _CAUSES and code[2] not in self._sent
            how = _CAUSES.get(number, f"exit code {number}")
            ending = Ending(f"ended by {how}", source, is_cause=cause)
            self._to.note_ending(self._failed, ending, self._failed_at)
            self._failed, self._failed_at, self._is_root = None, None, False
        elif (task := form.SRUN.search(text)) is not None:
            # srun ends the other tasks after the first failure.
            killed = task[2].startswith(("Killed", "Out Of Memory", "Segm", "Bus error"))
            ending = Ending(f"srun: {task[2]}", source, is_cause=killed and not self._srun_told)
            self._srun_told = True
            self._to.note_ending(int(task[1]), ending)
        elif (exited := form.EXITED.search(text)) is not None:
            if exited[3] not in self._sent:
                self._to.remark("exited", text, source, *exited.groups())
        elif "CANCELLED AT" in text or "Job step aborted" in text:
            self._srun_told = True  # somebody has ended the job, or its time was over
        elif "oom_kill" in text or "oom-kill" in text:
            self._to.remark("oom", text, source)
        else:
            return size is not None
        return True

    def _python(self, line: form.Prefixed, rank: int | None, source: SourceLine) -> None:
        """Read the tracebacks of errors. Those that nobody has caught end a rank."""
        stream, text = line.stream, line.text
        if "Traceback (most recent" in text:
            if len(self._frames) < RANKS:
                self._frames[stream] = None
        elif (frame := form.FILE.match(text)) is not None:
            call = Frame(frame[3], frame[1], int(frame[2]))
            self._to.alike(looks_like.parts_of_call(call), text, source)
            if stream in self._frames:
                self._frames[stream] = call
        elif (error := form.RAISED.match(text)) is not None:
            inside, fatal = stream in self._frames, self._marks.is_fatal(line)
            if not inside and not (fatal and form.NAME_OF_ERROR.search(error[1])):
                return
            raised_at = self._frames.pop(stream, None)
            follows = form.CONSEQUENCE.search(text) is not None or stream in self._chained
            ending = Ending(text[:300], source, is_cause=not follows, is_fatal=fatal, call=raised_at)
            if follows and len(self._chained) < RANKS:
                self._chained.add(stream)
            self._to.note_ending(rank, ending)


def _seconds(when: re.Match[str]) -> float:
    """Convert a log's timestamp to seconds within a year, as logs lack the year."""
    *days, hour, minute, second = map(int, when.groups())
    month, day = days if len(days) == 2 else divmod(days[0], 100)
    return ((month * 31 + day) * 24 + hour) * 3600 + minute * 60 + second
