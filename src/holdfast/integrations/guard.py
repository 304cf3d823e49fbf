"""Waits with a deadline in place of the barriers inside a framework's save function.

Frameworks put barriers and object collectives of their own around `dist_checkpointing.save`; a rank that
never comes leaves the others in them until a watchdog ends the job. While a guarded function runs, these
calls of `torch.distributed` go over the roster instead (`roster_collectives`), and a missing rank is named by
its deadline.

Once a checkpoint is committed inside, a barrier that fails does not stop the function: it goes on, so that
the framework writes its own tracker file, and the error is raised at its end.
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
"""Threads that are in a guarded function now."""
_originals: dict[str, Callable[..., object]] = {}
_here = threading.local()


class Guard:
    """One call of a guarded function on one thread."""

    def __init__(self, collectives: RosterCollectives) -> None:
        self.collectives = collectives
        self.committed: list[str] = []
        """Checkpoints that were committed inside, as errors name them."""
        self.postponed: HoldfastError | None = None
        """What a barrier after a commit met; raised at the end of the function."""

    def call(
        self, name: str, original: Callable[..., object], args: tuple[object, ...], named: dict[str, object]
    ) -> object:
        """What the guarded function gets for a call of `torch.distributed.<name>`."""
        try:
            # Tensor collectives are not stood in for: their ranks meet first, and then issue the original.
            if name in TENSORS:
                return self.collectives.tensors(name, original, args, named)
            if name == "barrier" and self.postponed is not None:
                return None  # the ranks do not meet any more
            return getattr(self.collectives, name)(*args, **named)
        except NotCarried as error:
            if not error.by_collective:
                raise
            return original(*args, **named)
        except HoldfastError as error:
            # Nothing is on disk yet that the error could make look lost.
            if not self.committed:
                raise
            error.hint = (
                f"{error.hint} {', '.join(self.committed)}: committed and complete; this came after it."
            ).strip()
            # There is no value to go on with in place of a collective's.
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
    """Inside, barriers and object collectives of `torch.distributed` wait over the roster, with a deadline.

    Ranks of a tensor collective meet there before it is issued.

    title: how errors call this place; the same on all ranks. Every rank must make the same calls in the same
        order, as with the collectives themselves; one that does not is named. Other threads are not affected.
    timeout: seconds until a wait fails. stall_timeout: seconds that a rank may not show itself.
    participants: ranks that "all ranks" means inside; default all.
    call: what tells this call from others under the title, such as a step or a folder; the same on all ranks.
        A rank that missed one call, or left it by an error of its own, then still meets the others in the
        next. Without it, that rank finds the error of what it missed first.

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
            # A framework's save calls another one's: a commit inside is one for the outer function as well.
            outer.committed += guard.committed
        _leave()
    # Not in `finally`: what the function itself raises goes before what was put off.
    if guard.postponed is not None:
        raise guard.postponed


@contextmanager
def telling_apart(call: str) -> Iterator[None]:
    """`call` of the guard of this thread, if there is one, for a part of a guarded function: one of several
    requests that it finalizes."""
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
    """Is this thread in a guarded function?"""
    return getattr(_here, "guard", None) is not None


def note_committed(place: str) -> None:
    """A checkpoint was committed on this thread: a guard knows from here on that nothing of it is lost."""
    guard: Guard | None = getattr(_here, "guard", None)
    if guard is not None:
        guard.committed.append(place)


def _enter() -> None:
    global _users
    with _lock:
        if not _users:
            # As attributes of the module, which frameworks look up at each call. A name that was bound by
            # `from torch.distributed import barrier` stays the collective itself.
            for name in (*OBJECTS, *TENSORS):
                original = getattr(dist, name)
                _originals[name] = original
                setattr(dist, name, _dispatch(name, original))
        _users += 1


def _leave() -> None:
    global _users
    with _lock:
        # The last one out puts them back: outside of guarded functions torch is untouched.
        _users -= 1
        if not _users:
            for name, original in _originals.items():
                setattr(dist, name, original)


def _dispatch(name: str, original: Callable[..., object]) -> Callable[..., object]:
    """The guard's stand-in in a thread that is guarded, the collective itself elsewhere."""

    @wraps(original)
    def call(*args: object, **named: object) -> object:
        guard: Guard | None = getattr(_here, "guard", None)
        # Other threads train meanwhile, or write in the background: theirs are none of the guard's business.
        if guard is None or not dist.is_initialized():
            return original(*args, **named)
        # Collectives that the stand-in issues, or torch within one, must not come back here.
        _here.guard = None
        try:
            return guard.call(name, original, args, named)
        finally:
            _here.guard = guard

    return call
