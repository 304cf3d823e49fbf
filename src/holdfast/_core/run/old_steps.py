"""Retention of a run's steps, by facts that are read once from their indexes."""

from __future__ import annotations

import threading

from holdfast._core.io.index_file import open_index
from holdfast._core.io.old_steps import retire
from holdfast._core.io.refusals import Refusals
from holdfast._core.run.leftovers import why_kept
from holdfast._core.store.base import Store
from holdfast._core.store.retention import Retention, StepFacts, facts_of
from holdfast._core.store.run_folder import own_steps
from holdfast.errors import HoldfastError


class OldSteps:
    """Removes the steps that no rule keeps."""

    def __init__(self, store: Store, rules: Retention) -> None:
        self.store, self.rules = store, rules
        self.tidying = threading.Lock()
        """Held while old steps are removed: for one commit at a time."""
        self.damaged: set[int] = set()
        """Steps that a load found damaged."""
        self._facts: dict[str, StepFacts] = {}
        """Cache of facts by folder, so that each index is read once."""
        self._passed: set[str] = set()
        """Cache of folders that are not steps of this run, so that not every save examines them again."""
        self._refusals = Refusals(store)

    def best(self) -> int | None:
        """Return the step with the best metric; None if no step has the metric."""
        return self.rules.best_step([self._read(*found) for found in own_steps(self.store).items()])

    def retire(self, step: int, folder: str) -> None:
        """Remove the steps that no rule keeps, except the step just saved, in `folder`. Only logs errors."""
        with self.tidying:
            self.damaged.discard(step)  # it was saved again
            self._passed.discard(folder)
            self.forget(folder)
            if not self._refusals.may_go_on(folder):
                return
            try:
                for name in retire(
                    self.store,
                    self.rules,
                    step,
                    self._read_once,
                    self.damaged,
                    self._passed,
                    why_kept,
                    self._refusals,
                ):
                    self.forget(name)
            except HoldfastError as error:
                self._refusals.tell(error)

    def forget(self, folder: str) -> None:
        """Drop the cached facts of a folder."""
        self._facts.pop(folder, None)

    def _read(self, step: int, folder: str) -> StepFacts:
        """Read the facts from a step's index; all unknown if it can't be read."""
        try:
            with open_index(self.store.child(folder)) as index:
                return facts_of(step, index.about)
        except HoldfastError:
            return StepFacts(step)

    def _read_once(self, step: int, folder: str) -> StepFacts:
        facts = self._facts.get(folder) or self._read(step, folder)
        if facts != StepFacts(step):  # unknown facts are not cached: the next read may succeed
            self._facts[folder] = facts
        return facts
