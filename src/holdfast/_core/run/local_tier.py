"""The local folders of a run: each host's copies of the newest steps, before these are durable.

A copy is an ordinary checkpoint of what the ranks of a host hold (`io.slice.CopyOfStep`), in a folder of its
own that is never written again. A step is whole if the hosts of all ranks have a copy of one save of it; its
digests are verified by the load. The newest durable step and those saved after it stay, and no others; a step
of some names (`include=`, `exclude=`) removes only others of its kind.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec import structs

from holdfast._core.background.local_save import LocalSave
from holdfast._core.base.deadline import Deadline
from holdfast._core.base.threads import within
from holdfast._core.base.values import Json, Message
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.format.local_copy import ABOUT, SAVE, Ancestry, LocalCopy, is_newer, read_copy, save_of
from holdfast._core.format.names import INDEX, PARTIAL
from holdfast._core.io.index_file import open_index
from holdfast._core.io.old_steps import remove_step
from holdfast._core.layout.ranks import ranks_of, ranks_text
from holdfast._core.protocol.call import Call
from holdfast._core.ready import ready
from holdfast._core.run.hosts import COPY, HERE, Start, meet_on_hosts, read_state, write_state
from holdfast._core.run.owner import Lease, lease_of
from holdfast._core.saving.job import SaveJob
from holdfast._core.saving.request import PREVIOUS, SaveRequest
from holdfast._core.store.base import Folder, Store, bounded, replace_file
from holdfast._core.store.local import open_local
from holdfast._core.store.run_folder import committed_folder, newest_steps, step_folder
from holdfast.errors import BadInput, HoldfastError, NotCommitted

log = logging.getLogger("holdfast")
DURABLE = "durable"
"""A file in a copy's folder: its step has been committed in the run."""
RUN_LOOK = 30.0
"""Seconds that the first save of a start looks at the run, whose storage may not respond."""
LOOKED_AT = 3
"""Of how many of the run's newest steps an index is read, if those before can't be read."""


class Copy(NamedTuple):
    """A local copy, as a rank tells it."""

    about: LocalCopy
    folder: str
    is_durable: bool


class Newest(NamedTuple):
    """The newest durable step of a run whose index can be read."""

    save: str = ""
    """"": there is none."""
    step: int = -1
    unread: tuple[int, ...] = ()
    """The steps above it, whose indexes can't be read."""


class LocalTier:
    """The local folder of this rank for a run."""

    def __init__(self, local: Folder, run: Store) -> None:
        if not isinstance(local, str | bytes | os.PathLike):
            raise BadInput(f"local= must be a path of this host, not a {type(local).__name__}.")
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", os.path.basename(run.url.rstrip("/"))).strip("-")
        # A folder of its own: in one local folder, each run of a host has its copies.
        top = open_local(os.fspath(local), "local=")
        self.store: Store = top.child(f"{name or 'run'}-{hex_digest(digest(run.url.encode()))[:8]}")
        self.run = run
        self.rejected: set[str] = set()
        """Saves whose copies a load could not use, on some host."""
        self._start: Start | None = None
        """None if there are no local folders for `_ranks`, or that was not asked yet."""
        self._ranks: tuple[int, ...] = ()
        self._lease: Lease = lease_of(self.store)
        # Copies of a second one would have other names and another start, and hide those of the first.
        self._lease.one_user = True
        self._writing = threading.Lock()
        self._ancestry = Ancestry()
        self._number = self._durable = 0
        """Numbers of the last save, and of the last durable one."""
        self._saved: dict[str, int] = {}
        """The folders of this start's copies, each with its number."""
        self._partial: set[str] = set()
        """Those of them that were saved with `include=` or `exclude=`."""

    def begin(self, call: Call) -> Start | None:
        """Find out which ranks share a folder, once for the same ranks, which all call it. None if a folder
        can't be used."""
        if self._ranks != call.participants:
            self._start = None
            found = meet_on_hosts(self.store, self.run.url, call, self.newest)
            self._ranks = call.participants
            why = found if isinstance(found, str) else found.only_reads
            if why:
                level = logging.WARNING if call.rank == call.participants[0] else logging.DEBUG
                what = "is not used" if isinstance(found, str) else "is used to restore only"
                log.log(level, "local= %s, so saves go to %s at once: %s", what, self.run.url, why)
            if isinstance(found, Start):
                self._start, self._ancestry = found, Ancestry(*found.newest)
        return self._start

    def begin_save(self, call: Call) -> bool:
        """Return whether there are local folders to save into, for the same ranks, which all call it."""
        start = self.begin(call)
        return start is not None and not start.only_reads

    def newest(self) -> tuple[str, int]:
        """Return the save of the newest durable step, and its number."""
        # Without the run a save can still be committed locally; whether it is the newest can't be told then.
        with suppress(HoldfastError):
            return newest_durable(bounded(self.run, Deadline(RUN_LOOK)))[:2]
        return "", -1

    def leave(self, user: object) -> None:
        """Release the folder."""
        self._lease.leave(user)

    # -- save -----------------------------------------------------------------------------------------

    def about(self) -> Message:
        """Return what the index of the next save says, in the run and in the local folders."""
        start = self._start
        return {} if start is None or start.only_reads else {SAVE: f"{start.name}.{self._number + 1}"}

    def count(self, number: int) -> None:
        """Note how many saves the rank that has counted most has counted: one may have left a save out."""
        self._number = max(self._number, number)

    def save(self, user: object, request: SaveRequest, takeover: bool) -> SaveJob:
        """Return the save of a step: first into the local folders, if there are any. Called on all ranks, in
        the same order."""
        start = self._start
        if start is None or start.only_reads:
            return SaveJob(request)
        assert request.step is not None
        call = request.call
        self._number += 1
        name = f"{step_folder(request.step)}.{start.number}-{self._number}"
        self._saved[name] = number = self._number
        if PARTIAL in request.about:
            self._partial.add(name)
        is_part = start.ranks != call.participants
        copy = LocalCopy(
            run=self.run.url,
            folder=start.folder,
            save=str(request.about[SAVE]),
            start=start.number,
            step=request.step,
            ranks=ranks_text(call.participants),
            held_by=ranks_text(start.ranks),
            is_part=is_part,
            **structs.asdict(self._ancestry),
        )

        def permit(tick: Callable[[], None], attempt: str) -> None:
            self._lease.hold(user, call.roster.job(), call.rank, takeover, tick)
            with self._writing:  # several saves may be under way
                state = read_state(self.store)
                if state is None or (state.folder, state.start) != (start.folder, start.number):
                    write_state(self.store, self.run.url, start)

        local = replace(
            request,
            store=self.store.child(name),
            call=replace(call, participants=start.ranks),
            expected=request.expected if request.expected == PREVIOUS or not is_part else None,
            previous=partial(self._previous, copy, request.previous),
            overwrite=False,
            about={**request.about, ABOUT: msgspec.to_builtins(copy)},
            options=replace(request.options, link_unchanged=False),
            is_part=is_part,
            may_be_empty=is_part,
            permit=permit,
            ended=None,
            after=None,
        )
        then = partial(self._is_durable, name, number, copy.step, copy.save, call.rank)
        return LocalSave(local, request, number, self.count, then)

    def _previous(self, copy: LocalCopy, in_run: Callable[[], Store | None] | None) -> Store | None:
        """Return the checkpoint that a copy is compared with: the last one of the same ranks here, or a whole
        one in the run."""
        alike = [
            one
            for one in self._copies()
            if (one.about.ranks, one.about.is_part) == (copy.ranks, copy.is_part)
        ]
        if alike:
            return self.store.child(max(alike, key=lambda one: (one.about.start, one.about.number)).folder)
        if copy.is_part or in_run is None:
            return None
        # The local commit does not depend on the run, with which the durable save compares, too.
        found: list[Store | None] = []
        with suppress(HoldfastError):
            within(RUN_LOOK, f"a look at {self.run.url}", lambda: found.append(in_run()))
        return next((bounded(store, Deadline(RUN_LOOK)) for store in found if store is not None), None)

    def _is_durable(self, name: str, number: int, step: int, save: str, rank: int) -> None:
        """Mark a copy whose step is durable, and remove the copies that were saved before it; but those of
        other starts only if the run follows this one, and whole ones only if this one is whole: theirs may be
        the last state that is not durable."""
        start = self._start
        assert start is not None
        # One at a time, and in order: the copy of a save that was slower than a later one is gone.
        with self._writing, suppress(HoldfastError):
            if number < self._durable:
                return
            self._durable = number
            follows = self._ancestry.is_followed(step, self._ancestry.base_step)
            if follows:
                self._ancestry = Ancestry(save, step, "", save, step)
            if rank != start.ranks[0]:
                return
            if not self._lease.is_held():
                return
            replace_file(self.store, f"{name}/{DURABLE}", save.encode())
            is_whole = name not in self._partial
            old = [
                one
                for one, saved in [*self._saved.items()]
                if saved < number and (is_whole or one in self._partial)
            ]
            for before in old:
                self._saved.pop(before, None)
                self._partial.discard(before)
            for found in self.store.list():
                folder = found.removesuffix("/")
                if folder.startswith(HERE):  # of a rank that was killed
                    self.store.delete(folder)
                elif folder in old or (
                    follows
                    and COPY.match(folder)
                    and folder not in self._saved
                    and (is_whole or self._holds_no_whole(folder))
                ):
                    self._remove(folder)

    def _holds_no_whole(self, folder: str) -> bool:
        """Return whether a copy of another start is known to be of some names, or not to be committed."""
        try:
            with open_index(self.store.child(folder)) as index:
                return index.about.get(PARTIAL) is True
        except NotCommitted:
            return True
        except HoldfastError:
            return False

    def _remove(self, folder: str) -> None:
        with suppress(HoldfastError):
            step = self.store.child(folder)
            # Last, so that what is left of a removal that was cut short is no copy to load.
            remove_step(self.store, folder)
            if step.stat(INDEX) is None:
                step.delete(DURABLE)
                step.remove()

    def forget(self, step: int, rank: int, newest: tuple[str, int]) -> None:
        """Remove the copies of a step, which was removed from the run. newest: as `newest` returns it now."""
        # Steps that are saved from now on are no part of what was removed.
        self._ancestry = structs.replace(self._ancestry, base=newest[0], base_step=newest[1])
        leads = self._start is not None and rank == self._start.ranks[0]
        for copy in self._copies() if leads else ():
            if copy.about.step == step:
                self._remove(copy.folder)

    # -- restore --------------------------------------------------------------------------------------

    def tell(self) -> Json:
        """Return the copies in this rank's folder, for the committer."""
        return [
            {"about": msgspec.to_builtins(copy.about), "folder": copy.folder, "durable": copy.is_durable}
            for copy in self._copies()
        ]

    def _copies(self) -> list[Copy]:
        start = self._start
        if start is None:
            return []
        found: list[Copy] = []
        with suppress(HoldfastError):
            for name in self.store.list():
                folder = name.removesuffix("/")
                if not COPY.match(folder):
                    continue
                # A damaged index, or none: no copy.
                with suppress(HoldfastError), open_index(self.store.child(folder)) as index:
                    copy = read_copy(index.about)
                    if copy is None or (copy.run, copy.folder) != (self.run.url, start.folder):
                        continue
                    is_durable = self.store.stat(f"{folder}/{DURABLE}") is not None
                    found.append(Copy(copy, folder, is_durable))
        return [copy for copy in found if copy.about.save not in self.rejected]

    def choose(
        self, told: dict[int, Json], step: int | None, passed: tuple[int, ...]
    ) -> tuple[LocalCopy | None, str, Ancestry]:
        """Committer: return the newest local copy that all ranks have, if it is a copy of the run's newest
        durable step or newer than that; its folder; and what the job's saves tell if it is restored or, if
        there is none, the step of the run.

        step: only this one, and of the run the same one. passed: damaged steps of the run.
        """
        of_rank = [{one["about"]["save"]: one for one in copies} for copies in told.values()]
        everyone = ranks_text(tuple(sorted(told)))
        durable = newest_durable(self.run, step, passed)
        # A job that goes back to an older step leaves the newest one behind: that is what its saves follow.
        newest = durable if step is None and not passed else newest_durable(self.run)
        before = durable if step is None else newest
        best: LocalCopy | None = None
        folder, is_in_run = "", False
        for save in set.intersection(*map(set, of_rank)):
            copies = [msgspec.convert(one[save]["about"], ready(LocalCopy)) for one in of_rank]
            first = copies[0]
            # A part may lack what a rank wants that was elsewhere; a complete copy lacks nothing.
            if any(
                copy.step != first.step
                or (copy.is_part and (copy.ranks != everyone or rank not in ranks_of(copy.held_by)))
                for rank, copy in zip(told, copies, strict=True)
            ):
                continue
            was_durable = any(one[save]["durable"] for one in of_rank)
            if step not in (None, first.step) or not _counts(first, was_durable, durable, before, step):
                continue
            if best is None or (first.start, first.number) > (best.start, best.number):
                best, folder, is_in_run = first, of_rank[0][save]["folder"], was_durable
        ancestry = Ancestry(newest.save, newest.step, "", durable.save, durable.step)
        if best is None and (newest.step, newest.unread) == (-1, ()):
            self._tell_of_last_copies()
        if best is None or best.save == durable.save:
            return best, folder, ancestry
        if is_in_run:  # where its index can't be read
            return best, folder, Ancestry(newest.save, newest.step, best.save, best.save, best.step)
        return best, folder, ancestry.of_copy(best)

    def _tell_of_last_copies(self) -> None:
        """Warn that the run has no step, and that this host has one that was in it: whether somebody has
        emptied the run or its storage was lost can't be told, and the next saves remove the copy."""
        copies = self._copies()
        if any(copy.is_durable for copy in copies):
            about, folder, _ = max(copies, key=lambda copy: (copy.about.start, copy.about.number))
            log.warning(
                "%s has no committed step, but %s is a copy of its step %d%s. What was removed from a run, "
                "and what goes on from it, is not restored, and the next saves remove the copies. If the "
                "storage of the run was lost, move the copy away first: holdfast.load reads it.",
                self.run.url,
                self.store.child(folder).url,
                about.step,
                f" (the part of ranks {about.held_by})" if about.is_part else "",
            )

    def restored(self, ancestry: Ancestry) -> None:
        """Note what this job goes on from."""
        self._ancestry = ancestry


def _counts(copy: LocalCopy, was_durable: bool, durable: Newest, before: Newest, step: int | None) -> bool:
    """Return whether a local copy is of a durable step, or newer than the one `before`.

    step: if it was asked for. If no durable step has its number, any copy counts that was not durable.
    """
    if copy.save == durable.save or (was_durable and copy.step in durable.unread):
        return True
    if was_durable:
        return False  # its step was removed from the run since, or the run has gone another way
    if step is not None and not durable.save:
        return True
    # Of a step that can't be read only the number tells that a copy goes on from it.
    if before.unread and not copy.is_followed(copy.step, before.unread[0]):
        return False
    return copy.base_step in before.unread or is_newer(copy, before.save, before.step)


def newest_durable(run: Store, step: int | None = None, passed: tuple[int, ...] = ()) -> Newest:
    """Look for the newest durable step of a run. step: only this one. passed: steps to leave out."""
    if step is None:
        found = newest_steps(run, LOOKED_AT, but=passed)
    else:
        there = committed_folder(run, step)
        found = {} if there is None else {step: there}
    unread: list[int] = []
    for number, folder in found.items():
        with suppress(HoldfastError), open_index(run.child(folder)) as index:
            return Newest(save_of(index.about), number, tuple(unread))
        unread.append(number)
    return Newest(unread=tuple(unread))
