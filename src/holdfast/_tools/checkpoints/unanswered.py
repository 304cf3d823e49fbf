"""Errors of storage that tell nothing of what lies there. No torch, no NumPy."""

from __future__ import annotations

import errno

from holdfast._core.store.base import NotFound
from holdfast.errors import HoldfastError

_UNANSWERED = {
    errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT,
}  # fmt: skip
"""What says nothing of the bytes. EIO is not here: a disk says so of bytes that it has lost."""
_ABSENT = 404, 416
"""What an object store says of objects and of bytes that are not there."""


def is_unanswered(error: HoldfastError) -> bool:
    """Return whether storage gave this error in place of an answer, such as for a lack of rights: it is no
    damage, and whether there is some can't be told."""
    if isinstance(error, NotFound):
        return False
    of_objects = "status" in error.details and error.details["status"] not in _ABSENT
    return of_objects or error.details.get("errno") in _UNANSWERED
