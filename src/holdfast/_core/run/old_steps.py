"""Retention of a run's steps, by facts that are read once from their indexes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from holdfast._core.format.names import INDEX, LEFT, REMOVED
from holdfast._core.io.index_file import open_index
from holdfast._core.io.old_steps import is_removable, remove_step
from holdfast._core.io.refusals import MOST_REFUSED, Refusals
from holdfast._core.io.removal import finish_removals
from holdfast._core.run.leftovers import why_kept
from holdfast._core.store.base import Store
from holdfast._core.store.branches import is_left, left_behind
from holdfast._core.store.retention import Retention, StepFacts, facts_of
from holdfast._core.store.run_folder import MarkEntries, best_of, by_step, linked_steps, own_steps
from holdfast.errors import CorruptCheckpoint, HoldfastError


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

    def retire(self, step: int, folder: str, partial: bool = False) -> None:
        """Remove the steps that no rule keeps, except the step just saved, in `folder`. Only logs errors.

        partial: whether it was saved with `include=` or `exclude=`.
        """
        with self.tidying:
            self.damaged.discard(step)  # it was saved again
            self._passed.discard(folder)
            self.forget(folder)
            if not self.rules.asks_the_index:
                self._facts[folder] = StepFacts(step, partial=partial)
            if not self._refusals.may_go_on(folder):
                return
            try:
                self._remove(self._going(step))
            except HoldfastError as error:
                self._refusals.tell(error)

    def _going(self, saved: int) -> list[str]:
        """Return the folders of the steps that no rule keeps, oldest first.

        Damaged steps do not count as kept steps, and are not removed, so that they can be examined.
        """
        rules, store = self.rules, self.store
        if rules.keep is None:
            return []
        names = store.list()
        if f"{REMOVED}/" in names:
            finish_removals(store, why_kept, self._refusals)
        left = left_behind(store) if LEFT in names else {}
        steps = [
            (step, folders)
            for step, folders in by_step(store, names)
            if step not in self.damaged and not self._passed.issuperset(folders)
        ]
        gone = {step for step, folders in steps if any(is_left(store, left, one, INDEX) for one in folders)}
        steps.sort(key=lambda found: (found[0] not in gone, found[0]))
        newest_first = steps[::-1]
        # Those that have `keep` newer ones and don't stay by their number. If there are none, which is
        # common, no folder is examined.
        if not any(not rules.stays_by_number(step) for step, _ in newest_first[rules.keep :]):
            return []
        removable = self._removable(newest_first, rules.keep)
        if len(removable) <= rules.keep:
            return []
        facts, whole = {step: StepFacts(step, partial=False) for step in removable}, 0
        for step, folder in removable.items():  # the newest first
            if whole == rules.keep and not rules.asks_the_index:
                break
            facts[step] = self._read_once(step, folder)
            whole += facts[step].partial is False
        kept = rules.kept([facts[step]._replace(left=step in gone) for step in removable])
        # An older step that was saved again may not be among the newest; it stays until the next save.
        going = [folder for step, folder in sorted(removable.items()) if step not in kept and step != saved]
        linked = linked_steps(store) if going else {}
        return [folder for folder in going if folder not in linked]

    def _removable(self, newest_first: Sequence[tuple[int, list[str]]], keep: int) -> dict[int, str]:
        """Return the folder of each step that may be removed, of those that the rules compare."""
        rules, store = self.rules, self.store
        # The best step is sought among all that are there, also among those that stay by their number: one
        # that somebody has deleted must not count as the best. The intervals of a timedelta begin at the
        # oldest.
        looked_at = [
            folder
            for place, (step, folders) in enumerate(newest_first)
            if rules.best is not None or place < keep or not rules.stays_by_number(step)
            for folder in folders
        ]
        look, removable = MarkEntries(store, looked_at), dict[int, str]()
        for step, folders in newest_first:
            if rules.best is None and len(removable) >= keep and rules.stays_by_number(step):
                continue  # no other rule compares it with other steps
            marked = best_of(store, folders, look)
            if marked is not None and marked.mark == INDEX and is_removable(store, marked.folder):
                removable[step] = marked.folder
            else:
                self._passed.update(folders)
        return removable

    def _remove(self, folders: Sequence[str]) -> None:
        refused = 0
        for folder in self._refusals.in_turn(folders):
            try:
                remove_step(self.store, folder, why_kept)
            except HoldfastError as error:  # the next save tries again
                self._refusals.add(folder, error)
                refused += 1
                if refused == MOST_REFUSED:
                    return
            else:
                self._refusals.forget(folder)
                self.forget(folder)

    def forget(self, folder: str) -> None:
        """Drop the cached facts of a folder."""
        self._facts.pop(folder, None)

    def _read(self, step: int, folder: str) -> StepFacts:
        """Read the facts from a step's index; unknown if it can't be read. A damaged step is not whole."""
        try:
            with open_index(self.store.child(folder)) as index:
                return facts_of(step, index.about)
        except CorruptCheckpoint:
            return StepFacts(step, partial=True)
        except HoldfastError:
            return StepFacts(step)

    def _read_once(self, step: int, folder: str) -> StepFacts:
        facts = self._facts.get(folder) or self._read(step, folder)
        if facts != StepFacts(step):  # unknown facts are not cached: the next read may succeed
            self._facts[folder] = facts
        return facts
