"""Saves that refer to data of an earlier step, and who removes steps, request by request on object semantics
(`tests.support.explore`). The code is the real one; only the store is replaced by one that asks for each request."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from holdfast._core.format.columns import Columns
from holdfast._core.format.index import Index
from holdfast._core.format.index_layout import encode
from holdfast._core.format.names import INDEX, data_file, reference, split_reference
from holdfast._core.io import old_steps, references, removal
from holdfast._core.io.references import WhyKept, by_folder
from holdfast._core.store.base import Capabilities, Entry, Kind, NotFound, Store, checked
from holdfast._core.store.pins import PINS
from holdfast.errors import HoldfastError, StorageError
from tests.support.explore import Alternatives, Script, State, Step, Stopped, World

Objects = frozenset[tuple[str, bytes]]
FOLDERS = ("step-00000001", "step-00000002", "step-00000003")
DATA = [data_file(f"{number:012x}", 0, 0) for number in range(1, 9)]
"""The data file of each attempt."""


class Bucket(NamedTuple):
    objects: Objects
    late: frozenset[tuple[str, bytes | None]] = frozenset()
    """Requests that were given up and may still arrive; without bytes, deletions."""
    void: frozenset[str] = frozenset()
    """Attempts that their savers know never to be committed."""

    def put(self, key: str, data: bytes | None) -> Bucket:
        others = frozenset(one for one in self.objects if one[0] != key)
        return self._replace(objects=others if data is None else others | {(key, data)})


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read(self, start: int, length: int) -> bytes:
        return self._data[start : start + length]

    def close(self) -> None:
        pass


class _Writer:
    def __init__(self, store: AskingStore, path: str) -> None:
        self._store, self._path, self._data = store, path, b""

    def write_at(self, start: int, buffers: Sequence[bytes]) -> None:
        self._data += b"".join(buffers)

    def finish(self) -> None:
        self._store.tell(("put", self._store.key(checked(self._path)), self._data))

    def discard(self) -> None:
        pass


class AskingStore:
    capabilities = Capabilities(
        times=False, exclusive_create=False, folders=False, at_once=True, pins=True, references=True
    )

    def __init__(self, script: Script, prefix: str = "run") -> None:
        self._script, self._prefix, self.url = script, prefix, f"asked://{prefix}"

    def key(self, path: str) -> str:
        if (referred := split_reference(path)) is not None:
            return "/".join((self._prefix.rpartition("/")[0], *referred))
        return f"{self._prefix}/{path}"

    def tell(self, request: tuple[Hashable, ...]) -> None:
        if self._script.ask(request) != "done":
            raise StorageError("no answer")

    def open(self, path: str) -> Any:
        data = self._script.ask(("get", self.key(path)))
        if data is None:
            raise NotFound(f"no {path}")
        return _Reader(data)  # type: ignore[arg-type]

    def create(self, path: str) -> Any:
        return _Writer(self, path)

    def publish(self, path: str, data: bytes, replacing: bytes | None) -> None:
        raise AssertionError

    def delete(self, path: str) -> None:
        self.tell(("delete", self.key(checked(path))))

    def remove(self) -> bool:
        return False

    def stat(self, path: str = "") -> Entry | None:
        size = self._script.ask(("head", self.key(path)))
        return None if size is None else Entry(Kind.FILE, size, 0.0)  # type: ignore[arg-type]

    def begin_stats(self, paths: Sequence[str]) -> Callable[[], list[Entry | None]]:
        return lambda: [self.stat(path) for path in paths]

    def list(self, folder: str = "") -> list[str]:
        found: Any = self._script.ask(("list", f"{self._prefix}/{folder}".rstrip("/") + "/"))
        return [*found]

    def child(self, folder: str) -> AskingStore:
        return AskingStore(self._script, f"{self._prefix}/{folder}")

    def parent(self) -> AskingStore:
        return AskingStore(self._script, self._prefix.rpartition("/")[0])


def index_of(attempt: int, names: Sequence[str]) -> bytes:
    columns = Columns(file_names=[*names], file_size=np.full(len(names), 4, "<i8"))
    columns.file_rank = np.zeros(len(names), "<i4")
    return encode(columns, {"attempt": f"{attempt:012x}"}, narrow=True)


@cache
def names_in(data: bytes) -> list[str]:
    return Index(lambda start, length: data[start : start + length], len(data), "an index").file_names()


def planted(folder: int, attempt: int, *refers: str) -> list[tuple[str, bytes]]:
    """Return the objects of a committed step. refers: names of data files of other steps."""
    place = f"run/{FOLDERS[folder]}"
    return [
        (f"{place}/{DATA[attempt - 1]}", b"data"),
        (f"{place}/{INDEX}", index_of(attempt, [DATA[attempt - 1], *refers])),
    ]


_running: list[Script] = []


@contextmanager
def drawn() -> Iterator[None]:
    """Random names are functions of what a process was answered."""
    real, here = os.urandom, threading.current_thread()

    def urandom(count: int) -> bytes:
        if threading.current_thread() is not here:
            return real(count)  # a run folder that an earlier test has left open is still renewed
        script = _running[-1]
        script.drawn += 1
        return bytes([16 * script.process + script.drawn]) * count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", urandom)
        yield


def process(action: Callable[[Store, Any], Hashable]) -> Callable[[Script], Hashable]:
    """action: gets the run folder, and what says which attempts have ended."""

    def run(script: Script) -> Hashable:
        store: Any = AskingStore(script)

        def known(_: Store) -> WhyKept:
            void: Any = script.ask(("owner",))
            return lambda attempt: "" if attempt in void else "not known to have ended"

        _running.append(script)
        try:
            return action(store, known)
        except Stopped:
            raise
        except HoldfastError:
            return "failed"
        finally:
            _running.pop()

    return run


def saver(folder: int, attempt: int, of: str, replaces: bool = False) -> Callable[[Store, Any], Hashable]:
    """A save that refers to the data file that the reference `of` names, if it may."""

    def save(run: Store, known: Any) -> Hashable:
        store: Any = run.child(FOLDERS[folder])
        before = removal.named_by_index(store) if replaces else None
        name = f"{attempt:012x}"
        ((origin, (path,)),) = by_folder([of]).items()
        try:
            free = references.claim_files(store, origin, {path: 4}, name, 0)
        except StorageError:
            free = set()
        own = store.create(DATA[attempt - 1])
        own.write_at(0, [b"data"])
        own.finish()
        refers = [reference(origin, one) for one in free]
        index = index_of(attempt, [DATA[attempt - 1], *refers])
        # The conditional PUT is explored elsewhere (`explored_writers`): here it has its three ends.
        answer = store._script.ask(("publish", store.key(INDEX), index, name, replaces))
        if answer == "failed":
            references.release(store, [origin], name, 0)
            return "failed"
        if answer == "done" and before is not None:
            old_steps.remove_replaced(store, before, but=[DATA[attempt - 1], *refers])
        store._script.ask(("rest",))  # it may be killed after its commit
        return answer, len(free)

    return save


def remover(folder: int, again: bool = False) -> Callable[[Store, Any], Hashable]:
    """again: it tries a second time if the first one fails, as the next save does."""

    def remove(run: Store, known: Any) -> Hashable:
        if again:
            with suppress(HoldfastError):
                return "removed", old_steps.remove_step(run, FOLDERS[folder], known)
        return "removed", old_steps.remove_step(run, FOLDERS[folder], known)

    return remove


def finisher() -> Callable[[Store, Any], Hashable]:
    return lambda run, known: ("finished", len(removal.finish_removals(run, known)))


def reader(folder: int) -> Callable[[Store, Any], Hashable]:
    """Reads all that an index names, under a pin."""

    def read(run: Store, known: Any) -> Hashable:
        store: Any = run.child(FOLDERS[folder])
        pin = store.create(f"{PINS}/reader")
        pin.write_at(0, [b"{}"])
        pin.finish()
        data = store._script.ask(("get", store.key(INDEX)))
        whole = data is None or all(
            store._script.ask(("head", store.key(name))) is not None for name in names_in(data)
        )
        store.delete(f"{PINS}/reader")
        return "gone" if data is None else "whole" if whole else "wrong"

    return read


class References(World[Bucket]):
    def __init__(
        self,
        objects: Sequence[tuple[str, bytes]],
        actions: Sequence[Callable[[Store, Any], Hashable]],
        attempts: dict[int, int],
        faults: int = 0,
        kills: int = 0,
        void: Collection[int] = (),
    ) -> None:
        """attempts: of the processes that save. void: those that the owner file lists as void from the start."""
        self.processes = [process(action) for action in actions]
        self.groups = range(len(actions))
        self.faults, self.kills, self._objects = faults, kills, frozenset(objects)
        self._attempts, self._void = attempts, frozenset(f"{one:012x}" for one in void)

    def begin(self) -> Bucket:
        return Bucket(self._objects, void=self._void)

    def alternatives(self, process: int, request: Any, state: State[Bucket]) -> Alternatives[Bucket]:
        kind, bucket = request[0], state.shared
        held = dict(bucket.objects)
        steps: list[Step[Bucket]] = []
        if kind == "get":
            steps = [Step(held.get(request[1]), bucket)]
        elif kind == "head":
            steps = [Step(None if request[1] not in held else len(held[request[1]]), bucket)]
        elif kind == "list":
            below = [key[len(request[1]) :] for key in held if key.startswith(request[1])]
            found = {
                first + ("/" if rest else "") for first, _, rest in (key.partition("/") for key in below)
            }
            steps = [Step(tuple(sorted(found)), bucket)]
        elif kind == "rest":
            return Alternatives([Step("done", bucket)], shared=False, private=True)
        elif kind == "owner":
            dead = {f"{self._attempts[one]:012x}" for one in state.dead if one in self._attempts}
            steps = [Step(bucket.void | dead, bucket)]
        elif kind in ("put", "delete"):
            key, data = request[1], request[2] if kind == "put" else None
            done = bucket.put(key, data)
            late = bucket._replace(late=bucket.late | {(key, data)})
            steps = [Step("done", done)]
            steps += [Step("error", after, faults=1) for after in (done, bucket, late)]
        elif kind == "publish":
            _, key, data, attempt, replaces = request
            void = bucket._replace(void=bucket.void | {attempt})
            late = bucket._replace(late=bucket.late | {(key, data)})
            if (key in held) != replaces:
                steps = [Step("failed", void)]
            else:
                # It may be known to have failed, or not be known at all.
                steps = [Step("done", bucket.put(key, data)), Step("failed", void, faults=1)]
                steps += [Step("unclear", after, faults=1) for after in (bucket.put(key, data), bucket, late)]
        return Alternatives(steps, shared=True, private=False)

    def of_nobody(self, bucket: Bucket) -> Sequence[tuple[str, Bucket]]:
        return [
            (f"arrives: {key}", bucket._replace(late=bucket.late - {(key, data)}).put(key, data))
            for key, data in bucket.late
        ]

    def check(self, state: State[Bucket], is_over: bool) -> str:
        held = dict(state.shared.objects)
        for key, data in held.items():
            if key.endswith(f"/{INDEX}"):
                place = AskingStore(Script(0, ()), key.removesuffix(f"/{INDEX}"))
                for name in names_in(data):
                    if place.key(name) not in held:
                        return f"{key} names {name}, which is gone"
        if any(node.result == "wrong" for node in state.nodes):
            return "a reader found less than its index names"
        return ""
