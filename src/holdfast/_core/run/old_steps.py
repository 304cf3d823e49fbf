"""The steps of a run that a rule keeps or gives up, by what their indexes say."""

from __future__ import annotations

import threading

from holdfast._core.io.index_file import open_index
from holdfast._core.io.old_steps import retire
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
        """What the indexes of folders say, so that each is read once."""
        self._passed: set[str] = set()
        """Folders that were found to be no step of ours, so that not each save looks at all of them again."""

    def best(self) -> int | None:
        """Return the step with the best metric; None if none has it."""
        return self.rules.best_step([self._read(*found) for found in own_steps(self.store).items()])

    def retire(self, step: int, folder: str) -> None:
        """Remove the steps that no rule keeps, the one just saved, in `folder`, never among them."""
        with self.tidying:
            self.damaged.discard(step)  # it was saved again
            self._passed.discard(folder)
            self.forget(folder)
            for name in retire(self.store, self.rules, step, self._read_once, self.damaged, self._passed):
                self.forget(name)

    def forget(self, folder: str) -> None:
        """Forget what the index of a folder has said."""
        self._facts.pop(folder, None)

    def _read(self, step: int, folder: str) -> StepFacts:
        """Return what the index of a step says; of one that can't be read, that nothing is known."""
        try:
            with open_index(self.store.child(folder)) as index:
                return facts_of(step, index.about)
        except HoldfastError:
            return StepFacts(step)

    def _read_once(self, step: int, folder: str) -> StepFacts:
        facts = self._facts.get(folder) or self._read(step, folder)
        if facts != StepFacts(step):  # the next look may succeed
            self._facts[folder] = facts
        return facts
