"""`Checkpoints`: a run folder with numbered steps, for a training loop."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import SupportsFloat

from msgspec.structs import replace

from holdfast._core.background.pending import Pending
from holdfast._core.base.values import Json, check_switches
from holdfast._core.format.names import PARTIAL
from holdfast._core.io.old_steps import is_removable, remove_step
from holdfast._core.io.removal import finish_removals
from holdfast._core.io.renamed import Rename
from holdfast._core.loading.job import run_load_once
from holdfast._core.loading.request import RAISE, LoadReport, LoadRequest
from holdfast._core.protocol.call import Call, begin_call, whole_step
from holdfast._core.protocol.job import Job
from holdfast._core.protocol.operation import agree
from holdfast._core.run.folder import RunFolder
from holdfast._core.run.leftovers import why_kept
from holdfast._core.run.local_tier import LocalTier
from holdfast._core.run.turns import one_at_a_time
from holdfast._core.saving.job import SaveJob
from holdfast._core.saving.request import PREVIOUS, SaveRequest
from holdfast._core.state.flatten import flatten
from holdfast._core.store.base import Folder, Store, capabilities
from holdfast._core.store.run_folder import committed_folder, own_steps
from holdfast.errors import BadInput, Conflict, NotCommitted

log = logging.getLogger("holdfast")


class Checkpoints(RunFolder):
    """The steps of one run, `run/step-00000100/` and so on.

    A save is asynchronous: it copies the state and goes on in the background, at most `in_flight` at a time.
    `keep` is the number of committed steps to keep (None: all), in addition to those kept by `keep_every` and
    `best`. Others are removed after a newer one is committed, never before. Use it as a context manager, or
    call `close()`, before the process group is destroyed: both wait for running saves.

    local: a folder of each host (NVMe, or /dev/shm), on all ranks. A save is committed there first, and then,
        from the same copy in memory, in the run: `Pending.committed` waits for the first,
        `Pending.durable`, `close` and the end of the process for the second. `restore` takes the newest step
        that all ranks have, in local folders or in the run (docs/storage.md).
    keep_every, best, best_mode, keep_best, save_every, asynchronous, in_flight, on_busy, on_failure,
    takeover, start_from, job: see `holdfast._core.run.folder.RunFolder`. With `local`, a save runs until it
        is in the run, and `asynchronous=False` waits for the local commit.
    """

    def __init__(
        self,
        run: Folder,
        *,
        local: Folder | None = None,
        keep: int | None = None,
        keep_every: int | timedelta | None = None,
        best: str | None = None,
        best_mode: str | None = None,
        keep_best: int = 1,
        save_every: int | timedelta | None = None,
        asynchronous: bool = True,
        in_flight: int = 1,
        on_busy: str = "wait",
        on_failure: str = "raise",
        takeover: bool = False,
        start_from: Folder | None = None,
        job: Job | None = None,
    ) -> None:
        super().__init__(
            run,
            keep=keep,
            keep_every=keep_every,
            best=best,
            best_mode=best_mode,
            keep_best=keep_best,
            save_every=save_every,
            asynchronous=asynchronous,
            in_flight=in_flight,
            on_busy=on_busy,
            on_failure=on_failure,
            takeover=takeover,
            start_from=start_from,
            job=job,
        )
        if local is not None:
            self._tier = LocalTier(local, self.store)

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        expected: str | Iterable[str] | None = PREVIOUS,
        notes: Json = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        force: bool = False,
        timeout: float | None = None,
    ) -> Pending | None:
        """Save a step: copy the state, and go on. `committed()` of the returned `Pending` waits until the
        step is committed: in the run, or with `local=` in the local folders of all hosts.

        While `in_flight` saves are running, `on_busy` decides what this does (it returns None for a save that
        was skipped). If the save that it waits for failed, this raises its error, on all ranks, and begins
        nothing; or this step all the same, if the error is that a rank has left that save out.
        `expected="previous"` compares names with those of the newest committed step.

        metrics: numbers by name, such as {"loss": 1.5}, for `best`; those of the lowest participant are
            stored.
        force: save even if the step is not due by `save_every`.
        timeout: seconds, in place of the job's timeout.
        """

        step = whole_step(step)

        # Called once a slot is free: the state is read then, and the deadline begins then.
        def make(call: Call) -> SaveJob:
            request = SaveRequest(
                store=self._folder(step),
                collect=lambda rank: flatten(state, rank),
                call=call,
                step=step,
                include=include,
                exclude=exclude,
                expected=expected,
                # A function, because only the committer needs it, and it lists the run folder.
                previous=lambda: self._newest_but(step),
                overwrite=True,
                grid=self._job.grid,
                notes=notes,
                about=self._about(metrics),
                options=self._job.options,
                # The committer calls it twice: before it begins, and right before it commits.
                permit=partial(self._permit_save, call, step),
                ended=self._lease.note_end,
                after=lambda: self._retire(step, PARTIAL in request.about),
            )
            return SaveJob(request) if self._tier is None else self._tier.save(self, request, self._takeover)

        return self._save(make, step, force, timeout)

    def restore(
        self,
        state: Mapping[str, object],
        step: int | None = None,
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        strict: bool = True,
        cast: bool = False,
        rename: Rename | None = None,
        on_shape: str = RAISE,
        fallback: bool = True,
    ) -> int | None:
        """Load the newest committed step (or `step`) in place. Returns its number, or None if there is no
        checkpoint at all; the result is also logged, at INFO.

        While the run has no committed step, `start_from` is loaded, and its step number is returned (0 if it
        has none). A step may be a checkpoint of torch DCP or megatron-core. If the folder contains only
        checkpoints that are not steps, or can't be loaded, BadInput is raised. All ranks load the
        same step. If a step is damaged, or was saved with `include=` or `exclude=` and lacks names of the
        state, the one before it is loaded, with a warning, unless `fallback=False` or `step` is given.

        include, exclude, strict, cast, rename, on_shape: as in `holdfast.load`.
        """
        report = self.restore_report(
            state,
            step,
            include=include,
            exclude=exclude,
            strict=strict,
            cast=cast,
            rename=rename,
            on_shape=on_shape,
            fallback=fallback,
        )
        return None if report is None else report.step or 0

    def restore_report(
        self,
        state: Mapping[str, object],
        step: int | None = None,
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        strict: bool = True,
        cast: bool = False,
        rename: Rename | None = None,
        on_shape: str = RAISE,
        fallback: bool = True,
    ) -> LoadReport | None:
        """Like `restore`, but return the whole LoadReport, whose `path` is the loaded checkpoint; None if
        there is no checkpoint at all."""

        check_switches(fallback=fallback)

        def load(store: Store, number: int | None, call: Call) -> LoadReport:
            request = LoadRequest(
                store=store,
                collect=lambda rank: flatten(state, rank),
                call=call,
                include=include,
                exclude=exclude,
                strict=True if call.is_part else strict,
                cast=cast,
                rename=rename,
                on_shape=on_shape,
                options=self._job.options,
            )
            report = run_load_once(request)
            if number is None:
                return report
            if report.step is not None and report.step != number:
                log.warning(
                    "%s holds a checkpoint of step %s: it was copied or renamed. It counts as step %s.",
                    store.url,
                    report.step,
                    number,
                )
            return replace(report, step=number)  # it may have been saved without a step, or by torch DCP

        return self._load(load, step, fallback)

    @one_at_a_time
    def delete(self, step: int) -> None:
        """Remove a committed step: only Holdfast's own files. All participants call it; it waits for running
        saves first.

        Raises NotCommitted if there is no such step; Conflict if a process reads it, or another job saves
        into the run; BadInput for a step that Holdfast did not save here (a link, or a checkpoint of torch
        DCP).
        """
        step = whole_step(step)
        self._settle()
        call = begin_call(self._job)

        def remove(answers: dict[int, Json]) -> Json:
            self._permit(call, lambda: None)
            with self._old.tidying:
                if capabilities(self.store).pins:
                    finish_removals(self.store, why_kept)
                there, folder = committed_folder(self.store, step), own_steps(self.store).get(step)
                if there is None:
                    raise NotCommitted(f"{self.store.url} has no committed step {step}.")
                if folder != there or not is_removable(self.store, there):
                    raise BadInput(f"{self.store.url}/{there} is no step that Holdfast has saved there.")
                remove_step(self.store, there, why_kept)
                self._old.forget(there)
                if committed_folder(self.store, step) is not None:
                    raise Conflict(
                        f"Step {step} in {self.store.url} is being read.", hint="Delete it after that."
                    )
            return None if self._tier is None else self._tier.newest()

        title = f"removal of step {step} from {self.store.url}"
        newest = agree(title, f"{self.store.url}|delete|{step}", remove, call)
        if self._tier is not None and self._has_tier():
            self._tier.forget(step, call.rank, tuple(newest))
