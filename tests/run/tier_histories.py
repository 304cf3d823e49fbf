"""Random histories of a run with local folders: starts that go on, go back, or begin anew, and die at any moment.

A start of the job is a fork of this process, and its ranks are threads of that. `allowed` is independent of the
code: it knows what each save was restored from, and which saves are whole on disk.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast._core.background import queue, sinks
from holdfast._core.format.names import LEFT, LOCAL
from holdfast._core.run import checkpoints as _  # noqa: F401 (imported once, before the forks)
from holdfast._core.run import hosts, origin
from holdfast._core.run.local_tier import LocalTier
from holdfast._core.run.old_steps import OldSteps
from holdfast._core.saving.commit import Commit
from holdfast._core.store.base import Store
from holdfast.errors import CorruptCheckpoint, HoldfastError, NotCommitted, StorageError
from holdfast.testing import Board, MemoryRoster
from tests.support import crash

SIZE = 12
"""Elements of the sharded tensor; all numbers of ranks divide it."""
PLACES = [(1, 1), (2, 1), (2, 2)]
"""Numbers of ranks and hosts."""
POINTS = ["local", "locally", "note", "noted", "commit", "committed", "mark", "retire"]
"""Where a start may die: before and after a local commit, the note of the steps that are left behind and the durable
commit; before the copies, and the old steps, are removed."""
FATES = ["durable", "durable", "durable", "held", "cut"]


@dataclass
class Save:
    """One save of one start."""

    id: int
    step: int
    place: tuple[int, int]
    parents: tuple[int | None, ...]
    """What its state goes on from; several if the run can't tell them apart."""
    is_aside: bool = False
    """Whether the start has not restored, and saves below the steps of the run, which stay the newest."""
    was_durable: bool = False
    was_removed: bool = False
    """By a user."""
    is_cut_off: bool = False
    """Whether a durable step that it goes on from was removed after it was saved."""


@dataclass
class Start:
    """What a start of the job does."""

    number: int
    place: tuple[int, int]
    has_local: bool
    ops: list[list[Any]]
    keep: int | None
    in_flight: int
    death: tuple[str, int] | None
    """A point or "call", and which one; "end"; or None: it ends well."""
    full: int | None = None
    """The host whose local folder can't be written."""


class Job:
    """A start, in its process."""

    def __init__(self, folder: Path, plan: Start) -> None:
        self.folder, self.plan = folder, plan
        self.board = Board()
        self.released = threading.Event()
        self.fates: dict[int, str] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._told = os.open(folder / "told", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._write = os.write
        self.failure = ""

    def tell(self, *words: object) -> None:
        self._write(self._told, (json.dumps([*words]) + "\n").encode())

    def point(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1
            if self.plan.death == (name, self._counts[name]):
                os.kill(os.getpid(), signal.SIGKILL)

    def run(self) -> None:
        sinks.is_written_here = queue.is_written_here = lambda store: True  # type: ignore[assignment]
        self._obey()
        os.fsync = os.fdatasync = lambda fd: None  # a process dies, not its host
        if self.plan.death is not None and self.plan.death[0] == "call":
            crash.die_before(self.plan.death[1])
        threads = [threading.Thread(target=self._guarded, args=(rank,)) for rank in range(self.plan.place[0])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure:
            self.tell("failed", self.failure)

    def _guarded(self, rank: int) -> None:
        try:
            self._rank(rank)
        except BaseException:
            self.failure = self.failure or traceback.format_exc()

    def _obey(self) -> None:
        """Make this process do and die as planned."""
        publish, write_left, replace_file = Commit.publish, origin.write_left, hosts.replace_file

        def published(commit: Commit) -> Any:
            if "/host-" in commit.store.url:
                self.point("local")
                answer = publish(commit)
                self.point("locally")
                return answer
            fate = self.fates[int(commit.store.url.rpartition("-")[2])]
            if fate == "held":
                self.released.wait()
            if fate == "cut":
                raise StorageError("The run can't be reached.")
            self.point("commit")
            answer = publish(commit)
            self.point("committed")
            return answer

        def noted(store: Store, left: Any) -> None:
            self.point("note")
            write_left(store, left)
            self.point("noted")

        def placed(store: Store, name: str, content: bytes) -> None:
            if name.startswith(hosts.HERE) and f"/host-{self.plan.full}/" in store.url:
                raise StorageError("No space is left.")
            replace_file(store, name, content)

        Commit.publish = published  # type: ignore[method-assign]
        origin.write_left = noted
        hosts.replace_file = placed  # type: ignore[attr-defined]
        for owner, name, point in ((LocalTier, "_is_durable", "mark"), (OldSteps, "retire", "retire")):
            setattr(owner, name, self._dying(getattr(owner, name), point))

    def _dying(self, real: Callable[..., Any], point: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.point(point)
            return real(*args)

        return call

    def _rank(self, rank: int) -> None:
        plan = self.plan
        ranks, count = plan.place
        checkpoints = holdfast.Checkpoints(
            self.folder / "run",
            local=self.folder / f"host-{rank * count // ranks}" if plan.has_local else None,
            keep=plan.keep,
            in_flight=plan.in_flight,
            on_failure="warn",
            job=holdfast.Job(roster=MemoryRoster(rank, ranks, self.board), timeout=20),
        )
        last, held = 0, False
        for what, *rest in plan.ops:
            if what == "restore":
                found = state_of(0, rank, ranks)
                try:
                    report = checkpoints.restore_report(found, rest[0])
                except (CorruptCheckpoint, NotCommitted) as error:
                    self.tell("refused", rank, rest[0], str(error))
                    break
                if report is None:
                    self.tell("restored", rank, rest[0], None, True, "")
                    continue
                right = is_right(found, rank, ranks)
                self.tell("restored", rank, rest[0], found["id"], right, report.path)
                last = report.step or 0
            elif what == "delete":
                self.released.set()  # it waits for all saves
                if rank == 0:
                    self.tell("deleting", rest[0])
                try:
                    checkpoints.delete(rest[0])
                except HoldfastError as error:
                    if rank == 0:
                        self.tell("kept", rest[0], str(error))
                else:
                    if rank == 0:
                        self.tell("deleted", rest[0])
            else:
                delta, number, fate, waits = rest
                last += delta
                self.fates[last] = fate
                self.tell("saves", rank, number, last)
                held = held or fate == "held"
                pending = checkpoints.save(last, state_of(number, rank, ranks), notes={"id": f"<{number}>"})
                assert pending is not None
                if fate == "held" and (not plan.has_local or plan.full is not None):
                    continue
                with suppress(StorageError):
                    path = pending.committed(15).path
                    if rank == 0:
                        self.tell("committed", number, "/host-" in path)
                if waits and fate != "held":
                    with suppress(HoldfastError):
                        pending.durable(15)
                        if rank == 0:
                            self.tell("durable", number)
        if plan.death is not None and plan.death[0] == "end":
            os.kill(os.getpid(), signal.SIGKILL)
        self.released.set()
        checkpoints.close(15)
        if rank == 0:
            self.tell("closed")


def state_of(number: int, rank: int, ranks: int) -> dict[str, Any]:
    size = SIZE // ranks
    part = torch.arange(rank * size, (rank + 1) * size) + 100.0 * number
    return {
        "part": holdfast.Shard(part, (SIZE,), (rank * size,)),
        "same": torch.full((3,), float(number)),
        "id": number,
    }


def is_right(found: dict[str, Any], rank: int, ranks: int) -> bool:
    wanted = state_of(found["id"], rank, ranks)
    return bool(
        torch.equal(found["part"].tensor, wanted["part"].tensor)
        and torch.equal(found["same"], wanted["same"])
    )


# -- harm ---------------------------------------------------------------------------------------------


def flip(copy: Path) -> None:
    for data in (copy / "data").iterdir():
        content = bytearray(data.read_bytes())
        size = int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8 : 8 + size]).items():
            if name.startswith(("part", "same")):
                content[8 + size + entry["data_offsets"][0]] ^= 1
        data.write_bytes(content)


def cut_short(copy: Path) -> None:
    for data in (copy / "data").iterdir():  # of another save, too, which was killed
        data.write_bytes(data.read_bytes()[:-100])


def lose_data(copy: Path) -> None:
    shutil.rmtree(copy / "data")


def garble_index(copy: Path) -> None:
    index = copy / "index.safetensors"
    index.write_bytes(index.read_bytes()[:-40])


HARMS = [flip, cut_short, lose_data, garble_index]


class Wrong(AssertionError):
    """A start restored what it must not."""


class History:
    """A run, from its first start on."""

    def __init__(self, folder: Path, seed: int, has_local: bool) -> None:
        folder.mkdir(parents=True)
        self.folder, self.seed = folder, seed
        self.dice = random.Random(seed)
        self.place = self.dice.choice(PLACES)
        self.has_local = has_local
        self.saves: dict[int, Save] = {}
        self.harmed: set[tuple[Path, int]] = set()
        self.note_lost = False
        self.promised: set[int] = set()
        """Saves that were told to be committed, until something else than a save takes them away."""
        self.counts: Counter[str] = Counter()
        self.story: list[str] = []
        self._read = 0

    # -- what is on disk ------------------------------------------------------------------------------

    def durable(self) -> dict[int, Path]:
        """The saves in the run, damaged or not."""
        return dict(indexes(self.folder / "run"))

    def local(self) -> dict[int, dict[int, Path]]:
        """The saves in local folders, each by host."""
        found: dict[int, dict[int, Path]] = {}
        for host in range(2):
            for top in sorted((self.folder / f"host-{host}").glob("run-*")):
                for number, path in indexes(top):
                    found.setdefault(number, {})[host] = path
        return found

    def usable(self, start: Start) -> tuple[set[int], set[int]]:
        """The saves that this start can restore from the run, and from local folders."""
        in_run = {number for number, path in self.durable().items() if (path, number) not in self.harmed}
        here = set[int]()
        for number, copies in self.local().items():
            place = self.saves[number].place
            wanted = range(start.place[1])
            if self.saves[number].was_removed and any(
                (copy / "durable").exists() for copy in copies.values()
            ):
                continue
            if (
                start.has_local
                and (place == start.place or place[1] == start.place[1] == 1)
                and all(host in copies and (copies[host], number) not in self.harmed for host in wanted)
            ):
                here.add(number)
        return in_run, here

    # -- the oracle -----------------------------------------------------------------------------------

    def allowed(self, start: Start, step: int | None) -> set[int | None]:
        in_run, here = self.usable(start)
        if step is not None:
            return self._allowed_step(step, in_run, here)
        return self.allowed_newest(in_run, here)

    def allowed_newest(self, in_run: set[int], here: set[int]) -> set[int | None]:
        answers: set[int | None] = set()
        for number in sorted(self.saves, reverse=True):
            save = self.saves[number]
            if save.is_aside:
                continue
            if save.was_durable or (number in here and not save.is_cut_off):
                answers |= self._walk(number, in_run, here)
                if number not in in_run:
                    # If a step is damaged, the one before it is loaded. If users have removed what a copy had
                    # left behind, nothing tells that the run follows the copy.
                    is_doubtful = any(other.was_removed for other in self.saves.values() if other.id < number)
                    before = [one for one in in_run if self.saves[one].step < save.step or is_doubtful]
                    if before and (number not in here or is_doubtful):
                        answers.add(max(before, key=lambda one: self.saves[one].step))
                break
            # Copies that can't be used may tell of it, or the note of what it has left behind.
            answers |= self._walk(number, in_run, here)
        if (
            not answers
            or self.note_lost
            or (not in_run and any(save.was_removed for save in self.saves.values()))
        ):
            answers |= self._rest(in_run, here)
        if self.note_lost:  # copies that follow what was left behind count again
            answers |= here
        return answers

    def _walk(self, number: int | None, in_run: set[int], here: set[int]) -> set[int | None]:
        if number is None:
            return self._rest(in_run, here)
        save, found = self.saves[number], set[int | None]()
        if number in in_run or number in here:
            found.add(number)
            # A copy that goes on from what was removed counts, or does not.
            if number in in_run or not (save.is_cut_off or save.was_removed):
                return found
        for parent in save.parents:
            found |= self._walk(parent, in_run, here)
        return found

    def _rest(self, in_run: set[int], here: set[int]) -> set[int | None]:
        """Nothing of the branch is left: any step of the run is better than none. If users have removed steps,
        the run may have none, and what it had left behind counts again."""
        found: set[int | None] = {*in_run, *(number for number in here if self.saves[number].was_durable)}
        if not in_run:
            found |= {None, *(here if any(save.was_removed for save in self.saves.values()) else ())}
        return found

    def _allowed_step(self, step: int, in_run: set[int], here: set[int]) -> set[int | None]:
        """That of the branch, if it is there; else any other."""
        tips = [tip for tip in self.allowed_newest(in_run, here) if tip is not None]
        line = [one for tip in tips for one in (tip, *self._line(self.saves[tip]))]
        alike = {number for number in in_run | here if self.saves[number].step == step}
        mine = max(alike.intersection(line), default=None)
        # A copy counts before it is durable, and until a later save is.
        is_gone = mine not in in_run and any(
            save.was_durable or save.is_aside for save in self.saves.values() if save.id >= (mine or 0)
        )
        return {*alike, None} if mine is None or is_gone or self.note_lost else {mine}

    # -- what happens ---------------------------------------------------------------------------------

    def go(self, starts: int) -> Counter[str]:
        try:
            for number in range(1, starts + 1):
                self._start(self._plan(number))
                self._between()
        except Exception as error:
            raise Wrong(f"seed {self.seed}, in {self.folder}: {error!r}\n" + "\n".join(self.story)) from error
        return self.counts

    def _plan(self, number: int) -> Start:
        dice = self.dice
        place = self.place if dice.random() < 0.85 else dice.choice(PLACES)
        has_local = self.has_local and dice.random() < 0.95
        ops: list[list[Any]] = []
        known = sorted({self.saves[one].step for one in [*self.durable(), *self.local()]})
        way = dice.choices(["on", "back", "anew", "look"], [6, 4, 1, 1])[0]
        if way in ("on", "look") or not known:
            ops.append(["restore", None])
        if known and way in ("back", "look"):
            ops.append(["restore", dice.choice(known)])
        if known and way == "look" and dice.random() < 0.5:
            ops.append(["restore", None])
        for count in range(dice.choice([0, 1, 1, 2, 2, 3])):
            deltas = [1, 1, 1, 2, 3] if count or not ops else [0, 1, 1, 1, 1, 2, 4]
            fate, waits = dice.choice(FATES), dice.random() < 0.6
            ops.append(["save", dice.choice(deltas), 10 * number + count, fate, waits])
            if known and dice.random() < 0.1:
                ops.append(["delete", dice.choice(known)])
        death: tuple[str, int] | None = dice.choice(
            [None, ("end", 0), ("point", 0), ("point", 0), ("call", 0)]
        )
        if death == ("point", 0):
            death = (dice.choice(POINTS), dice.choice([1, 1, 1, 2, 3]))
        elif death == ("call", 0):
            death = ("call", dice.randrange(1, 160))
        is_held = any(op[0] == "save" and op[3] == "held" for op in ops)
        return Start(
            number,
            place,
            has_local,
            ops,
            keep=dice.choice([None, None, 1, 2, 3]),
            in_flight=4 if is_held else dice.choice([1, 2, 4]),
            death=death,
            full=dice.randrange(2) if dice.random() < 0.07 else None,
        )

    def _start(self, plan: Start) -> None:
        self.story.append(f"{plan}")
        given = {op[1] for op in plan.ops if op[0] == "restore"}
        allowed = {step: self.allowed(plan, step) for step in given | {None}}
        in_run = [*self.durable()]
        self._fork(plan)
        lines = (self.folder / "told").read_bytes().splitlines(keepends=True)
        said = [json.loads(line) for line in lines[self._read :] if line.endswith(b"\n")]
        self._read = len(lines)
        self.story += [f"    {one}" for one in said]
        self._heed(plan, said, in_run, allowed)
        self._check_promises(plan, in_run)

    def _fork(self, plan: Start) -> None:
        child = os.fork()
        if child == 0:
            try:
                log = os.open(self.folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.dup2(log, 2)
                Job(self.folder, plan).run()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        ends = time.monotonic() + 90
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > ends:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise Wrong("the start did not end")
            time.sleep(0.005)

    def _heed(
        self, plan: Start, said: list[Any], in_run: list[int], allowed: dict[int | None, set[int | None]]
    ) -> None:
        """Compare what the ranks of a start have told with what was allowed, and note what they have saved."""
        above = max((self.saves[number].step for number in in_run), default=-1)
        last: dict[int, tuple[int | None, ...]] = {}
        went_back: set[int] = set()
        came_back: dict[int, list[int | None]] = {}
        mine = set[int | None]()
        removing: list[int] = []
        for what, *rest in said:
            if what == "failed":
                raise Wrong(rest[0])
            if what in ("restored", "refused"):
                rank, step = rest[:2]
                number = rest[2] if what == "restored" else None
                if what == "restored" and not rest[3]:
                    raise Wrong(f"rank {rank} restored other values of save {number}")
                if number not in allowed[step]:
                    raise Wrong(f"{[what, *rest]}: allowed is {allowed[step]}")
                came_back.setdefault(rank, []).append(number)
                last[rank] = (number,)
                went_back = went_back | {rank} if step is not None else went_back - {rank}
                if rank == 0:
                    kind = "local" if "/host-" in rest[-1] else "run"
                    self.counts["refused" if what == "refused" else "began" if number is None else kind] += 1
                    self.counts["given"] += step is not None
            elif what == "saves":
                rank, number, step = rest
                begun = last.get(rank, (None,))
                last[rank] = (number,)
                if number in self.saves:
                    continue  # another rank has told
                is_first = begun[0] not in mine
                # A step above all others: the older one may have been loaded for a comparison.
                if is_first and step > above and (rank in went_back or begun == (None,)):
                    begun = (*begun, *allowed[None], *in_run)
                save = self.saves[number] = Save(number, step, plan.place, tuple(dict.fromkeys(begun)))
                # A step aside leads to steps aside, until one is not below all others.
                before = None if is_first else self.saves[begun[0] or 0]
                save.is_aside = step < above and (begun == (None,) if before is None else before.is_aside)
                mine.add(number)
            elif what in ("committed", "durable"):
                self.promised.add(rest[0])
                self.saves[rest[0]].was_durable |= what == "durable"
            elif what == "deleting":
                removing = [number for number, save in self.saves.items() if save.step == rest[0]]
            elif what == "kept":
                removing = []
            elif what == "deleted":
                self._removed(removing)
                removing = []
        for found in zip(*came_back.values(), strict=False):
            if len({*found}) > 1:
                raise Wrong(f"ranks restored different saves: {came_back}")
        there = self.durable()
        if not {*removing}.isdisjoint(in_run) and {*removing}.isdisjoint(there):
            self._removed(removing)
        for number in there:
            self.saves[number].was_durable = True

    def _check_promises(self, plan: Start, before: list[int]) -> None:
        """What is on disk is all that must be: `allowed` does not miss a save that was removed too early."""
        there, local = self.durable(), self.local()
        durable = [number for number, save in self.saves.items() if save.was_durable and not save.is_aside]
        for number in self.promised:
            save = self.saves[number]
            is_local = len(local.get(number, ())) == save.place[1]
            is_over = any(
                (other.was_durable or other.was_removed) and (not other.is_aside or other.step == save.step)
                for other in self.saves.values()
                if other.id > number
            )
            if not (number in there or is_local or save.is_aside or is_over):
                raise Wrong(f"save {number} is gone")
        if self.note_lost or any(save.is_aside for save in self.saves.values()) or not durable:
            return
        line = [max(durable)]
        while len(parents := self.saves[line[-1]].parents) == 1 and parents[0] is not None:
            line.append(parents[0])
        latest = {self.saves[number].step: number for number in sorted(durable)}
        line = [one for one in line if latest.get(self.saves[one].step) == one]
        for number in line[: plan.keep]:
            if number in before and number not in there and not self.saves[number].was_removed:
                raise Wrong(f"save {number} is gone from the run")

    def _removed(self, numbers: list[int]) -> None:
        for number in numbers:
            self.saves[number].was_removed = True
        self.promised -= {*numbers}
        for save in self.saves.values():
            if not save.was_removed and not {*numbers}.isdisjoint(self._line(save)):
                save.is_cut_off = True

    def _line(self, save: Save) -> Iterator[int]:
        for parent in save.parents:
            if parent is not None:
                yield parent
                yield from self._line(self.saves[parent])

    def _between(self) -> None:
        """What users and hosts do between two starts."""
        dice = self.dice
        what = dice.choices(
            ["", "harm local", "harm run", "lose host", "remove", "lose state", "lose note"],
            [12, 2, 2, 1, 1, 1, 1],
        )[0]
        in_run, local = self.durable(), self.local()
        if what == "harm local" and local:
            number = max(local) if dice.random() < 0.7 else dice.choice(sorted(local))
            self._harm(number, dice.choice(sorted(local[number].values())))
        elif what == "harm run" and in_run:
            number = max(in_run) if dice.random() < 0.7 else dice.choice(sorted(in_run))
            self._harm(number, in_run[number])
        elif what == "lose host":
            shutil.rmtree(self.folder / f"host-{dice.randrange(2)}", ignore_errors=True)
            self.promised.clear()
            self.story.append(what)
        elif what == "remove" and in_run:
            number = max(in_run) if dice.random() < 0.7 else dice.choice(sorted(in_run))
            shutil.rmtree(in_run[number])
            self._removed([number])
            self.story.append(f"remove {number}")
        elif what == "lose state":
            for state in (self.folder / f"host-{dice.randrange(2)}").glob(f"run-*/{LOCAL}"):
                state.unlink()
            self.story.append(what)
        elif what == "lose note":
            note = self.folder / "run" / LEFT
            self.note_lost = self.note_lost or note.exists()
            note.unlink(missing_ok=True)
            self.story.append(what)
        self.counts[what] += bool(what)

    def _harm(self, number: int, path: Path) -> None:
        if (path, number) in self.harmed:
            return
        harm = self.dice.choice(HARMS)
        harm(path)
        self.promised.discard(number)
        self.harmed.add((path, number))
        self.story.append(f"{harm.__name__} {path} {number}")


def indexes(top: Path) -> Iterator[tuple[int, Path]]:
    for index in sorted(top.glob("step-*/index.safetensors")):
        found = re.search(rb"<([0-9]+)>", index.read_bytes())
        assert found is not None
        yield int(found[1]), index.parent


def live(folder: Path, seeds: range, starts: int, has_local: bool) -> Counter[str]:
    """Live through a history for each seed."""
    found: Counter[str] = Counter()
    for seed in seeds:
        history = History(folder / str(seed), seed, has_local)
        found += history.go(starts)
        shutil.rmtree(history.folder)
    return found
