"""Waits with a deadline in place of the barriers inside a framework's save function.

Frameworks put barriers and object collectives of their own around `dist_checkpointing.save`; a rank that
never comes leaves the others in them until a watchdog ends the job. While a guarded function runs, these
calls of `torch.distributed` go over the roster instead, and a missing rank is named by its deadline. What
they carry is encoded as a checkpoint's objects are, so receiving executes nothing. Collectives of tensors
stay as they are.
"""

from __future__ import annotations

import base64
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

import torch.distributed as dist

from holdfast.errors import BadInput, HoldfastError, from_message
from holdfast.format import objects
from holdfast.protocol.call import begin_call
from holdfast.protocol.operation import agree


class _Guard:
    """Stand-ins for collectives, under one title."""

    def __init__(self, title: str, timeout: float, stall_timeout: float) -> None:
        self.title, self.timeout, self.stall_timeout = title, timeout, stall_timeout

    def exchange(
        self, kind: str, group: Any, values: list[Any] | None, choose: Callable[[dict[int, Any]], Any]
    ) -> tuple[Any, list[int]] | None:
        """(the lowest rank's choice from what all said, the group's ranks); None outside of the group."""
        mine: dict[str, Any] = {}
        try:
            mine["values"] = None if values is None else [_encode(value) for value in values]
        except HoldfastError as error:  # the others must hear of it, too
            mine["error"] = error.to_message()

        def choose_unless(said: dict[int, Any]) -> Any:
            for message in said.values():
                if "error" in message:
                    raise from_message(message["error"])
            return choose({rank: message["values"] for rank, message in said.items()})

        ranks = sorted(dist.get_process_group_ranks(group or dist.group.WORLD))
        if dist.get_rank() not in ranks:
            return None
        call = begin_call(participants=ranks, timeout=self.timeout, stall_timeout=self.stall_timeout)
        value = agree(f"{kind} in {self.title}", f"guard://{self.title}|{kind}", choose_unless, call, mine)
        return value, dist.get_process_group_ranks(group or dist.group.WORLD)

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        self.exchange("barrier", group, None, lambda said: None)
        return _Finished() if async_op else None

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        found = self.exchange("all_gather_object", group, [obj], _by_rank)
        if found is not None:
            object_list[:] = [_decode(found[0][str(rank)]) for rank in found[1]]

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
    ) -> None:
        found = self.exchange("gather_object", group, [obj], _by_rank)
        if found is not None and object_gather_list is not None:
            object_gather_list[:] = [_decode(found[0][str(rank)]) for rank in found[1]]

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
    ) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        source = ranks[group_src] if group_src is not None else (0 if src is None else src)
        mine = list(object_list) if dist.get_rank() == source else None
        found = self.exchange("broadcast_object_list", group, mine, lambda said: said[source])
        if found is not None:
            object_list[:] = [_decode(value) for value in found[0]]

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
    ) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        source = ranks[group_src] if group_src is not None else (0 if src is None else src)
        mine = list(scatter_object_input_list or []) if dist.get_rank() == source else None
        found = self.exchange("scatter_object_list", group, mine, lambda said: said[source])
        if found is not None:
            scatter_object_output_list[0] = _decode(found[0][found[1].index(dist.get_rank())])


class _Finished:
    """What an asynchronous barrier returns; it has been waited for."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _by_rank(said: dict[int, Any]) -> dict[str, Any]:
    return {str(rank): values[0] for rank, values in said.items()}


def _encode(value: Any) -> str:
    return base64.b64encode(objects.encode(value, "what a collective carries")).decode()


def _decode(text: str) -> Any:
    return objects.decode(base64.b64decode(text), "what a collective carried")


_NAMES = ("barrier", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
_lock = threading.Lock()
_users = 0
"""Threads that are in a guarded function now."""
_originals: dict[str, Any] = {}
_here = threading.local()


@contextmanager
def guarded(title: str, *, timeout: float = 1800.0, stall_timeout: float = 120.0) -> Iterator[None]:
    """Inside, barriers and object collectives of `torch.distributed` wait over the roster, with a deadline.

    title: how errors call this place; the same on all ranks. Every rank must make the same calls in the same
        order,
    as with the collectives themselves; one that does not is named. Other threads are not affected.
    """
    _enter()
    outer = getattr(_here, "guard", None)
    _here.guard = _Guard(title, timeout, stall_timeout)
    try:
        yield
    finally:
        _here.guard = outer
        _leave()


def _enter() -> None:
    global _users
    with _lock:
        if not _users:
            for name in _NAMES:
                _originals[name] = getattr(dist, name)
                setattr(dist, name, _dispatch(name, _originals[name]))
        _users += 1


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users:
            for name, original in _originals.items():
                setattr(dist, name, original)


def _dispatch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The guard's stand-in in a thread that is guarded, the collective itself elsewhere."""

    @wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        guard = getattr(_here, "guard", None)
        return getattr(guard, name)(*args, **named) if guard is not None else original(*args, **named)

    return call


def find(place: str) -> tuple[Any, str]:
    """(owner, attribute) for the dotted name of a function, `package.module.Class.method`."""
    parts = place.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = import_module(".".join(parts[:cut]))
            break
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise
    else:
        raise BadInput(f"guard={place!r} names no function of a module that can be imported.")
    for part in parts[cut:-1]:
        owner = getattr(owner, part, None)
    if not callable(getattr(owner, parts[-1], None)):
        raise BadInput(f"guard={place!r} names no function.")
    return owner, parts[-1]


def guard(place: str, owner: Any, name: str, *, timeout: float, stall_timeout: float) -> Any:
    """What stands there, guarded; a static or class method stays one."""

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            with guarded(place, timeout=timeout, stall_timeout=stall_timeout):
                return function(*args, **named)

        return call

    raw = inspect.getattr_static(owner, name)
    if isinstance(raw, staticmethod | classmethod):
        return type(raw)(wrapped(raw.__func__))
    return wrapped(raw)
