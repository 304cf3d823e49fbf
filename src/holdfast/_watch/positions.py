"""Classifies stacks: a thread waits in an operation of a group, opens a group, is at its exit, or elsewhere.

A stack on the CPU shows where kernels are launched, not where the GPU is.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

from holdfast._watch.evidence import OPERATION, Evidence, Frame, GroupOperation, Rank, Stack, is_of_a_library
from holdfast._watch.names import OF_SOME

_TORCH = re.compile(r"torch/(?:distributed|cuda|_tensor|csrc|_C)|^lib(?:cuda|cudart|nccl|torch)")
_BLOCKED = re.compile(
    r"^(?:synchronize|item|tolist|cpu|wait|barrier|monitored_barrier|_store_based_barrier|\w*_object(?:_list)?|"
    r"(?:cu|cuda)\w*Synchronize)$"
)
_COLLECTIVE = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|broadcast|all_to_all|barrier|scatter|gather|^reduce$|^send|^recv|"
    r"^batch_isend_irecv$|_sync_decision_cross_ranks"
)
_OPENING = re.compile(
    r"^(?:init_process_group|new_group|_new_process_group_helper|_store_based_barrier|split_group)$"
)
_EXITS = re.compile(
    r"^(?:_run_exitfuncs atexit|"
    r"(?:_shutdown \S*threading|_exit_function \S*multiprocessing/util|_python_exit \S*concurrent/\S*)\.py)$"
)
_PYTHON = re.compile(
    r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)|^<frozen |"
    # It has the newest parts of `typing`: torch marks functions such as `all_gather_into_tensor` by them.
    r"(?:^|/)typing_extensions\.py$|"
    # py-spy shortens file names of the standard library to those of the modules.
    r"^(?:threading|queue|socket|ssl|selectors|subprocess|asyncio/\w+|concurrent/futures/\w+|multiprocessing/\w+|"
    r"runpy|contextlib|functools|importlib/\w+|tempfile|shutil|fileinput|http/\w+|urllib/\w+|os|pathlib)\.py$"
)

_ROSTER = re.compile(r"/_?roster/")
"""The package that waits for the message store; `_roster` in answers of earlier versions."""


class Position(NamedTuple):
    """The stack of a thread, and its classification."""

    stack: Stack
    does: str
    """`waits`, `opens`, `differentiates`, `exits` or `is`."""

    @property
    def call(self) -> Frame:
        """The innermost call of the program's own code."""
        calls = self.stack.calls
        own = (call for call in calls if not is_of_a_library(call) and not _PYTHON.search(call.file))
        return next(own, calls[0])

    @property
    def is_blocked(self) -> bool:
        """May it be blocked in an operation of a group? Autograd issues collectives on threads unknown to
        Python, hence `differentiates`."""
        return self.does in ("waits", "opens", "differentiates")

    @property
    def is_at_its_gpu(self) -> bool:
        """Does it wait for a CUDA stream? The operation that blocks the stream is not known."""
        if waits_for_its_handle(self.stack):
            return False
        return self.does == "waits" and not any("distributed" in call.file for call in self.stack.calls[:3])

    @property
    def rests_in_python(self) -> bool:
        """Is its innermost call in the standard library or Ray, so that it does not wait for a GPU?"""
        file = self.stack.calls[0].file
        return _PYTHON.search(file) is not None or "ray/_private/" in file


def waits_for_its_handle(stack: Stack) -> bool:
    """Return whether a thread is known to be in `wait` of a handle of torch."""
    return stack.names.get("on") == "handle" and stack.names.get("calls") == "wait"


def may_wait_for_a_handle(stack: Stack) -> bool:
    """Return whether a thread may be in `wait` of a handle, as far as its call is known, or sleeps in a loop
    that ends with one."""
    if stack.names.get("polls") == "handle":
        # Over gloo, that of a message is completed by `wait` alone: such a loop does not end, whoever comes.
        return stack.names.get("handle") not in OF_SOME
    return stack.names.get("on", "handle") == "handle" and stack.names.get("calls", "wait") == "wait"


def position_of(stack: Stack) -> Position:
    """Classify a stack."""
    calls = stack.calls
    if waits_for_its_handle(stack):
        return Position(stack, "waits")
    if any(_OPENING.match(call.function) for call in calls[:6] if "distributed" in call.file):
        return Position(stack, "opens")
    inner = [call for call in calls[:8] if _TORCH.search(call.file)]
    # A torch function that calls back into Python, such as planning a save, is work rather than a wait.
    is_torchs = _TORCH.search(calls[0].file) is not None
    blocked = is_torchs and (_BLOCKED.match(calls[0].function) is not None or _is_collective(calls[0]))
    if blocked or (calls[0].function == "wrapper" and any(map(_is_collective, inner[:3]))):
        return Position(stack, "waits")
    if calls[0].function == "_engine_run_backward":
        return Position(stack, "differentiates")
    return Position(stack, "exits" if has_ended(stack) else "is")


def _is_collective(call: Frame) -> bool:
    return "distributed" in call.file and _COLLECTIVE.search(call.function) is not None


def has_ended(stack: Stack) -> bool:
    """Return whether the main thread has left the program and is in exit handlers."""
    return any(_EXITS.match(f"{call.function} {call.file}") for call in stack.calls)


def is_in_its_program(stack: Stack) -> bool:
    """Return whether the main thread is known not to be in exit handlers: a dump from outside the process
    does not show that it runs `atexit` handlers."""
    begins = bool(stack.ident) or stack.calls[-1].function in ("<module>", "_run_module_as_main")
    return begins and not has_ended(stack)


def joined(stacks: tuple[Stack, ...], stack: Stack) -> Stack:
    """Return the thread for which a thread waits by `join` or `result`, perhaps through others; itself, if
    none is known."""
    by_ident = {one.ident: one for one in stacks if one.ident}
    for _ in stacks:
        after = by_ident.get(stack.names.get("joins", ""))
        if after is None or has_ended(stack):
            break
        stack = after
    return stack


def position_among(stacks: tuple[Stack, ...]) -> Position:
    """Return the position of the main thread or, if that waits for another thread, of that one, or else of
    one that is blocked."""
    positions = [position_of(stack) for stack in stacks]
    ours = [stack for stack in stacks if stack.thread == OPERATION]
    if ours and any(call.file.endswith("protocol/runner.py") for call in stacks[0].calls[:6]):
        # In a call of Holdfast. On its thread, `_do` calls both the work of this rank and waits for others.
        calls = ours[0].calls
        done = [inner for inner, outer in pairwise(calls) if outer.function == "_do"]
        works = any(_ROSTER.search(call.file) is None for call in done)
        return Position(ours[0], "is") if works else Position(stacks[0], "waits")
    if (end := joined(stacks, stacks[0])) is not stacks[0]:
        return position_of(end)
    # Which thread it waits for is not known. A handle may be one for which nobody waits.
    blocked = [
        one for one in positions[1:] if one.does in ("waits", "opens") and not waits_for_its_handle(one.stack)
    ]
    return blocked[0] if blocked and positions[0].rests_in_python else positions[0]


def positions_of(evidence: Evidence) -> dict[int, Position]:
    """Return the position of each rank whose stacks are known."""
    return {rank: position_among(evidence.ranks[rank].stacks) for rank in evidence.shown()}


def later_of(rank: Rank, stack: Stack) -> Stack | None:
    """Return the second sample of a thread; None if there was none, or the thread has ended."""
    same = [one for one in rank.later if (one.ident, one.thread) == (stack.ident, stack.thread)]
    return next(iter(same or (rank.later if stack is rank.stacks[0] else ())), None)


def is_another_call(stack: Stack, later: Stack) -> bool:
    """Return whether a thread sends or receives another message, or opens another group, at the second look:
    a loop is at one line in all of them."""
    return any(stack.names.get(what) != later.names.get(what) for what in ("message", "group_name"))


BUSY = 0.2
"""CPU use above which a thread counts as busy."""


def may_be_at_its_gpu(rank: Rank, one: Position) -> bool:
    """Return whether a rank may wait for its GPU in a call such as `.item()`: that is in C, so the stack ends
    at a line of the program. Such a wait uses the CPU, if its use is known."""
    return _stands(rank, one) and not _rests(rank)


def rests_in_c(rank: Rank, one: Position) -> bool:
    """Return whether a thread stayed idle at one line of the program: in a C call, such as `work.wait()` or
    `time.sleep()`."""
    return _stands(rank, one) and _rests(rank)


def _stands(rank: Rank, one: Position) -> bool:
    later = later_of(rank, one.stack)
    still = later is None or later.calls == one.stack.calls
    return one.does == "is" and not one.rests_in_python and still


def _rests(rank: Rank) -> bool:
    return rank.busy is not None and rank.busy <= BUSY


def is_held(rank: Rank, one: Position) -> bool:
    """Return whether a thread was blocked in the same place in both samples, or in the only one."""
    if not one.is_blocked or not rank.later:
        return one.is_blocked
    later = later_of(rank, one.stack)
    if later is None or is_another_call(one.stack, later):
        return False
    again = position_of(later)
    again = again if again.is_blocked else position_among(rank.later)
    return again.is_blocked and again.call == one.call


_UNRECORDED = {"send", "recv", "monitored_barrier"}
"""Functions that wait in no operation of a flight record over gloo."""


def may_wait_in(rank: Rank, one: Position, operation: GroupOperation) -> bool:
    """Return whether a blocked thread may wait in this operation. Others are pending as well, such as with
    `async_op=True`: it waits in the newest of the group of its function, if its own process has told that."""
    if waits_for_its_handle(one.stack):
        return one.stack.names.get("handle", operation.kind) == operation.kind
    if one.stack.ident and (one.does == "opens" or one.stack.calls[0].function in _UNRECORDED):
        return False
    group = one.stack.names.get("in")
    same = (other for other in rank.operations if other.is_pending and other.thread == operation.thread)
    newest = max((other.number for other in same if other.group == group), default=None)
    return group is None or (operation.group, operation.number) == (group, newest)
