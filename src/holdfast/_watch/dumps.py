"""Reads dumps of single ranks: stacks by py-spy and faulthandler, torch's flight records, and the files of
Holdfast's roll calls. Nothing in them is executed."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple

import msgspec

from holdfast._core.base.values import Json, Message
from holdfast._core.format.pickle_reader import BadPickle, Global, PickleReader, first
from holdfast._core.ready import ready
from holdfast._watch.collector import Collector
from holdfast._watch.evidence import Frame, GroupOperation, GroupProgress, Rank, SourceLine, Stack
from holdfast._watch.looks_like import parts_of_call
from holdfast._watch.names import group_name
from holdfast._watch.ras import read_ras_json
from holdfast.errors import BadInput

_RANK_IN_NAME = re.compile(r"(?:rank|worker|default)[-_.]?(\d{1,6})(?![\da-zA-Z])")
"""No letter may follow: Ray's workers have hexadecimal numbers."""
_NUMBER_IN_NAME = re.compile(r"(?:^|[-_./])(\d{1,6})(\.\w{1,5})?$")
_RANK_IN_FOLDER = re.compile(r"/(?:rank[-_]?)?(\d{1,6})/std(?:err|out)(?:\.log)?$")
_RANK_IN_COMMAND = re.compile(r"\bRANK=(\d+)|rank[-_]?(\d+)")
_PROCESS = re.compile(r"^Process (\d+): (.*)")
_SERVED = re.compile(r"^=== Rank (\d{1,6}): ")
"""Header that torch's debug server writes before the stacks of each rank."""
_THREAD = re.compile(
    r'^Thread (?P<ident>\S+) \((?P<state>active|idle|)[^)]*\)(?:: "(?P<name>.*)")?|'
    r"^(?:Current thread|Thread|Stack)(?: (?P<fault>0x[0-9a-f]+)(?: \[.*\])?)? \(most recent call first\):"
)
"""Header of a thread, by py-spy and by faulthandler."""
_CALL = re.compile(r"^\s+(?P<name>\S.*?) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)$")
_FAULT_CALL = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_NAME = re.compile(r'^\s{8,}(\w+): "?(.*?)"?$')
MOST_CALLS = 200
PICKLE = b"\x80"
"""The first byte of a pickle."""


def ranks_of_names(paths: Iterable[str]) -> dict[str, int]:
    """Return the ranks found in file names, such as `rank-3.txt` and `3/stderr.log`. A number at the end may
    be a job, a pid or a time; it counts as a rank only if the names have all numbers from 0 on."""
    ranks: dict[str, int] = {}
    rows: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for path in paths:
        name = path.removesuffix(".gz")
        found = _RANK_IN_FOLDER.search(name) or _RANK_IN_NAME.search(os.path.basename(name))
        if found is not None:
            ranks[path] = int(found[1])
        elif (number := number_of_name(path)) is not None:
            rows[number[1]][number[0]] = path
    for row in rows.values():
        if len(row) > 1 and max(row) + 1 == len(row):
            ranks |= {path: number for number, path in row.items()}
    return ranks


def number_of_name(path: str) -> tuple[int, tuple[str, str]] | None:
    """Return the number at the end of a file name, and the text before and after it."""
    found = _NUMBER_IN_NAME.search(path.removesuffix(".gz"))
    return (int(found[1]), (path[: found.start(1)], path[found.end(1) :])) if found is not None else None


# -- stacks -------------------------------------------------------------------------------------------------


def is_stacks(head: str) -> bool:
    """Return whether a text looks like a dump of stacks."""
    lines = head.splitlines()[:40]
    return any(begin.match(line) for line in lines for begin in (_PROCESS, _THREAD, _SERVED))


def read_stacks(lines: Iterable[str], to: Collector, name: str, rank: int | None, is_later: bool) -> None:
    """Read the stacks of one or several processes, in the format of py-spy or faulthandler."""
    threads: list[Stack] = []
    states: dict[str, bool] = {}
    """Whether a thread is running, by thread, where the dump has it."""
    calls: list[Frame] = []
    names: dict[str, str] = {}
    thread, began = "", 0

    def end_thread() -> None:
        if calls:
            threads.append(Stack(thread, tuple(calls), SourceLine(name, began), dict(names)))
        calls.clear()
        names.clear()

    def end_process() -> None:
        end_thread()
        if rank is None:
            for stack in threads[:1]:
                to.remark("no rank", "stacks of a process whose rank isn't known", stack.source)
            for call, source in [(call, stack.source) for stack in threads for call in stack.calls]:
                to.alike(parts_of_call(call), str(call), source)
        else:
            # The main thread goes first; faulthandler writes it last.
            threads.sort(key=lambda stack: "main" not in stack.thread.lower())
            for stack in threads:
                to.note_stack(rank, stack, is_later)
            # A wait for a GPU, as in `loss.item()`, shows as a line of the program, and uses the CPU.
            if threads and threads[0].thread in states:
                to.note(rank, busy=max(float(states[threads[0].thread]), to.rank(rank).rest.busy or 0.0))
        threads.clear()
        states.clear()

    for number, line in enumerate(lines, 1):
        if (process := _PROCESS.match(line)) is not None:
            end_process()
            told = _RANK_IN_COMMAND.search(process[2])
            rank = int(told[1] or told[2]) if told is not None else rank
        elif (served := _SERVED.match(line)) is not None:
            end_process()
            rank = int(served[1])
        elif (found := _THREAD.match(line)) is not None:
            end_thread()
            thread, began = found["name"] or found["ident"] or found["fault"] or "", number
            if found["state"]:
                states[thread] = found["state"] == "active"
        elif (call := _CALL.match(line) or _FAULT_CALL.match(line)) is not None and len(calls) < MOST_CALLS:
            calls.append(Frame(call["name"], call["file"], int(call["line"]) if call["line"] else None))
            if call.re is _FAULT_CALL and call["name"] == "<module>":
                thread = "MainThread"
        elif (value := _NAME.match(line)) is not None:
            names.setdefault(value[1], value[2])
    end_process()


# -- flight records -----------------------------------------------------------------------------------------


class _Record(PickleReader):
    """Unpickles a flight record: plain values; torch's tags of lists are resolved to the list itself."""

    def resolve(self, module: str, name: str) -> object:
        if module == "torch.jit._pickle":
            return Global(module, name, first)
        return super().resolve(module, name)


def read_dump(data: bytes, to: Collector, name: str, rank: int | None, is_later: bool) -> None:
    """Read a flight record (a pickle or JSON), or other JSON: stacks of `py-spy dump --json`, the output of
    `ncclras`, or a file of a roll call."""
    is_pickle = data[:1] == PICKLE
    try:
        value = _Record(data).read() if is_pickle else json.loads(data)
    except BadPickle as error:
        raise BadInput(f"{name} is no flight record, because {error}.") from None
    except (ValueError, RecursionError):
        raise BadInput(f"{name} begins as JSON, and is none.") from None
    if isinstance(value, list) and not is_pickle:
        try:
            read_stacks(_pyspy_lines(value), to, name, rank, is_later)
        except (TypeError, AttributeError):
            raise BadInput(f"{name} is no dump of py-spy.") from None
    elif isinstance(value, dict) and "roll_call" in value:
        read_roll_call(value, to, name)
    elif isinstance(value, dict) and "communicators" in value:
        read_ras_json(value, to, name)
    else:
        _record(value, to, name, rank)


def _pyspy_lines(threads: list[Json]) -> Iterable[str]:
    for thread in threads:
        if isinstance(thread, dict):
            active = thread.get("active")
            state = "" if active is None else "active" if active else "idle"
            yield f'Thread {thread.get("thread_id")} ({state}): "{thread.get("thread_name") or ""}"'
            for frame in thread.get("frames") or ():
                file = frame.get("short_filename") or frame.get("filename")
                yield f"    {frame.get('name')} ({file}:{frame.get('line')})"


def _record(record: object, to: Collector, name: str, rank: int | None) -> None:
    if not isinstance(record, dict) or not isinstance(record.get("entries"), list):
        raise BadInput(f"{name} is no flight record: it has no entries.")
    told = record.get("rank")
    rank = told if isinstance(told, int) else rank
    if rank is None:
        raise BadInput(
            f"The rank of the flight record {name} isn't known.",
            hint="Give files whose names end in the rank.",
        )
    try:
        operations_of(record, to, SourceLine(name), rank)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadInput(f"{name} is no flight record: {type(error).__name__}: {error}.") from None


class RecordedGroups(NamedTuple):
    """The groups of a flight record."""

    names: dict[str, str]
    """By their numbers in the record."""
    counted: dict[str, dict[int, int]]
    """Over gloo, the status of a group counts messages, too: the number of each collective by that count."""

    @property
    def have_messages(self) -> bool:
        return any(count != number for known in self.counted.values() for count, number in known.items())


def groups_of(record: Message) -> RecordedGroups:
    """Read which groups a flight record has."""
    found = RecordedGroups({}, {})
    for entry in record.get("entries", ()):
        name, description = (str(part) for part in entry["process_group"][:2])
        key = str(entry.get("pg_id"))
        found.names[key] = found.names[name] = group_name(name, description)
        if str(entry.get("profiling_name")).startswith("gloo:") and entry.get("op_id"):
            known = found.counted.setdefault(key, {})
            known[int(entry["op_id"])] = int(entry["collective_seq_id"])
    return found


def operations_of(
    record: Message, to: Collector, source: SourceLine, rank: int, now: float | None = None
) -> RecordedGroups:
    """Read the entries of a flight record: pending operations, and the last completed one of each group.
    Return the groups.

    now: the current Unix time, if the record was read just now.
    """
    last: dict[str, GroupOperation] = {}
    found = groups_of(record)
    groups = found.names
    for entry in record.get("entries", ()):
        group = group_name(*map(str, entry["process_group"][:2]))
        operation = _operation(entry, group, source, now)
        if operation.is_pending:
            to.note_operation(rank, operation)
        elif operation.number >= last.get(group, operation).number:
            last[group] = operation
    for operation in last.values():
        to.note_operation(rank, operation)
    for key, config in (record.get("pg_config") or {}).items():
        members = tuple(int(part) for part in re.findall(r"\d+", str(config.get("ranks", ""))))
        if members and key:  # gloo groups have no key
            to.note_members(groups.get(key, key), members)
            if config.get("desc") == "default_pg":
                to.note_world(len(members))
    for progress in progress_of(record, found, source):
        to.note_progress(rank, progress)
    return found


def progress_of(record: Message, groups: RecordedGroups, source: SourceLine) -> Iterator[GroupProgress]:
    """Yield the progress of each group."""
    for key, status in (record.get("pg_status") or {}).items():
        enqueued, done = (int(status.get(f"last_{of}_collective", -1)) for of in ("enqueued", "completed"))
        if enqueued >= 0:
            known = groups.counted.get(key, {})
            enqueued, done = _number(enqueued, known), _number(done, known)
            yield GroupProgress(groups.names.get(key, key), enqueued, done, source)


def _number(count: int, known: Mapping[int, int]) -> int:
    """Return the number of the last collective of a group by the count of its status, with the messages."""
    before = [at for at in known if at <= count]
    if not known or before:
        return known[max(before)] if before else count
    # Its entry has left the record, so that it is at most the one before the first that is there.
    return min(count, known[min(known)] - 1)


def _operation(entry: Message, group: str, source: SourceLine, now: float | None) -> GroupOperation:
    backend, _, called = str(entry["profiling_name"]).partition(":")
    done = entry.get("retired") or entry["state"] == "completed"
    state = "completed" if done else str(entry["state"])
    if state == "scheduled" and backend != "nccl":
        state = "started"
    sizes = tuple(
        sum(prod(map(int, size)) for size in entry.get(f"{way}_sizes") or ()) for way in ("input", "output")
    )
    peer, created = bool(entry.get("is_p2p")), int(entry.get("time_created_ns") or 0)
    # Autograd issues collectives on its own threads, in the same order on all ranks.
    own = not str(entry.get("thread_name", "")).startswith("pt_autograd")
    return GroupOperation(
        f"{group}/p2p" if peer else group,
        int(entry["p2p_seq_id" if peer else "collective_seq_id"]),
        called or backend,
        state,
        source,
        sizes,
        ",".join(map(str, entry.get("input_dtypes") or ())),
        seconds=max(now - created / 1e9, 0.0) if now and created and not done else None,
        limit=int(entry.get("timeout_ms") or 0) / 1000 or None,
        thread=str(entry.get("thread_id") or "") if own else "",
        backend=backend if called else "",
        calls=tuple(
            Frame(str(frame["name"]), str(frame["filename"]), int(frame["line"]))
            for frame in (entry.get("frames") or ())[:MOST_CALLS]
        ),
    )


# -- our own files ----------------------------------------------------------------------------------------


def read_roll_call(value: Message, to: Collector, name: str) -> None:
    """Read a rank's answer to a roll call (`answering.Answer`)."""
    try:
        found = msgspec.convert(value["roll_call"], ready(Rank))
        to.note_world(msgspec.convert(value.get("world_size", 0), ready(int)))
        members = msgspec.convert(value.get("members", {}), ready(dict[str, tuple[int, ...]]))
    except msgspec.ValidationError as error:
        raise BadInput(f"{name} is no file of a roll call of this version: {error}.") from None
    for group, ranks in members.items():
        to.note_members(group, ranks)
    to.note_answer(found)
