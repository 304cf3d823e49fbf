"""The numbered steps of a run: find the newest, remove old ones, load an older one if the newest is damaged;
and keep track of the saves under way."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from holdfast import events
from holdfast.background.manager import EXIT_GRACE, LANE, background_of
from holdfast.background.pending import Pending, finished
from holdfast.errors import (
    BadInput,
    CorruptCheckpoint,
    HoldfastError,
    NotCommitted,
    Replaced,
)
from holdfast.format.digest import digest, hex_digest
from holdfast.layout.grid import Grid
from holdfast.options import Options
from holdfast.protocol.call import Call, begin_call, check_arguments, check_participants, whole_step
from holdfast.protocol.operation import agree
from holdfast.roster.base import Roster
from holdfast.run.owner import lease_of
from holdfast.saving.job import SaveJob
from holdfast.store.base import Store
from holdfast.store.local import open_store
from holdfast.store.run_folder import (
    committed_folder,
    committed_steps,
    own_steps,
    refuse_other_checkpoints,
    retire,
    step_folder,
)
from holdfast.values import Json

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("holdfast")
_RETRY = re.compile(r"retry\((\d+)\)")
TRIES = 10
"""How often a load begins again because its checkpoint was replaced or retired meanwhile."""
T = TypeVar("T")


class RunFolder:
    """A run folder as its ranks use it. Subclasses define what a state is made of.

    keep: how many committed steps stay (None: all); older ones are removed after a newer one is committed,
        never before.
    asynchronous: `save` returns once the state is copied; else once it is committed.
    in_flight: how many saves may be under way at once. Each has its own copy of the state and its own writer
        process.
    on_busy: what `save` does while that many are under way: "wait" for the oldest, or "skip" this one, on all
        ranks.
    on_failure: what a failed save in the background does: "raise" its error on all ranks at the next `save`
        that waits for it (with one in flight: the next `save`), at `restore` or `close`; "warn" and go on;
        "retry(3)": try three times more, then raise.
    host_memory_budget: bytes that copies of asynchronous saves may take on this rank, in equal parts; a state
        that is larger than its part is copied in waves.
    takeover: save even if another job saves into this folder that is at work, or is not known to have ended;
        the saves of that job then fail.
    participants, process_group, no_dist: who takes part in every call, as in `holdfast.save`.
    timeout, stall_timeout: seconds for each call, counted from it.
    grid: the layout, kept in each index. options, roster: as in `holdfast.save`.
    """

    megatron = False
    """Are folders named as Megatron-LM names them?"""

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        keep: int | None = None,
        asynchronous: bool = True,
        in_flight: int = 1,
        on_busy: str = "wait",
        on_failure: str = "raise",
        host_memory_budget: int | None = None,
        participants: Iterable[int] | None = None,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
        timeout: float = 1800.0,
        stall_timeout: float = 120.0,
        takeover: bool = False,
        grid: Grid | None = None,
        options: Options | None = None,
        roster: Roster | None = None,
    ) -> None:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise BadInput(f"keep must be at least 1, or None to keep every step, not {keep!r}.")
        if isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1:
            raise BadInput(f"in_flight must be a whole number from 1 on, not {in_flight!r}.")
        if on_busy not in ("wait", "skip"):
            raise BadInput(f"on_busy must be 'wait' or 'skip', not {on_busy!r}.")
        tries = _RETRY.fullmatch(on_failure) if isinstance(on_failure, str) else None
        if on_failure not in ("raise", "warn") and tries is None:
            raise BadInput(f"on_failure must be 'raise', 'warn' or 'retry(n)', not {on_failure!r}.")
        check_arguments(grid=grid, host_memory_budget=host_memory_budget)
        self.store = open_store(run)
        self.keep = keep
        self._asynchronous, self._skips, self._warns = asynchronous, on_busy == "skip", on_failure == "warn"
        self._retries = int(tries[1]) if tries else 0
        self._budget = None if host_memory_budget is None else host_memory_budget // in_flight
        self._in_flight, self._begun = in_flight, 0
        self._pending: deque[Pending] = deque()
        self._damaged: set[int] = set()
        """Steps that a load found damaged."""
        self.tidying = threading.Lock()
        """Held while old steps are removed: for one commit at a time."""
        self._call = partial(
            begin_call,
            roster,
            no_dist=no_dist,
            participants=check_participants(participants),
            process_group=process_group,
            timeout=timeout,
            stall_timeout=stall_timeout,
        )
        """Begins a call, and with it its deadline."""
        self._grid, self._options = grid, options or Options()
        self._takeover = takeover
        # At the end of the process the folder is released after the saves (`exits.Stage`).
        self._lease = lease_of(self.store)
        self._slots = [background_of(self) for _ in range(in_flight)]

    def latest(self) -> int | None:
        """Return the newest committed step as this rank sees it, or None."""
        steps = self.steps()
        if not steps:
            refuse_other_checkpoints(self.store)
        return steps[-1] if steps else None

    def steps(self) -> list[int]:
        """List all committed steps, ascending."""
        return list(committed_steps(self.store))

    def close(self, timeout: float | None = None) -> None:
        """Wait for the saves under way, and free memory, descriptors and writer processes. A later save makes
        new ones.

        timeout: seconds to wait; by default the saves' own deadlines end it. Raises the first error of a
            save, on all ranks.
        """
        first: HoldfastError | None = None
        while self._pending:
            waiting = len(self._pending)
            try:
                self._settle(timeout=timeout)
            except HoldfastError as error:
                if len(self._pending) == waiting:
                    raise  # it goes on
                first = first or error
        for slot in self._slots:
            slot.release()
        self._lease.leave(self)
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

    def _settle(self, leave: int = 0, timeout: float | None = None) -> None:
        """Wait for the oldest saves, and raise or log their errors, until at most `leave` are left."""
        while len(self._pending) > leave:
            pending = self._pending[0]
            try:
                pending.committed(timeout)
            except BaseException:
                if not pending.done() or pending.upload_completion.exception() is None:
                    raise  # the save goes on, or this is not its error: Ctrl-C
                self._pending.popleft()
                self._failed(pending)
            else:
                self._pending.popleft()

    def _failed(self, pending: Pending) -> None:
        error = pending.upload_completion.exception()
        assert error is not None
        if not self._warns:
            raise error
        log.warning("A save in the background failed: %s", error)

    def _save(self, make: Callable[[Call], SaveJob], step: int) -> Pending | None:
        """Begin the save that `make` gives; None if it is skipped because a rank has too many under way."""
        if self._skips and self._asynchronous and self._is_busy(step):
            return None
        self._settle(leave=self._in_flight - 1 if self._asynchronous else 0)
        if self._asynchronous:
            slot = self._begun % self._in_flight  # that of the oldest, which has ended
            self._begun += 1  # also if it fails here, so that ranks use the same lane the next time
            # Saves of other slots and other run folders run at the same time, so each has its own messages.
            lane = f"{LANE}-{hex_digest(digest(self.store.url.encode()))}-{slot}"
            pending = self._slots[slot].save(
                lambda: make(self._call().lane(lane)),
                self._folder(step).url,
                step,
                self._budget,
                self._retries,
            )
            pending.only_warns = self._warns
            self._pending.append(pending)
            return pending
        return finished(make(self._call()).run(), step)

    def _is_busy(self, step: int) -> bool:
        """Return whether a save would have to wait on any rank. All must decide alike, so they agree."""
        mine = len(self._pending) == self._in_flight and not self._pending[0].done()
        title = f"question whether to skip step {step} in {self.store.url}"
        place = f"{self.store.url}|busy|{step}"
        return bool(
            agree(title, place, lambda answers: any(answers.values()), self._call().lane("busy"), mine)
        )

    def _folder(self, step: int) -> Store:
        """Return the folder that a step is saved in."""
        return self.store.child(step_folder(step, self.megatron))

    def _newest_but(self, step: int) -> Store | None:
        """Return the folder of the newest committed step other than `step`."""
        older = [folder for other, folder in own_steps(self.store).items() if other != step]
        return self.store.child(older[-1]) if older else None

    def _permit(self, call: Call, tick: Callable[[], None]) -> None:
        """Raise Conflict if the run folder is not this job's. Only the committer calls it."""
        self._lease.hold(self, call.roster.job(), call.rank, self._takeover, tick)

    def _retire(self, step: int) -> None:
        """Remove steps beyond `keep`, the one just saved never among them."""
        # Another job may have taken the folder over since the commit; this job must not remove its steps.
        if self.keep is None or not self._lease.is_held():
            return
        with self.tidying:
            self._damaged.discard(step)  # it was saved again
            retire(self.store, self.keep, step, self._damaged)

    def _load(self, load: Callable[[Store, Call], T], step: int | None, fallback: bool) -> T | None:
        """Call `load` with a step, or with the newest undamaged one; None if there is none."""
        step = None if step is None else whole_step(step)
        self._settle()
        call = self._call()  # one for all steps that are tried, so that they share its deadline
        rejected: tuple[int, ...] = ()
        tries = 0
        while True:
            chosen = step if step is not None else self._agree_on_newest(call, rejected)
            if chosen is None:
                if rejected:
                    raise CorruptCheckpoint(
                        f"All committed steps in {self.store.url} are damaged: {sorted(rejected)}."
                    )
                return None
            try:
                own = step_folder(chosen, self.megatron)
                return load(self.store.child(committed_folder(self.store, chosen) or own), call)
            # The job that saves here may replace or retire the step meanwhile: that is no damage.
            except (Replaced, NotCommitted) as error:
                tries += 1
                if step is not None or tries > TRIES:
                    raise
                log.info("Step %d went while it was being loaded; choosing again: %s", chosen, error)
            except CorruptCheckpoint as error:
                if not fallback or step is not None:
                    raise
                # All participants get here, so only one of them warns.
                level = logging.WARNING if call.rank == call.participants[0] else logging.DEBUG
                log.log(level, "Step %d is damaged and passed over for the one before it: %s", chosen, error)
                events.emit(
                    "load.rejected", rank=call.rank, step=chosen, path=self.store.url, reason=str(error)
                )
                rejected = (*rejected, chosen)
                self._damaged.add(chosen)

    def _agree_on_newest(self, call: Call, rejected: tuple[int, ...]) -> int | None:
        """Return the newest committed step as the lowest participant sees it, on all ranks."""

        def newest(answers: dict[int, Json]) -> int | None:
            steps = self.steps()
            if not steps:
                refuse_other_checkpoints(self.store)
            whole = [step for step in steps if step not in rejected]
            return whole[-1] if whole else None

        # The place holds the rejected steps: ranks that have rejected different ones must not meet here.
        title = f"choice of the newest step in {self.store.url}"
        return agree(title, f"{self.store.url}|{rejected}", newest, call)  # type: ignore[no-any-return]
