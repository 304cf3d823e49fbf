"""`Checkpoints`: a run folder with numbered steps, which is what a training loop wants."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from holdfast.background.pending import Pending
from holdfast.loading.job import LoadReport, LoadRequest
from holdfast.protocol.call import Call, whole_step
from holdfast.run.folder import RunFolder
from holdfast.saving.job import SaveJob
from holdfast.saving.request import PREVIOUS, SaveRequest
from holdfast.state.flatten import flatten
from holdfast.store.base import Store
from holdfast.store.run_folder import step_of
from holdfast.values import Json

log = logging.getLogger("holdfast")


class Checkpoints(RunFolder):
    """The steps of one run, `run/step-00000100/` and so on.

    A save is asynchronous: it copies the state and goes on in the background, at most `in_flight` at a time.
    `keep` is how many committed steps stay (None: all); older ones go after a newer one is committed, never
    before. Use it as a context manager, or call `close()`, before the process group is destroyed: both wait
    for what is under way.

    asynchronous, in_flight, on_busy, on_failure, host_memory_budget, takeover: see
        `holdfast.run.folder.RunFolder`.
    participants, process_group, no_dist: who takes part in every call, as in `holdfast.save`.
    timeout, stall_timeout: seconds for each call, counted from it.
    grid: the layout, kept in each index. options, roster: as in `holdfast.save`.
    """

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        expected: str | Iterable[str] | None = PREVIOUS,
        notes: Json = None,
    ) -> Pending | None:
        """Save a step: copy the state, and go on. `committed()` of what this returns waits until it is
        durable.

        While `in_flight` saves are under way, `on_busy` says what this does (None is returned for a save that
        was skipped). If the save that it waits for failed, this raises its error, on all ranks, and begins
        nothing. `expected="previous"` compares names with the newest committed step's.
        """

        step = whole_step(step)

        # Called once a slot is free: only then is the state read, and only then does the deadline begin.
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
                grid=self._grid,
                notes=notes,
                options=self._options,
                # The committer calls it twice: before it begins, and right before it commits.
                permit=partial(self._permit, call),
                after=lambda: self._retire(step),
            )
            return SaveJob(request)

        return self._save(make, step)

    def restore(
        self,
        state: Mapping[str, object],
        step: int | None = None,
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        strict: bool = True,
        fallback: bool = True,
    ) -> int | None:
        """Load the newest committed step (or `step`) in place; returns its number, None if there is no
        checkpoint at all.

        A step may be one of torch DCP or megatron-core. Checkpoints that are no step's, or can't be loaded,
        are a BadInput, never None. All ranks load the same step. A step that turns out to be damaged is
        passed over for the one before it, with a warning, unless `fallback=False` or a step was named.
        """
        report = self.restore_report(
            state, step, include=include, exclude=exclude, strict=strict, fallback=fallback
        )
        return None if report is None else report.step

    def restore_report(
        self,
        state: Mapping[str, object],
        step: int | None = None,
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        strict: bool = True,
        fallback: bool = True,
    ) -> LoadReport | None:
        """`restore`, returning the whole report; None if there is no checkpoint at all."""

        def load(store: Store, call: Call) -> LoadReport:
            report = LoadRequest(
                store=store,
                collect=lambda rank: flatten(state, rank),
                call=call,
                include=include,
                exclude=exclude,
                strict=strict,
                options=self._options,
            ).run()
            number = step_of(os.path.basename(store.url))
            if report.step is not None and report.step != number:
                log.warning(
                    "%s holds a checkpoint of step %s: it was copied or renamed. It counts as step %s.",
                    store.url,
                    report.step,
                    number,
                )
            return replace(report, step=number)  # it may also be saved without one, or by torch DCP

        return self._load(load, step, fallback)
