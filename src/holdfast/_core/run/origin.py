"""The origin of a run's state: after a run has gone back to an older step, the later steps that it had count
as left behind."""

from __future__ import annotations

import logging

from holdfast._core.store.base import Store
from holdfast._core.store.branches import left_behind, version, write_left
from holdfast._core.store.run_folder import step_of, steps_above

log = logging.getLogger("holdfast")


class Origin:
    """The step that a run was restored from; None if there is none. It applies until a save is committed.

    durable: if only local folders have it, the committed step that it goes back to: those above that, up to a
        step of the same number, are others'.
    """

    def __init__(self, step: int | None = None, durable: int | None = None) -> None:
        self.step = step
        self._durable = step if durable is None else durable
        self._above: dict[int, tuple[str, str]] | None = None
        """The committed steps after it, before the first save, with their folders and versions."""
        self._warned = False

    def follow(self, store: Store, step: int) -> None:
        """Called before the commit of a step. If the step is not below the restored step, but not above all
        committed steps, the run has gone back: the committed steps above the restored one are left behind.

        A step above all others proves nothing: the older step may have been loaded for a comparison. But a
        job that has saved since, into local folders, had gone back.
        """
        if self._above is None:
            found = steps_above(store, step if self._durable is None else self._durable)
            self._above = {one: (marked.folder, version(store, *marked)) for one, marked in found.items()}
        newest = max(self._above, default=-1 if self.step is None else self.step)
        if self.step is not None and step >= self.step:
            self._leave(store, self._above if newest >= step or self._durable != self.step else {})
        elif newest > step and not self._warned:
            self._warned = True
            log.warning(
                "%s has step %d, and step %d is saved below it: `latest` and `restore` still take step %d, "
                "and `keep=` removes step %d first. A run goes back by restore(state, step).",
                store.url,
                newest,
                step,
                newest,
                step,
            )

    def _leave(self, store: Store, above: dict[int, tuple[str, str]]) -> None:
        before = left_behind(store)
        # The restored step may have been left behind before.
        left = {folder: tail for folder, tail in before.items() if step_of(folder) != self._durable}
        left |= {folder: tail for folder, tail in above.values() if tail}
        if left == before:
            return
        write_left(store, left)
        if above:
            log.warning(
                "The run in %s goes back to step %s and leaves %s behind: `latest` and `restore` take steps "
                "that are saved from now on, and `keep=` removes those left behind first.",
                store.url,
                self._durable,
                ", ".join(f"step {one}" for one in sorted(above)),
            )
