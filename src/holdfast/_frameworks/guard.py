"""Replace the barriers inside a framework's save function by waits with a deadline.

Frameworks call barriers and object collectives around `dist_checkpointing.save`. If one rank never comes, the
others wait in them until a watchdog ends the job. While a guarded function runs, the ranks of such a call of
`torch.distributed` meet on the roster (`roster_collectives`), and an error names the missing rank when the
deadline has passed.

After a checkpoint was committed inside, a barrier that fails does not stop the function: the framework still
writes its own tracker file, and the error is raised at the end of the function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps

import torch
import torch.distributed as dist

from holdfast._core.protocol.job import Job, job_of
from holdfast._frameworks.roster_collectives import MEET_FIRST, RosterCollectives
from holdfast.errors import HoldfastError

_lock = threading.Lock()
_users = 0
"""Guarded functions that run now, on all threads."""
_originals: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {}
"""By name: torch's collective and its replacement."""


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
        """Execute the guarded function's call of `torch.distributed.<name>`."""
        try:
            # Of an asynchronous barrier the framework wants the work object.
            if name != "barrier" or named.get("async_op"):
                return self.collectives.meet_first(name, original, args, named)
            # After a failed barrier the ranks do not meet any more.
            if self.postponed is None:
                self.collectives.barrier(*args, **named)  # type: ignore[arg-type]
            return None
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


class _Thread(threading.local):
    guard: Guard | None = None


_here = _Thread()


@contextmanager
def guarded(
    title: str, *, call: str = "", like_stock: bool = False, job: Job | None = None
) -> Iterator[None]:
    """Let barriers of `torch.distributed` wait over the roster, with a deadline.

    The ranks of any other collective meet there before it is issued. Other threads are not affected.

    title: names this place in errors; the same on all ranks. Every rank must make the same calls in the
        same order, as with the collectives themselves; errors name a rank that does not.
    job: its participants stand for "all ranks" inside the function; its `timeout` bounds each wait. Default:
        the timeout of the group of the collective, at least 1800 s.
    like_stock: never use a timeout shorter than the group's own, even if the job has one.
    call: a text that differs between calls with the same title, such as a step or a folder; the same on all
        ranks. A rank that missed one call, or left it by an error of its own, still meets the others in the
        next one. Without it, that rank first gets the error of the call that it missed.

    Raises `HoldfastError`s that name the missing rank.
    """
    job = job_of(job)
    outer = _here.guard
    _enter()
    guard = _here.guard = Guard(RosterCollectives(title, job, job.ranks(), call, like_stock))
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
    """Set `call` of this thread's guard, if there is one, for a part of a guarded function, such as the
    finalization of one request."""
    if _here.guard is None:
        yield
        return
    collectives = _here.guard.collectives
    outer, collectives.call = collectives.call, call
    try:
        yield
    finally:
        collectives.call = outer


def is_guarded() -> bool:
    return _here.guard is not None


def note_committed(place: str) -> None:
    """Tell this thread's guard, if there is one, that a checkpoint was committed."""
    if _here.guard is not None:
        _here.guard.committed.append(place)


def note_absent(ranks: Collection[int]) -> None:
    """Tell this thread's guard, if there is one, that these ranks have not come to the guarded function."""
    if _here.guard is not None:
        _here.guard.collectives.absent |= frozenset(ranks)


def _enter() -> None:
    global _users
    with _lock:
        if not _users:
            # Set in the module, where frameworks look them up at each call. A name that was bound by
            # `from torch.distributed import barrier` stays the collective itself.
            for name in ("barrier", *MEET_FIRST):
                original = getattr(dist, name)
                _originals[name] = original, _dispatch(name, original)
                setattr(dist, name, _originals[name][1])
        _users += 1


def _leave() -> None:
    global _users
    with _lock:
        # The last one puts the originals back: outside of guarded functions torch is unchanged.
        _users -= 1
        if not _users:
            for name, (original, ours) in _originals.items():
                # The program may have put something else there meanwhile, which calls ours.
                if getattr(dist, name) is ours:
                    setattr(dist, name, original)


def _dispatch(name: str, original: Callable[..., object]) -> Callable[..., object]:
    """Make a function that calls the guard on a guarded thread, and the collective itself elsewhere."""

    @wraps(original)
    def call(*args: object, **named: object) -> object:
        # The compiler puts its own function in the place of a collective, which it knows by its identity.
        if torch.compiler.is_compiling():
            return original(*args, **named)
        guard = _here.guard
        # Other threads train or write in the background: the guard must not touch their collectives. The
        # other ranks of a "fake" world are not there, and its store takes no message.
        if guard is None or not dist.is_initialized() or dist.get_backend() == "fake":
            return original(*args, **named)
        # Collectives that the guard issues, or torch inside one, must not come back here.
        _here.guard = None
        try:
            return guard.call(name, original, args, named)
        finally:
            _here.guard = guard

    return call
