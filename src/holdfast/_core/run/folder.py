"""The numbered steps of a run: find the newest, remove old ones, fall back to an older one if the newest is
damaged, and track running saves."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Self, SupportsFloat, TypeVar

from holdfast import events
from holdfast._core.background.pending import Pending, finished
from holdfast._core.background.queue import EXIT_GRACE, LANE, SaveQueue
from holdfast._core.base.deadline import check_wait
from holdfast._core.base.values import Message, check_switches
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.protocol.call import Call, begin_call, whole_step
from holdfast._core.protocol.job import Job, job_of
from holdfast._core.protocol.liveness import LEFT_OUT
from holdfast._core.protocol.operation import agree
from holdfast._core.run import choice
from holdfast._core.run.choice import Found
from holdfast._core.run.local_tier import LocalTier
from holdfast._core.run.old_steps import OldSteps
from holdfast._core.run.origin import Origin
from holdfast._core.run.owner import lease_of
from holdfast._core.run.save_times import SaveTimes
from holdfast._core.run.turns import one_at_a_time
from holdfast._core.saving.job import SaveJob
from holdfast._core.store.base import Folder, Store, bounded
from holdfast._core.store.local import open_store
from holdfast._core.store.retention import Retention
from holdfast._core.store.run_folder import (
    committed_folder,
    committed_steps,
    newest_own_step,
    newest_steps,
    refuse_other_checkpoints,
    step_folder,
)
from holdfast.errors import BadInput, CorruptCheckpoint, HoldfastError, NotCommitted, Replaced

log = logging.getLogger("holdfast")
_RETRY = re.compile(r"retry\((\d+)\)")
TRIES = 10
"""Maximum attempts of a load whose checkpoint is replaced or removed meanwhile."""
T = TypeVar("T")


class RunFolder:
    """The base class of run folders. Subclasses define what a state is.

    keep: number of committed steps to keep (None: all). Older ones are removed after a newer one is
        committed, never before, and not while a process reads them.
    keep_every: also keep steps that are multiples of this number; or, with a timedelta, one step per
        interval.
    best, best_mode: also keep the step whose metric of this name (`save(metrics=)`) is the lowest ("min") or
        the highest ("max").
    keep_best: number of best steps to keep.
    save_every: `save` skips steps that are not multiples of this number, and returns None; or, with a
        timedelta, it skips until that time has passed since the last save, by the clock of the lowest
        participant.
    asynchronous: True: `save` returns once the state is copied; False: once it is committed.
    in_flight: maximum number of concurrent saves. Each has its own copy of the state and its own writer
        process.
    on_busy: what `save` does while `in_flight` saves are running: "wait" for the oldest, or "skip" this one,
        on all ranks.
    on_failure: what happens after a background save fails: "raise" its error on all ranks at the next `save`
        that waits for it (with one in flight: the next `save`), at `restore` or `close`; "warn" and go on;
        "retry(3)": retry up to three times, then raise.
    takeover: take ownership of the folder, once, even from a job that is running or may be. Saves of that job
        then fail until it makes a new Checkpoints.
    start_from: what `restore` loads while this run has no committed step: another run (its newest committed
        step) or one checkpoint, in any format that `holdfast.load` reads. It is only read.
    job: who takes part in every call, its deadlines and options (`holdfast.Job`). `host_memory_budget` is
        divided equally among `in_flight` saves.
    """

    megatron = False
    """Whether folders have Megatron-LM's names."""

    def __init__(
        self,
        run: Folder,
        *,
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
        self._rules = Retention(
            keep=keep, keep_every=keep_every, best=best, best_mode=best_mode, keep_best=keep_best
        )
        check_switches(asynchronous=asynchronous, takeover=takeover)
        if isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1:
            raise BadInput(f"in_flight must be a whole number from 1 on, not {in_flight!r}.")
        if on_busy not in ("wait", "skip"):
            raise BadInput(f"on_busy must be 'wait' or 'skip', not {on_busy!r}.")
        tries = _RETRY.fullmatch(on_failure) if isinstance(on_failure, str) else None
        if on_failure not in ("raise", "warn") and tries is None:
            raise BadInput(f"on_failure must be 'raise', 'warn' or 'retry(n)', not {on_failure!r}.")
        self._job = job_of(job)
        options = self._job.options
        self.store: Store = open_store(run)
        self._times = SaveTimes(save_every, self.store.url, lambda: begin_call(self._job).lane("due"))
        self._asynchronous, self._skips, self._warns = asynchronous, on_busy == "skip", on_failure == "warn"
        self._retries = int(tries[1]) if tries else options.retries
        budget = options.host_memory_budget
        self._budget = None if budget is None else budget // in_flight
        self._in_flight = in_flight
        self._old = OldSteps(self.store, self._rules)
        self._takeover = takeover
        self._source = None if start_from is None else open_store(start_from)
        self._origin: Origin | None = Origin()
        """None once a save is committed, so that later saves skip the check."""
        self._tier: LocalTier | None = None
        self._calls = threading.RLock()
        """Serialises calls (`turns`)."""
        # At the end of the process the folder is released after the saves.
        self._lease = lease_of(self.store)
        self._queue = SaveQueue(self, in_order=False)

    # So that a TypeError names the public class.
    __init__.__qualname__ = "Checkpoints.__init__"

    def latest(self) -> int | None:
        """Return the newest committed step as this rank sees it, or None."""
        newest = next(iter(newest_steps(self.store, 1)), None)
        if newest is None:
            refuse_other_checkpoints(self.store)
        return newest

    def steps(self) -> list[int]:
        """List all committed steps, ascending."""
        return list(committed_steps(self.store))

    def best_step(self) -> int | None:
        """Return the committed step with the best metric as this rank sees it; None if none has that metric.

        Raises BadInput without `best=`.
        """
        if self._rules.best is None:
            raise BadInput(
                "best_step() needs the name of a metric.",
                hint="Checkpoints(run, best='loss', best_mode='min')",
            )
        return self._old.best()

    def should_save(self, step: int) -> bool:
        """Return whether `save` would save this step by `save_every`; the same on all ranks.

        Call it on all ranks in the same order and, with a timedelta, in every step of the loop. A `save` of
        the same step right after it does not count again.
        """
        return self._times.due(whole_step(step))

    @one_at_a_time
    def close(self, timeout: float | None = None) -> None:
        """Wait for running saves; free memory, file descriptors and writer processes. A later save makes new
        ones.

        timeout: seconds to wait; default: until the deadlines of the saves.
        Raises the first error of a save, on all ranks.
        """
        check_wait(timeout)
        self._times.close()
        first: HoldfastError | None = None
        for save in self._queue.settle(timeout=timeout):
            try:
                self._check(save)
            except HoldfastError as error:
                first = first or error
        self._queue.release()
        self._lease.leave(self)
        if self._tier is not None:
            self._tier.leave(self)
        if first is not None:
            raise first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(EXIT_GRACE)  # the copied states are still worth saving
        except Exception as failure:
            log.warning("%s", failure)

    def _settle(self, leave: int = 0, step: int | None = None) -> HoldfastError | None:
        """Wait for the oldest saves, and raise or log their errors, until at most `leave` are left.

        step: one that is about to be saved. Then there is none of it among those left, and an error that says
            that a rank has left a save out is returned: that rank saves this step, so all must.
        """
        left_out: HoldfastError | None = None
        again = [number for number, save in enumerate(self._queue.saves) if save.step == step]
        leave = min(leave, len(self._queue.saves) - 1 - again[-1]) if step is not None and again else leave
        for save in self._queue.settle(leave):
            try:
                self._check(save)
            except HoldfastError as error:
                if step is None or LEFT_OUT not in error.details:
                    raise
                left_out = error
        return left_out

    def _check(self, ended: Pending) -> None:
        """Raise or log the error of a save, if it failed."""
        error = ended.exception()
        if error is None:
            self._origin = None
        if error is not None and not self._warns:
            raise error
        if error is not None:
            log.warning("A save in the background failed: %s", error)

    @one_at_a_time
    def _save(
        self, make: Callable[[Call], SaveJob], step: int, force: bool, timeout: float | None
    ) -> Pending | None:
        """Begin the save that `make` gives; None if it is not due, or is skipped because a rank has too many
        under way."""
        job = self._job if timeout is None else replace(self._job, timeout=timeout)
        # Asked also if the save is forced: all calls count.
        if not self.should_save(step) and not force:
            return None
        behind = self._saves_to_tier(job) or self._asynchronous
        if self._skips and behind and self._is_busy(step):
            return None
        left_out = self._settle(leave=self._in_flight - 1 if behind else 0, step=step)
        # Saves of other run folders are under way, so these have their own messages.
        line = f"{LANE}-{hex_digest(digest(self.store.url.encode()))}"
        if behind:
            pending = self._queue.save(
                lambda: make(begin_call(job).lane(line).in_line(line, self._pending())),
                self._folder(step).url,
                step,
                self._in_flight,
                self._budget,
                self._retries,
            )
            pending.only_warns = self._warns
            if left_out is not None:
                left_out.hint = f"Step {step} is being saved all the same."
                raise left_out
            if not self._asynchronous:
                pending.committed()
            return pending
        report = make(begin_call(job).in_line(line)).run()
        self._origin = None
        return finished(report, step)

    def _has_tier(self) -> bool:
        """Return whether all ranks have local folders."""
        return self._tier is not None and self._tier.begin(begin_call(self._job).lane("local")) is not None

    def _saves_to_tier(self, job: Job) -> bool:
        """Return whether all ranks have local folders to save into."""
        return self._tier is not None and self._tier.begin_save(begin_call(job).lane("local"))

    def _pending(self) -> list[int | None]:
        return [save.step for save in self._queue.saves if not save.done()]

    def _is_busy(self, step: int) -> bool:
        """Return whether a save would have to wait on any rank. All must decide alike, so they agree."""
        saves = self._queue.saves
        mine = len(saves) == self._in_flight and not saves[0].done()
        title = f"question whether to skip step {step} in {self.store.url}"
        place = f"{self.store.url}|busy|{step}"
        return bool(
            agree(
                title, place, lambda answers: any(answers.values()), begin_call(self._job).lane("busy"), mine
            )
        )

    def _folder(self, step: int) -> Store:
        return self.store.child(step_folder(step, self.megatron))

    def _newest_but(self, step: int) -> Store | None:
        folder = newest_own_step(self.store, but=step)
        return None if folder is None else self.store.child(folder)

    def _permit(self, call: Call, tick: Callable[[], None], attempt: str = "") -> None:
        """Raise Conflict if the run folder is not this job's. Only the committer calls it."""
        self._lease.hold(self, call.roster.job(), call.rank, self._takeover, tick, attempt)

    def _permit_save(self, call: Call, step: int, tick: Callable[[], None], attempt: str) -> None:
        """Also note which steps the run leaves behind, if it has gone back to an older one."""
        self._permit(call, tick, attempt)
        if (origin := self._origin) is not None:
            with self._old.tidying:
                origin.follow(self.store, step)

    def _retire(self, step: int, partial: bool = False) -> None:
        """Remove the steps that no rule keeps, the one just saved never among them.

        partial: whether it was saved with `include=` or `exclude=`.
        """
        # Another job may have taken the folder over since the commit; this job must not remove its steps.
        if self._rules.keep is None or not self._lease.is_held():
            return
        self._old.retire(step, step_folder(step, self.megatron), partial)

    def _about(self, metrics: Mapping[str, SupportsFloat] | None) -> Message:
        """Return what the index of a step says besides the arguments of every save."""
        about: Message = {}
        if rules := self._rules.describe():
            about["retention"] = rules
        if metrics is not None:
            about["metrics"] = self._rules.checked(metrics)
        return about if self._tier is None else about | self._tier.about()

    @one_at_a_time
    def _load(
        self, load: Callable[[Store, int | None, Call], T], step: int | None, fallback: bool
    ) -> T | None:
        """Call `load` with the folder and number of a step, or of the newest one that can be loaded, or of
        what the run starts from, whose number may not be known; None if there is none of these."""
        step = None if step is None else whole_step(step)
        self._settle()
        call = begin_call(self._job)  # one for all steps that are tried, so that they share its deadline
        leads = call.rank == call.participants[0]  # one participant logs what all of them do
        rejected: dict[int, HoldfastError] = {}
        tries = 0
        while True:
            found = self._find(step, call, (*rejected,))
            if found is None:
                if rejected:
                    raise choice.all_passed_over(self.store, rejected)
                return None
            chosen, store, place = found.step, found.store, found.place
            is_given = step is not None or store is self._source  # then there is nothing to choose
            try:
                loaded = load(store, chosen, replace(call, place=place, is_part=found.is_part))
                level = logging.INFO if leads else logging.DEBUG
                if self._tier is not None:
                    self._tier.restored(found.ancestry)
                if found.is_own:
                    local = found.ancestry.parent and found.ancestry.origin
                    self._origin = Origin(chosen, found.ancestry.origin_step if local else None)
                    where = f"{store.url} and the other local folders" if place else store.url
                    log.log(level, "Step %s is restored, from %s.", chosen, where)
                else:  # a step of another run leaves none of this one behind
                    log.log(level, "%s has no step yet: the run starts from %s.", self.store.url, store.url)
                return loaded
            except choice.ANOTHER_MAY_LOAD as error:
                level = logging.WARNING if leads else logging.DEBUG
                if place and self._tier is not None:
                    self._tier.rejected.add(found.save)
                    log.log(level, "Step %s can't be restored from local folders: %s", chosen, error)
                    continue
                # The job that saves here may replace or retire the step meanwhile: that is no damage.
                if isinstance(error, Replaced | NotCommitted):
                    tries += 1
                    if is_given or tries > TRIES:
                        raise
                    log.info("Step %s went while it was being loaded; choosing again: %s", chosen, error)
                    continue
                why = choice.why_passed_over(error)
                if not why or not fallback or is_given or not found.is_own or chosen is None:
                    raise
                log.log(level, "Step %d %s passed over for the one before it: %s", chosen, why, error)
                events.emit(
                    "load.rejected", rank=call.rank, step=chosen, path=self.store.url, reason=str(error)
                )
                rejected[chosen] = error
                if isinstance(error, CorruptCheckpoint):
                    self._old.damaged.add(chosen)

    def _find(self, step: int | None, call: Call, rejected: tuple[int, ...]) -> Found | None:
        """Return a step, whose folder need not be there, or what `_load` says."""
        tier = self._tier
        copy = choice.agree_on_copy(tier, step, call, rejected) if tier and self._has_tier() else None
        if copy is not None and copy.place:
            return copy
        if step is None:
            found = choice.agree_on_newest(self.store, self._source, call, rejected)
        else:
            folder = committed_folder(bounded(self.store, call.deadline), step) or step_folder(
                step, self.megatron
            )
            found = Found(step, self.store.child(folder), True)
        return found if found is None or copy is None else found._replace(ancestry=copy.ancestry)
