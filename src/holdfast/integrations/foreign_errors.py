"""Our errors as kinds of those that a framework raises, so that code which catches the framework's does so.

`except CheckpointingException` around `dist_checkpointing.load` catches a `CorruptCheckpoint` then, which
stays one, with all its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from holdfast.errors import HoldfastError

_made: dict[tuple[type[HoldfastError], type[BaseException]], type[HoldfastError]] = {}


def kind_of_both(ours: type[HoldfastError], theirs: type[BaseException]) -> type[HoldfastError]:
    """A class of the name of ours that is a kind of theirs, too."""
    if issubclass(ours, theirs):
        return ours
    # One class for each pair, so that errors of one kind have one type in all of the process.
    if (ours, theirs) in _made:
        return _made[ours, theirs]
    more = {"plain": ours, "__module__": ours.__module__, "__doc__": ours.__doc__, "_failures": {}}
    # `_failures` is what torch's `failures` shows.
    _made[ours, theirs] = made = type(ours.__name__, (ours, theirs), more)
    return made


def make_kind_of(error: HoldfastError, theirs: type[BaseException]) -> None:
    """Let an error be caught as one of theirs."""
    # In place: futures and other frames hold this very object, with its traceback and its cause.
    error.__class__ = kind_of_both(type(error), theirs)


@contextmanager
def raising(find: Callable[[], type[BaseException]]) -> Iterator[None]:
    """Whatever error of ours leaves this block is a kind of what `find` gives, too."""
    try:
        yield
    except HoldfastError as error:
        make_kind_of(error, find())
        raise


def of_torch() -> type[BaseException]:
    """What torch DCP raises."""
    # Imported when an error is on its way: a good call doesn't pay for it.
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException


@cache
def of_megatron() -> type[BaseException]:
    """What megatron-core raises: an exception of its own, or, where its `torch_dist` strategy finds the error
    (a key or a shape that the checkpoint has not), torch DCP's."""
    from holdfast.integrations.megatron import mcore

    return type("CheckpointingException", (mcore.CheckpointingException, of_torch()), {})
