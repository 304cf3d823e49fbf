"""`Checkpoints`: a run folder with numbered steps, which is what a training loop wants."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from holdfast import events
from holdfast.adapters.state import flatten
from holdfast.errors import BadInput, CorruptCheckpoint, HoldfastError, NotCommitted, Replaced
from holdfast.flow.load import LoadReport, load_from
from holdfast.flow.operation import agree
from holdfast.flow.retention import committed_steps, remove_step, step_folder, surplus
from holdfast.flow.save import PREVIOUS, SaveReport, save_into
from holdfast.flow.world import find_roster
from holdfast.layout.grid import Grid
from holdfast.options import Options
from holdfast.roster.base import Roster
from holdfast.store.base import Store
from holdfast.store.local import open_store

log = logging.getLogger("holdfast")
TRIES = 10
"""Times that a load begins anew because its checkpoint was replaced or retired meanwhile."""


class Checkpoints:
    """The steps of one run, `run/step-00000100/` and so on.

    `keep` is how many committed steps stay (None: all); older ones go after a newer one is
    committed, never before. The other arguments are those of `holdfast.save`, for all calls.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        keep: int | None = None,
        participants: Iterable[int] | None = None,
        process_group: Any = None,
        no_dist: bool = False,
        timeout: float = 1800.0,
        stall_timeout: float = 120.0,
        grid: Grid | None = None,
        options: Options | None = None,
        roster: Roster | None = None,
    ) -> None:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise BadInput(f"keep must be at least 1, or None to keep every step, not {keep!r}.")
        self.store = open_store(run)
        self.keep = keep
        self._roster = roster
        self._no_dist = no_dist
        self._grid = grid
        self._who: dict[str, Any] = {
            "participants": None if participants is None else tuple(participants),
            "process_group": process_group,
            "timeout": timeout,
            "stall_timeout": stall_timeout,
            "options": options,
        }

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        expected: str | Iterable[str] | None = PREVIOUS,
        notes: Any = None,
    ) -> SaveReport:
        """Save a step. `expected="previous"` compares its names with the newest committed step's."""
        roster = find_roster(self._roster, self._no_dist)
        return save_into(
            self.store.child(step_folder(step)),
            lambda rank: flatten(state, rank),
            step=step,
            roster=roster,
            include=include,
            exclude=exclude,
            expected=expected,
            previous=lambda: self._newest_but(step),
            overwrite=True,
            grid=self._grid,
            notes=notes,
            after=lambda: self._retire(step),
            **self._who,
        )

    def _newest_but(self, step: int) -> Store | None:
        """The newest committed step's folder, other than this step's."""
        older = [other for other in committed_steps(self.store) if other != step]
        return self.store.child(step_folder(older[-1])) if older else None

    def _retire(self, step: int) -> None:
        """Remove steps beyond `keep`, the one just saved never among them."""
        for old in surplus(committed_steps(self.store), self.keep):
            if old != step:
                with suppress(HoldfastError):  # the next save tries again
                    remove_step(self.store, old)

    def restore(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        strict: bool = True,
        fallback: bool = True,
    ) -> int | None:
        """Load the newest committed step (or `step`) in place; returns its number, None if there is none.

        All ranks load the same step. A step that turns out to be damaged is passed over for the
        one before it, with a warning, unless `fallback=False` or a step was named.
        """
        report = self.restore_report(
            state, step, include=include, exclude=exclude, strict=strict, fallback=fallback
        )
        return None if report is None else report.step

    def restore_report(
        self, state: Mapping[str, Any], step: int | None = None, **how: Any
    ) -> LoadReport | None:
        """`restore`, returning the whole report."""
        fallback = how.pop("fallback", True) and step is None
        roster = find_roster(self._roster, self._no_dist)
        rejected: tuple[int, ...] = ()
        tries = 0
        while True:
            chosen = step if step is not None else self._agree_on_newest(roster, rejected)
            if chosen is None:
                if rejected:
                    raise CorruptCheckpoint(
                        f"All committed steps in {self.store.url} are damaged: {sorted(rejected)}."
                    )
                return None
            try:
                return load_from(
                    self.store.child(step_folder(chosen)),
                    lambda rank: flatten(state, rank),
                    roster=roster,
                    **how,
                    **self._who,
                )
            except (Replaced, NotCommitted) as error:
                tries += 1
                if step is not None or tries > TRIES:
                    raise
                log.info("Step %d went while it was being loaded; choosing again: %s", chosen, error)
            except CorruptCheckpoint as error:
                if not fallback:
                    raise
                level = logging.WARNING if roster.rank == 0 else logging.DEBUG
                log.log(level, "Step %d is damaged and passed over for the one before it: %s", chosen, error)
                events.emit(
                    "load.rejected", rank=roster.rank, step=chosen, path=self.store.url, reason=str(error)
                )
                rejected = (*rejected, chosen)

    def _agree_on_newest(self, roster: Roster, rejected: tuple[int, ...]) -> int | None:
        """The newest committed step as the lowest participant sees it."""

        def newest(said: dict[int, Any]) -> int | None:
            found = [step for step in committed_steps(self.store) if step not in rejected]
            return found[-1] if found else None

        who = self._who
        return agree(  # type: ignore[no-any-return]
            f"choice of the newest step in {self.store.url}",
            f"{self.store.url}|{rejected}",
            newest,
            roster,
            who["participants"],
            who["process_group"],
            who["timeout"],
            who["stall_timeout"],
        )

    def latest(self) -> int | None:
        """The newest committed step as this rank sees it, or None."""
        found = self.steps()
        return found[-1] if found else None

    def steps(self) -> list[int]:
        """All committed steps, ascending."""
        return committed_steps(self.store)
