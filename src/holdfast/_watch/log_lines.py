"""The lines of a log that tell something of a hang, as they are written by torch, NCCL, Python and launchers.

A line may begin with prefixes of Ray, torchrun or srun, and with terminal colours. The global rank is that of
`[rank5]:`, never that of `[Rank 0]`, which counts in the group.
"""

from __future__ import annotations

import re
from typing import NamedTuple

KEYS = re.compile(
    rb"Watchdog caught|atchdog got stuck|PG status: last|at NCCL work|at work: |Traceback \(most|"
    rb'  File "|Error|Exception|KeyboardInterrupt|NCCL (?:INFO|WARN)|NCCL version|monitoredBarrier|exitcode|'
    rb"    : \d+ \(local|Detected mismatch|Invalidate trace cache|destroy_process_group\(\) was not|"
    rb"[Ww][Oo][Rr][Ll][Dd][ _-][Ss][Ii][Zz][Ee]|waitForInput|srun: error|aarch64|oom[_-]kill|"
    rb"Root Cause|[Tt]rain(?:ing|er)\b.{0,20}(?:done|finished|completed|stopped)|"
    rb"End time of running main|train_runtime|[Rr]ank ?\d+[^\n]{0,80}\[\d+:\d\d"
)
"""A line without any of these tells nothing."""
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_REPEATED = re.compile(r"\[repeated (\d+)x across cluster\]")
_RAY = re.compile(r"\(([\w.:]+(?: [\w.:]+)*) pid=(\d+)(?:, ip=([\w.:]+))?\) ?")
_RANK = re.compile(r"\[rank(\d{1,6})\[?\]:? ?")
_DEFAULT = re.compile(r"\[default(\d{1,4})\]: ?")
_SRUN = re.compile(r"^\s*\d{1,6}: ")


class Prefixed(NamedTuple):
    """A line without what a launcher has put before it."""

    text: str
    rank: int | None
    stream: str
    """Lines with the same value come from one process."""
    repeated: int
    """How often Ray has left the same line out."""
    is_marked: bool
    """Does `[rank5]:` stand before it? Of a Python error that means: nobody has caught it."""


def without_prefix(raw: bytes) -> Prefixed:
    """Return what a line says, and whose it is."""
    text = _COLOURS.sub("", raw.decode(errors="replace")).rstrip()
    repeated = _REPEATED.search(text)
    if repeated is not None:
        text = text[: repeated.start()].rstrip()
    stream, rank = "", None
    if (ray := _RAY.search(text, 0, 200)) is not None:
        stream, text = f"{ray[3]}/{ray[2]}", text[ray.end() :]
    if (local := _DEFAULT.search(text, 0, 80)) is not None:
        stream, text = f"default{local[1]}", text[local.end() :]
    marked = _RANK.search(text, 0, 120)
    if marked is not None:
        rank, stream, text = int(marked[1]), f"rank{marked[1]}", text[marked.end() :]
    elif (task := _SRUN.match(text)) is not None:
        stream, text = stream or task[0], text[task.end() :]
    return Prefixed(text, rank, stream, int(repeated[1]) if repeated else 0, marked is not None)


TIMEOUT = re.compile(
    r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: WorkNCCL\("
    r"(?:SeqNum=(?P<number>\d+), )?OpType=(?P<op>\w+)(?:, NumelIn=(?P<in>\d+))?(?:, NumelOut=(?P<out>\d+))?"
    r"[^)]*?Timeout\(ms\)=(?P<limit>\d+)\)(?: ran for (?P<ms>\d+))?"
)
STATUS = re.compile(
    r"\[PG (?:ID \d+ PG GUID (?P<guid>\w+)(?:\((?P<desc>[^)]*)\))?|(?P<pg>\d+)) Rank (?P<rank>\d+)\].*?"
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+)"
    r"(?:, last started (?:NCCL )?work: (?P<started>-?\d+)[^,]*)?, last completed (?:NCCL )?work: (?P<done>-?\d+)"
)
STUCK = re.compile(r"PG GUID (\w+)(?:\(([^)]*)\))? Rank (\d+)\].*?atchdog got stuck for (\d+) seconds")
FINGERPRINT = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(\d+))?,? ?OpType=(\w+)"
    r"(?:, TensorShape=\[([^\]]*)\])?.*?Rank (\d+) is running collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=(\d+))?,? ?OpType=(\w+)(?:, TensorShape=\[([^\]]*)\])?"
)
NCCL = re.compile(
    r"(?P<host>[\w.-]+):(?P<pid>\d+):\d+ \[\d+\] (?:\S+:\d+ )?NCCL (?P<kind>INFO|WARN) (?P<text>.*)"
)
INIT = re.compile(r"comm 0x\w+ rank (\d+) nranks (\d+) .*?commId (0x\w+) - Init (START|COMPLETE)")
MISMATCH = re.compile(r"peer (\S+?)(?:<\d+>)? collective mismatch error, local size (\d+) remote size (\d+)")
NCCL_MEMORY = re.compile(r"out of memory|Failed to CUDA (?:calloc|host alloc)|Failed to allocate")
VERSION = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)")
BARRIER = re.compile(r"Ranks? ([\d, ]+?) failed to pass monitoredBarrier")
WORLD = re.compile(r"\bworld[ _-]size[ =:]+(\d{1,6})\b", re.IGNORECASE)
STEPS = re.compile(r"(\d+)(?:/\d+)? ?(?:it|batch|batches|step|steps)? \[\d+:\d\d")
NAMED = re.compile(r"\b[Rr]ank ?(\d{1,6})\b")
ENDED = re.compile(
    r"End time of running main|after training is done|[Tt]raining (?:is done|finished|completed)|train_runtime|"
    r"Trainer\.fit` stopped"
)
SUMMARY_RANK = re.compile(r"^\s*rank\s+: (\d+) \(local_rank: \d+\)")
SUMMARY_CODE = re.compile(r"^\s*exitcode\s+: (-?\d+) \(pid: (\d+)\)")
SRUN = re.compile(r"srun: error: \S+: tasks? (\d+)(?:-\d+|,[\d,-]+)?: (.*)")
FILE = re.compile(r'^\s*File "([^"]*)", line (\d+), in (.*)')
RAISED = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?::\s?(.*))?$")
NAME_OF_ERROR = re.compile(r"(?:Error|Exception|Interrupt|Failed|Timeout)$")
CONSEQUENCE = re.compile(
    r"Dist(?:Backend|Network|Store)Error|communicator was aborted|Connection (?:closed|reset|refused)|Broken pipe|"
    r"[Tt]ime[d ]*[Oo]ut|ChildFailedError|SignalException|KeyboardInterrupt|SystemExit|Actor\w*Error|"
    r"WorkerCrashedError|RankFailed|DeadlineExceeded|ncclRemoteError|NCCL error|monitoredBarrier|"
    r"Detected mismatch between collectives|EngineDeadError|RayTaskError"
)
"""What ranks raise whose peers are gone or have not come."""
