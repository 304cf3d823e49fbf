"""What keeps old steps of a run from being removed: told once, and tried again at few requests a save."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence

from holdfast._core.format.names import PINS
from holdfast._core.store.base import Store, capabilities
from holdfast.errors import HoldfastError

log = logging.getLogger("holdfast")
MOST_REFUSED = 3
"""Steps whose removal may fail after one save; after that, the next save goes on."""
MOST_NOTES = 16
"""Notes of removals (`removal`) that are gone on with after one save."""

_NO_RIGHT = (
    " Give this job the right to delete there (s3:DeleteObject; storage.objects.delete; in a file system, to "
    "write to the folders of steps), if it has none."
)


class Refusals:
    """The steps of a run that this process could not remove."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._folders: dict[str, None] = {}
        """Their folders; the one whose last try is the longest ago comes first."""
        self._told = set[tuple[object, ...]]()
        """Causes that a warning was logged about."""
        self.stopped_at: tuple[bool, str] | None = None
        """The note at which going on with removals has stopped, as a key of `next_notes`."""

    def may_go_on(self, saved: str) -> bool:
        """Return whether steps may be removed now, as far as one request tells, which is made only after a
        removal has failed: who may delete nothing is told so also for a name that nobody has.

        saved: the folder of the step that was just saved. Of another one, somebody may hold all names.
        """
        # On a file system a name that is not there is no question of rights, and a try costs no request.
        if not self._folders or capabilities(self._store).folders:
            return True
        try:
            self._store.child(saved).delete(f"{PINS}/{os.urandom(8).hex()}")
        except HoldfastError as error:
            self.tell(error)
            return False
        return True

    def in_turn(self, folders: Sequence[str]) -> list[str]:
        """Return the folders of steps to be removed, oldest first, in the order in which they are tried."""
        # A few refusals end the tries after a save, so none may stand before those that would succeed. Old
        # steps may be somebody else's, or held by hand; or the youngest are those that a rule of the bucket
        # protects. So both ends of what was not tried come first. Then what was refused: the oldest one, and
        # the others in turn.
        self._folders = {folder: None for folder in self._folders if folder in folders}
        new = [folder for folder in folders if folder not in self._folders]
        order = list[str]()
        while new:
            order.append(new.pop(-1 if len(order) % 2 == 0 else 0))
        oldest = [folder for folder in folders if folder in self._folders][:1]
        return order + oldest + [folder for folder in self._folders if folder not in oldest]

    def add(self, folder: str, error: HoldfastError) -> None:
        """Note that the removal of a step has failed."""
        self.forget(folder)
        self._folders[folder] = None
        self.tell(error)

    def forget(self, folder: str) -> None:
        """Note that a step was removed."""
        self._folders.pop(folder, None)

    def next_notes(self, deleting: Sequence[str], kept: Sequence[str]) -> list[tuple[bool, str]]:
        """Return the notes to go on with now: whether its files are kept, and its name."""
        notes = [*((False, name) for name in deleting), *((True, name) for name in kept)]
        if (last := self.stopped_at) is not None:
            notes.sort(key=lambda note: (note <= last, note))
        some = notes[:MOST_NOTES]
        self.stopped_at = some[-1] if len(some) < len(notes) else None
        return some

    def tell(self, error: HoldfastError) -> None:
        """Log why old steps are not removed, once for each cause."""
        # Not by the message, which names another file each time.
        cause = (type(error), error.hint, error.details.get("errno"), error.details.get("status"))
        if cause not in self._told:
            self._told.add(cause)
            log.warning(
                "Old steps of %s are not removed, and take up space: %s Each save tries again.%s",
                self._store.url,
                error.message,
                _NO_RIGHT if error.details.get("errno") in (errno.EACCES, errno.EPERM) else "",
            )
