"""Waits with a deadline in place of the barriers inside a framework's save function.

Frameworks call barriers and object collectives around `dist_checkpointing.save`. If one rank never comes, the
others wait in them until a watchdog ends the job. While a guarded function runs, these calls of
`torch.distributed` go over the roster instead (`roster_collectives`), and an error names the missing rank
when the deadline has passed.

After a checkpoint was committed inside, a barrier that fails does not stop the function: the framework still
writes its own tracker file, and the error is raised at the end of the function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps

import torch.distributed as dist

from holdfast.errors import HoldfastError
from holdfast.integrations.roster_collectives import OBJECTS, TENSORS, NotCarried, RosterCollectives

_lock = threading.Lock()
_users = 0
"""Guarded functions that run now, on all threads."""
_originals: dict[str, Callable[..., object]] = {}
_here = threading.local()


class Guard:
    """One call of a guarded function on one thread."""

    def __init__(self, collectives: RosterCollectives) -> None:
        self.collectives = collectives
        self.committed: list[str] = []
        """Paths of the checkpoints that were committed inside, for error messages."""
        self.postponed: HoldfastError | None = None
        """The error of a barrier after a commit; raised at the end of the function."""

    def call(
        self, name: str, original: Callable[..., object], args: tuple[object, ...], named: dict[str, object]
    ) -> object:
        """Do what the guarded function asks of `torch.distributed.<name>`."""
        try:
            # Tensor collectives are not replaced: their ranks meet first, and then issue the original.
            if name in TENSORS:
                return self.collectives.tensors(name, original, args, named)
            if name == "barrier" and self.postponed is not None:
                return None  # after a failed barrier the ranks do not meet any more
            return getattr(self.collectives, name)(*args, **named)
        except NotCarried as error:
            if not error.by_collective:
                raise
            return original(*args, **named)
        except HoldfastError as error:
            # Before a commit there is no checkpoint that this error could make look lost.
            if not self.committed:
                raise
            error.hint = (
                f"{error.hint} {', '.join(self.committed)}: committed and complete; this came after it."
            ).strip()
            # Any other collective has a result, and without it the function can't go on.
            if name != "barrier":
                raise
            self.postponed = error
            return None


@contextmanager
def guarded(
    title: str,
    *,
    timeout: float = 1800.0,
    stall_timeout: float = 120.0,
    participants: Iterable[int] | None = None,
    call: str = "",
) -> Iterator[None]:
    """Let barriers and object collectives of `torch.distributed` wait over the roster, with a deadline.

    The ranks of a tensor collective meet there before it is issued. Other threads are not affected.

    title: the name of this place in errors; the same on all ranks. Every rank must make the same calls in the
        same order, as with the collectives themselves; errors name a rank that does not.
    timeout: seconds until a wait fails. stall_timeout: seconds that a rank may be silent.
    participants: the ranks that "all ranks" means inside; default all.
    call: a text that differs between calls with the same title, such as a step or a folder; the same on all
        ranks. A rank that missed one call, or left it by an error of its own, still meets the others in the
        next one. Without it, that rank first gets the error of the call that it missed.

    Raises `HoldfastError`s that name the missing rank.
    """
    _enter()
    outer: Guard | None = getattr(_here, "guard", None)
    ranks = None if participants is None else tuple(sorted(participants))
    guard = _here.guard = Guard(RosterCollectives(title, timeout, stall_timeout, ranks, call))
    try:
        yield
    finally:
        _here.guard = outer
        if outer is not None:
            # The save of one framework may call another's: a commit inside counts for the outer one, too.
            outer.committed += guard.committed
        _leave()
    # Not in `finally`: an error of the function itself takes precedence over a postponed one.
    if guard.postponed is not None:
        raise guard.postponed


@contextmanager
def telling_apart(call: str) -> Iterator[None]:
    """Set `call` of this thread's guard, if there is one, for a part of a guarded function, such as one of
    the requests that it finalizes."""
    guard: Guard | None = getattr(_here, "guard", None)
    if guard is None:
        yield
        return
    collectives = guard.collectives
    outer, collectives.call = collectives.call, call
    try:
        yield
    finally:
        collectives.call = outer


def is_guarded() -> bool:
    """Return whether this thread is in a guarded function."""
    return getattr(_here, "guard", None) is not None


def note_committed(place: str) -> None:
    """Tell this thread's guard, if there is one, that a checkpoint was committed."""
    guard: Guard | None = getattr(_here, "guard", None)
    if guard is not None:
        guard.committed.append(place)


def _enter() -> None:
    global _users
    with _lock:
        if not _users:
            # Set in the module, where frameworks look them up at each call. A name that was bound by
            # `from torch.distributed import barrier` stays the collective itself.
            for name in (*OBJECTS, *TENSORS):
                original = getattr(dist, name)
                _originals[name] = original
                setattr(dist, name, _dispatch(name, original))
        _users += 1


def _leave() -> None:
    global _users
    with _lock:
        # The last one puts the originals back: outside of guarded functions torch is unchanged.
        _users -= 1
        if not _users:
            for name, original in _originals.items():
                setattr(dist, name, original)


def _dispatch(name: str, original: Callable[..., object]) -> Callable[..., object]:
    """Make a function that calls the guard on a guarded thread, and the collective itself elsewhere."""

    @wraps(original)
    def call(*args: object, **named: object) -> object:
        guard: Guard | None = getattr(_here, "guard", None)
        # Other threads train or write in the background: the guard must not touch their collectives.
        if guard is None or not dist.is_initialized():
            return original(*args, **named)
        # Collectives that the guard issues, or torch inside one, must not come back here.
        _here.guard = None
        try:
            return guard.call(name, original, args, named)
        finally:
            _here.guard = guard

    return call
