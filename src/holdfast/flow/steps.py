"""The numbered steps of a run: which is the newest, which may go, what is loaded if the newest is damaged."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from holdfast import events
from holdfast.errors import BadInput, CorruptCheckpoint, HoldfastError, NotCommitted, Replaced
from holdfast.flow.operation import agree
from holdfast.flow.retention import committed_steps, remove_step, step_folder, surplus
from holdfast.flow.world import find_roster
from holdfast.layout.grid import Grid
from holdfast.options import Options
from holdfast.roster.base import Roster
from holdfast.store.base import Store
from holdfast.store.local import open_store

log = logging.getLogger("holdfast")
TRIES = 10
"""Times that a load begins anew because its checkpoint was replaced or retired meanwhile."""
T = TypeVar("T")


class Steps:
    """A run folder as its ranks use it; what a state is made of is for those who extend it.

    keep: how many committed steps stay (None: all); older ones go after a newer one is committed, never before.
    The other arguments are those of `holdfast.save`, for all calls.
    """

    megatron = False
    """Are folders named as Megatron-LM names them?"""

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
        self._given_roster = roster
        self._no_dist = no_dist
        self._who: dict[str, Any] = {
            "participants": None if participants is None else tuple(participants),
            "process_group": process_group,
            "timeout": timeout,
            "stall_timeout": stall_timeout,
        }
        self._grid, self._options = grid, options

    def latest(self) -> int | None:
        """The newest committed step as this rank sees it, or None."""
        found = self.steps()
        return found[-1] if found else None

    def steps(self) -> list[int]:
        """All committed steps, ascending."""
        return list(committed_steps(self.store))

    def _roster(self) -> Roster:
        return find_roster(self._given_roster, self._no_dist)

    def _folder(self, step: int) -> Store:
        """Where a step is saved."""
        return self.store.child(step_folder(step, self.megatron))

    def _newest_but(self, step: int) -> Store | None:
        """The newest committed step's folder, other than this step's."""
        older = [folder for other, folder in committed_steps(self.store).items() if other != step]
        return self.store.child(older[-1]) if older else None

    def _retire(self, step: int) -> None:
        """Remove steps beyond `keep`, the one just saved never among them."""
        found = committed_steps(self.store)
        for old in surplus(found, self.keep):
            if old != step:
                with suppress(HoldfastError):  # the next save tries again
                    remove_step(self.store, found[old])

    def _load(self, load: Callable[[Store], T], step: int | None, fallback: bool) -> T | None:
        """`load` a step, or the newest that is whole; None if there is none."""
        roster = self._roster()
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
                own = step_folder(chosen, self.megatron)
                return load(self.store.child(committed_steps(self.store).get(chosen, own)))
            except (Replaced, NotCommitted) as error:
                tries += 1
                if step is not None or tries > TRIES:
                    raise
                log.info("Step %d went while it was being loaded; choosing again: %s", chosen, error)
            except CorruptCheckpoint as error:
                if not fallback or step is not None:
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

        title = f"choice of the newest step in {self.store.url}"
        return agree(title, f"{self.store.url}|{rejected}", newest, roster, **self._who)  # type: ignore[no-any-return]
