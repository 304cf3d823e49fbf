"""Patterns of the log lines about hangs, as written by torch, NCCL, Python and launchers.

A line may begin with prefixes of Ray, torchrun or srun, and with terminal colours; Docker, Kubernetes,
journald or Loki may have forwarded it. The global rank is in `[rank5]:`, never in `[Rank 0]`, which is the
rank in the group.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import NamedTuple

HEADS = (b"Roll call of ", b"Stack trace of the failed collective:")
"""Keywords whose following lines are parsed, too."""
FOLLOW = 40
"""Number of following lines that are parsed."""
KEYS = (
    *HEADS,
    *(b"atchdog", b"eartbeat monitor timed", b"last enqueued", b"Traceback (most"),
    *(b'File "', b'File \\"'),  # JSON writes a backslash before a quote
    *(b"Error", b"Exception", b"KeyboardInterrupt", b"NCCL INFO", b"NCCL WARN", b"NCCL version"),
    *(b"monitoredBarrier", b"exitcode", b"(local_rank", b"  time      :", b"Root Cause"),
    *(b"closing signal SIG", b"forcefully exiting", b"taking the entire process"),
    *(b"srun: error", b"CANCELLED AT", b"Job step aborted", b"oom_kill", b"oom-kill"),
    *(b"Detected mismatch", b"Invalidate trace cache", b"destroy_process_group()", b"waitForInput"),
    *(b"orld size", b"orld_size", b"orld-size", b"ORLD_SIZE", b"ORLD SIZE", b"ORLD-SIZE", b"orld Size"),
    *(
        b" has waited ",
        b" came after ",
        b"of the last roll call",
        b" while rank ",
        b" failed after ",
        b"not in that collective",
    ),
    *(b"message store has not answered", b"ProcessGroupGloo", b"op.preamble.length", b"terminate called"),
)
"""Keywords: a line with none of these, nor any of a known case, is skipped."""
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_TEXTS = ("log", "message", "MESSAGE", "textPayload", "line")
"""Fields in which forwarders' JSON has the line."""
_FORWARDED = re.compile(
    r"^(\[pod/[^\]\s]+\] )?(?:"  # kubectl logs --prefix
    r"\d{4}-\d\d-\d\dT[\d:.,]{8,}(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?|"
    r"[A-Z][a-z]{2} [ \d]\d [\d:]{8} )?"
    r'((?<=[\dZ] )(?:\{\w+="[^}]*\}|'  # Loki's labels
    r"[\w.-]+ [\w./-]+\[\d+\]:) )?"  # journald's host and process
)
_REPEATED = re.compile(r"\[repeated (\d+)x across cluster\]")
_RAY = re.compile(r"\((\w[^()\n]{0,80}(?:\([^\n]{0,80}?\))?) pid=(\d+)(?:, ip=([\w.:]+))?\) ?")
"""Prefix of Ray, also for actors with custom names, and of vLLM."""
_LOGGER = re.compile(
    r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]{8} \[[\w./]+:\d+\] ?|"  # vLLM
    r"^\[\d{4}-\d\d-\d\d [\d:]{8}((?: [A-Z]+\d+)*)\] "  # SGLang
)
# One space belongs to a prefix. More are the text's own: Holdfast indents the lines of a message by two.
_RANK = re.compile(r"\[rank(\d{1,6})\[?\]:?(?: (?! ))?")
_AGAIN = re.compile(rf" ?{_RANK.pattern}")
_ROLE = re.compile(r"\[(default\d{1,4})\]:(?: (?! ))?|^\[(?!rank\d)([\w-]{0,40}?\d{1,6})\]:(?=\S|  )")
"""Prefix of torchrun (`--tee`), with the name of the role, and of its template `[${rank}]:`."""
_SRUN = re.compile(r"^\s*\d{1,6}: ")


def width(head: bytes) -> int:
    """Return the width at which a terminal has wrapped the lines of a log; 0 if they aren't wrapped."""
    widest = max(map(len, head.split(b"\n")))
    if not 60 <= widest <= 250:
        return 0
    # Wrapped: a message continues on a line without a prefix, and no line is longer.
    broken = rb"(?m)^(?=.{%d}$).*ProcessGroupNCCL\.cpp:.*[^.)\d\s]\n[^\[(#\s]" % widest
    return widest if re.search(broken, head) else 0


_BEGINS = re.compile(rb"\[(?:rank|default)\d|\([\w.]+ pid=|\d{4}-|#\d|frame #|Exception raised")


def unbroken(block: bytes, width: int) -> bytes:
    """Join lines wrapped by a terminal. Empty lines replace the joined ones, to keep the line numbers."""
    lines = block.split(b"\n")
    head, before = 0, lines[0]
    for at, line in enumerate(lines[1:], 1):
        if len(before) == width and not before.endswith(b"  ") and not _BEGINS.match(line):
            lines[head] += line
            lines[at] = b""
        else:
            head = at
        before = line
    return b"\n".join(lines)


class Prefixed(NamedTuple):
    """A line without its prefixes, and the values of these."""

    text: str
    rank: int | None
    stream: str
    """Lines with the same value come from one process."""
    repeated: int
    """Number of repetitions of this line that Ray has suppressed."""
    mark: str
    """The prefix `[rank5]: ` as it stands there; "" if it has none. Who has written it, see `Marks`."""
    is_of_a_host: bool
    """Has it torchrun's prefix (`[default0]:`), which marks the log of a whole host?"""
    is_marked_inside: bool
    """Is `[rank5]:` behind a prefix of torchrun's, so that torch has written it?"""


def without_prefix(raw: bytes) -> Prefixed:
    """Strip the prefixes from a line."""
    text = _line_of_json(raw.decode(errors="replace").lstrip("\ufeff\ufffd"))
    text = _COLOURS.sub("", text).rstrip()
    repeated = _REPEATED.search(text)
    if repeated is not None:
        text = text[: repeated.start()].rstrip()
    place, stream, rank = "", "", None
    if (forwarded := _FORWARDED.match(text)) is not None:
        place, text = "".join(forwarded.groups("")), text[forwarded.end() :]
    if (ray := _RAY.search(text, 0, 200)) is not None:
        stream, text = f"{ray[3]}/{ray[2]}", text[ray.end() :]
    if (local := _ROLE.search(text, 0, 80)) is not None:
        stream, text = local[1] or local[2], text[local.end() :]
    if (inner := _RAY.match(text)) is not None:  # an engine in an actor
        stream, text = f"{stream}/{inner[2]}", text[inner.end() :]
    if (logger := _LOGGER.match(text)) is not None:
        stream, text = stream or logger[1] or "", text[logger.end() :]
    marked, inside = _RANK.search(text, 0, 120), local is not None
    if marked is not None:
        # torchrun's prefix for a role of the name "rank" has the rank on the host; torch's own is behind it.
        while (again := _AGAIN.match(text, marked.end())) is not None:
            marked, inside = again, True
        rank, stream, text = int(marked[1]), f"rank{marked[1]}", text[marked.end() :]
    elif (task := _SRUN.match(text)) is not None:
        stream, text = stream or task[0], text[task.end() :]
    times = int(repeated[1]) if repeated else 0
    mark = marked[0] if marked is not None else ""
    return Prefixed(text, rank, place + stream, times, mark, local is not None, bool(mark) and inside)


def _line_of_json(text: str) -> str:
    """Return the log line in a forwarder's JSON (the last of several), or else the text itself."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text) if text.startswith("{") else None
        if isinstance(value, dict):
            line = next((value[key] for key in _TEXTS if isinstance(value.get(key), str)), text)
            return line.rstrip().rpartition("\r")[2]
    return text


def is_json_of_forwarder(line: bytes) -> bool:
    """Return whether a line is a forwarder's JSON around a log line."""
    text = line.decode(errors="replace").lstrip("\ufeff")
    return _line_of_json(text) is not text


TIMEOUT = re.compile(
    r"Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: WorkNCCL\("
    r"(?:SeqNum=(?P<number>\d+), )?OpType=(?P<op>\w+)(?:, NumelIn=(?P<in>\d+))?(?:, NumelOut=(?P<out>\d+))?"
    r"[^)]*?Timeout\(ms\)=(?P<limit>\d+)\)(?: ran for (?P<ms>\d+))?"
)
WHEN = re.compile(r"\[[EWIF](\d{2,4}) (\d\d):(\d\d):(\d\d)")
"""Date and time in torch's format, without the year."""
CUDA = re.compile(r"watchdog thread terminated with exception: (CUDA error: [^\n]*)")
STATUS = re.compile(
    r"\[PG (?:ID \d+ PG GUID (?P<guid>\w+)(?:\((?P<desc>[^)]*)\))?|"
    r"(?P<pg>\d+)(?: \((?P<old_desc>[^)]*)\))?) Rank (?P<rank>\d+)\].*?"
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+)"
    r"(?:, last started (?:NCCL )?work: -?\d+[^,]*)?"
    r", last completed (?:NCCL )?work: (?P<done>-?\d+)"
)
STUCK = re.compile(
    r"\[(?:PG ID \d+ PG GUID )?(?:PG )?\w+(?: ?\([^)]*\))? Rank \d+\].*?"
    r"(?:atchdog got stuck for \d+ seconds|Heartbeat monitor timed out)"
)
FINGERPRINT = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(\d+))?,? ?OpType=(\w+)"
    r"(?:, TensorShape=\[([^\]]*)\])?.*?Rank (\d+) is running collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=(\d+))?,? ?OpType=(\w+)(?:, TensorShape=\[([^\]]*)\])?"
)
UNEXPECTED_SIZE = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs\.? (\d+)")
"""gloo has got a message that is longer than what it waits for under that number."""
TERMINATED = re.compile(r"^terminate called (?:after throwing an instance of '[^']*'|without an active exc)")
"""An error in C++ that nobody has caught: the process aborts."""
NCCL = re.compile(
    r"(?<![\w.-])(?P<host>[\w.-]+):(?P<pid>\d+):\d+ \[\d+\] (?:\S+:\d+ )?"
    r"NCCL (?P<kind>INFO|WARN) (?P<text>.*)"
)
INIT = re.compile(r"comm 0x\w+ rank (\d+) nranks (\d+) .*?commId (0x\w+) - Init (START|COMPLETE)")
NCCL_MEMORY = re.compile(r"out of memory|Failed to CUDA (?:calloc|host alloc)|Failed to allocate")
BARRIER = re.compile(r"Ranks? (\d{1,6}(?:, ?\d{1,6})*) failed to pass monitoredBarrier")
WORLD = re.compile(r"\bworld[ _-]size[ =:]+(\d{1,6})\b", re.IGNORECASE)
SUMMARY_RANK = re.compile(r"^\s*rank\s+: (\d+) \(local_rank: \d+\)")
SUMMARY_CODE = re.compile(r"^\s*exitcode\s+: (-?\d+) \(pid: (\d+)\)")
SRUN = re.compile(r"srun: error: \S+: tasks? (\d+)(?:-\d+|,[\d,-]+)?: (.*)")
EXITED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
"""Before the summary, which may be missing."""
SUMMARY_TIME = re.compile(r"^\s*time\s+: \d{4}-(\d\d)-(\d\d)_(\d\d):(\d\d):(\d\d)")
SENT = re.compile(r"(?:Sending process (\d+) closing signal|Unable to shutdown process (\d+) via)")
"""torchrun ends the other processes after the first failure."""
FILE = re.compile(r'^\s*File "([^"]*)", line (\d+),? in (.*)')
CALLED = re.compile(r"^\s*#(\d+) (.+?) from (.+):(\d+)")
"""A frame of torch's stack of a failed collective."""
BACKEND = re.compile(r"ProcessGroup(?:NCCL|Gloo)|NCCL (?:INFO|WARN)|gloo/transport")
OVER = re.compile(
    r"taking the entire process down|ChildFailedError|exitcode +: |CANCELLED AT|Job step aborted|"
    r"Process will be terminated|Terminating the process"
)
"""The processes of the job have ended."""
OWN = re.compile(
    r"Roll call of \d+ of \d+ ranks, because |rank \d+ has waited \d+ s for |"
    r"rank \d+ came after \d+ s|"
    r"of the last roll call|message store has not answered"
)
"""Messages of Holdfast itself."""
RAISED = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?::\s?(.*))?$")
NAME_OF_ERROR = re.compile(r"(?:Error|Exception|Interrupt|Failed|Timeout)$")
CONSEQUENCE = re.compile(
    r"Dist(?:Backend|Network|Store)Error(?!.*(?:EADDRINUSE|Address already in use))|"
    r"communicator was aborted|Connection (?:closed|reset|refused)|"
    r"Broken pipe|"
    r"[Tt]ime[d ]*[Oo]ut|ChildFailedError|SignalException|KeyboardInterrupt|SystemExit|Actor\w*Error|"
    r"WorkerCrashedError|RankFailed|DeadlineExceeded|ncclRemoteError|(?i:nccl error)|monitoredBarrier|"
    r"Detected mismatch between collectives|op\.preamble\.length|EngineDeadError|RayTaskError|"
    r"killed by signal: Terminated"
)
"""Errors that follow from the failure or absence of a peer."""
