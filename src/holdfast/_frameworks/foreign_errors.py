"""Holdfast's errors as subclasses of a framework's errors, so that existing `except` clauses catch them.

For example `except CheckpointingException` around `dist_checkpointing.load` catches a `CorruptCheckpoint`,
which keeps its type and its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.errors import HoldfastError

_made: dict[tuple[type[HoldfastError], type[BaseException]], type[HoldfastError]] = {}


def kind_of_both(ours: type[HoldfastError], theirs: type[BaseException]) -> type[HoldfastError]:
    """Return a subclass of both, with the name of ours."""
    if issubclass(ours, theirs):
        return ours
    # One class for each pair, so that errors of one kind have the same type everywhere in the process.
    if (ours, theirs) in _made:
        return _made[ours, theirs]
    # torch's property `failures` returns `_failures`.
    more = {"plain": ours, "__module__": ours.__module__, "__doc__": ours.__doc__, "_failures": {}}
    _made[ours, theirs] = made = type(ours.__name__, (ours, theirs), more)
    return made


@contextmanager
def raising(find: Callable[[], type[BaseException]]) -> Iterator[None]:
    """Turn Holdfast's errors that leave this block into subclasses of the class that `find` returns."""
    try:
        yield
    except HoldfastError as error:
        # In place, because futures and other frames hold this object, with its traceback and its cause.
        error.__class__ = kind_of_both(type(error), find())
        raise


def of_torch() -> type[BaseException]:
    """Return the error that torch DCP raises."""
    # Imported only for an error, so that a call that succeeds does not pay for it.
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException
