"""Which ranks share a local folder: those that see each other's files there, whatever their hosts are called.

Each rank puts a file into its folder and tells its name; then it tells whose files it sees. Paths and names
of hosts prove nothing: containers of one machine may have different folders under one path, and a folder may
be a copy of another host's.

If a rank can't put a file there (a full disk, one mounted read-only), nothing is saved into local folders,
but what they hold can still be restored. Then ranks share a folder that is the same inode of the same kernel.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable
from contextlib import closing, suppress

import msgspec

from holdfast._core.base.values import NO_JSON, Json
from holdfast._core.format.local_copy import read_copy
from holdfast._core.format.names import LOCAL
from holdfast._core.io.index_file import open_index
from holdfast._core.protocol.call import Call
from holdfast._core.protocol.operation import agree
from holdfast._core.ready import ready
from holdfast._core.store.base import VERSION_BYTES, NotFound, Store, replace_file
from holdfast.errors import HoldfastError

COPY = re.compile(r"step-[0-9]{8,18}\.([0-9]{1,18})-[0-9]{1,18}\Z")
"""The name of a copy's folder, with the number of the start."""
HERE = ".holdfast-here-"
"""Begins the names of the files by which ranks find out who shares a folder."""


class FolderState(msgspec.Struct, frozen=True):
    """The content of `LOCAL`."""

    run: str
    folder: str
    """As `LocalCopy.folder`."""
    start: int
    """The highest number of a start that has saved into it."""
    version: str = ""
    """Random, new at each write: the last bytes of the file identify its version."""


class Start(msgspec.Struct, frozen=True):
    """What the ranks of a job have agreed on. `ranks` and `folder` are those of one host."""

    name: str
    """Random."""
    number: int
    ranks: tuple[int, ...]
    folder: str
    """As `LocalCopy.folder`. A new name if the folder had none, or is a copy of another host's."""
    newest: tuple[str, int]
    """The save of the run's newest step, and its number, as `local_copy.Ancestry` tells them."""
    only_reads: str = ""
    """Why nothing can be saved into the local folders; "" if it can."""


def read_state(store: Store) -> FolderState | None:
    """Return whose a local folder is; None if it does not tell."""
    try:
        reader = store.open(LOCAL)
    except NotFound:
        return None
    with closing(reader):
        data = reader.read(0, 1 << 16)
    try:
        return msgspec.json.decode(data, type=ready(FolderState))
    except NO_JSON:
        return None


def _state_by_copies(store: Store, names: Iterable[str]) -> FolderState | None:
    """Return whose a local folder is by its copies, if its file was lost; None if there is none that tells.
    names: what it holds."""
    copies = {name[:-1]: int(match[1]) for name in names if (match := COPY.match(name[:-1]))}
    for folder in sorted(copies, key=copies.__getitem__, reverse=True):
        with suppress(HoldfastError), open_index(store.child(folder)) as index:
            if (copy := read_copy(index.about)) is not None:
                return FolderState(copy.run, copy.folder, max(copies.values()))
    return None


def write_state(store: Store, run: str, start: Start) -> None:
    """Say whose a local folder is, before its first copy of this start is committed."""
    state = FolderState(run, start.folder, start.number, secrets.token_hex(VERSION_BYTES))
    replace_file(store, LOCAL, msgspec.json.encode(state))


def meet_on_hosts(store: Store, run: str, call: Call, newest: Callable[[], tuple[str, int]]) -> Start | str:
    """Return what all ranks agree on; or, on all ranks, why a folder can't be used.

    newest: the committer: returns `Start.newest`.
    """
    mine = f"{HERE}{secrets.token_hex(8)}"
    # It stands in the errors of ranks to which local= was not given.
    title = f"question which ranks share a local folder (local=, on all ranks or on none) of {run}"
    try:
        told: Json = {"file": mine}
        try:
            replace_file(store, mine, mine.encode())
        except HoldfastError as error:
            told = {"why": error.message}
        found: dict[str, str] | str = agree(title, f"{run}|local|files", _files, call, told)
        files, only_reads = ({}, found) if isinstance(found, str) else (found, "")
        answer = agree(
            title, f"{run}|local|hosts", lambda all_: _hosts(all_, newest()), call, _seen(store, run, files)
        )
    finally:
        with suppress(HoldfastError):
            store.delete(mine)
    if isinstance(answer, str):
        return only_reads or answer
    host = next(host for host in answer["hosts"] if call.rank in host["ranks"])
    return msgspec.convert({**answer, **host, "only_reads": only_reads}, ready(Start))


def _files(told: dict[int, Json]) -> Json:
    """Committer: return each rank's file, or why one has none."""
    for rank, one in sorted(told.items()):
        if "why" in one:
            return f"rank {rank}: {one['why']}"
    return {str(rank): one["file"] for rank, one in told.items()}


def _seen(store: Store, run: str, files: dict[str, str]) -> Json:
    """Return which ranks' files this rank sees, or, if there are none, which folder it has; and whose the
    folder is."""
    try:
        names = set(store.list())
        state = read_state(store) or _state_by_copies(store, names)
    except HoldfastError as error:
        return {"why": error.message}
    if state is not None and state.run != run:
        return {"why": f"{store.url} holds copies of another run, {state.run}"}
    seen = [int(rank) for rank, name in files.items() if name in names]
    folder, start = (state.folder, state.start) if state is not None else ("", 0)
    place = "" if files else _place(store.url)
    if not files and not place:
        return {"why": f"{store.url} is not there"}
    return {"seen": sorted(seen), "place": place, "folder": folder, "start": start}


def _place(path: str) -> str:
    """Return what no other folder of any host has; "" if this folder does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            kernel = file.read(64).strip()
        found = os.stat(path)
    except OSError:
        return ""
    return f"{kernel}/{found.st_dev}/{found.st_ino}"


def _hosts(told: dict[int, Json], newest: tuple[str, int]) -> Json:
    """Committer: group the ranks, and give each group the name of its folder."""
    for rank, one in sorted(told.items()):
        if "why" in one:
            return f"rank {rank}: {one['why']}"
    groups: dict[tuple[int, ...], str] = {}
    for rank, one in sorted(told.items()):
        # Those that see each other, and the same others. A rank that sees what the others don't is alone.
        if one["place"]:
            same = tuple(other for other, its in sorted(told.items()) if its["place"] == one["place"])
        else:
            same = tuple(other for other in one["seen"] if told[other]["seen"] == one["seen"])
        groups.setdefault(same if rank in same else (rank,), one["folder"])
    hosts, taken = [], {""}
    for ranks, folder in groups.items():
        hosts.append({"ranks": ranks, "folder": secrets.token_hex(8) if folder in taken else folder})
        taken.add(folder)
    number = 1 + max(one["start"] for one in told.values())
    return {"name": secrets.token_hex(8), "number": number, "hosts": hosts, "newest": newest}
