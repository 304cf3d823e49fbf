"""What a thread of this process calls. A call in C has no frame: the code and the variables of its caller
tell its name, and on what it is called."""

from __future__ import annotations

import dis
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from inspect import CO_OPTIMIZED
from itertools import count
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType

import torch.distributed as dist

from holdfast._core.torch_private import operation_of
from holdfast._watch.names import OF_SOME, family
from holdfast._watch.own_loops import Code, is_call, methods

_messages: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
"""Numbers of the messages that were seen: torch has none, and a loop is at one line in each of them."""
_numbers = count(1)
_OF_A_WAIT = {"wait", "get", "multi_get", "check", "is_completed"}
"""Methods of handles and stores. Of others, the object is not looked up."""
_STORE: type = getattr(dist, "Store", type(None))
_READS_VARIABLES = {"locals", "vars", "dir", "eval", "exec"}
_LOOKED_AT = 4
"""How many frames from the innermost one are searched for a loop."""


def variables(frame: FrameType) -> Mapping[str, object]:
    """Return the local variables of a frame, without side effects.

    Before Python 3.13, reading `f_locals` leaves a dict of all values in the frame until it returns: tensors
    that it deletes would not be freed. A debugger writes variables back from the same dict, and a function
    that calls `locals()` may have kept it.
    """
    code = frame.f_code
    if sys.version_info >= (3, 13) or not code.co_flags & CO_OPTIMIZED:
        return frame.f_locals
    if frame.f_trace is not None or not _READS_VARIABLES.isdisjoint(_globals_of(code)):
        return {}
    kept = frame.f_locals
    found = dict(kept)
    kept.clear()
    return found


def _globals_of(code: CodeType) -> Iterator[str]:
    if _READS_VARIABLES.isdisjoint(code.co_names):  # also names of attributes, as in `model.eval()`
        return
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(step.argval)


def calls_of(frames: Sequence[FrameType]) -> dict[str, str]:
    """Return what the innermost frame, of the program, is calling in C: the method that it `calls`, what that
    is called `on`, and of which operation a `handle` is; and on what the loop depends in which it sleeps.

    frames: innermost first.
    """
    frame, code = frames[0], Code(frames[0].f_code)
    now = code.at(frame.f_lasti)
    if not is_call(code.steps[now]):
        return {"calls": "__enter__"} if code.steps[now].opname == "BEFORE_WITH" else {}
    at = code.method(now)
    if at is None:
        name = code.function(now)
        called = _variable(frame, name) if name else None
        # One of `builtins`, such as `all`, may take the next of a generator.
        is_known = isinstance(called, BuiltinFunctionType) and called.__module__ != "builtins"
        found = called_of(called) if is_known else {}
    else:
        found = {"calls": str(code.steps[at].argval)}
        if found["calls"] in _OF_A_WAIT:
            found |= _on(_value(frame, code, at)) or _made_by(frame, code, at)
    return found | _polled(frames) if found.get("calls") == "sleep" else found


def called_of(called: object) -> dict[str, str]:
    """Return the same of a function in C, such as `handle.wait`, that a thread of a pool calls."""
    is_method = isinstance(called, MethodType)
    if not isinstance(called.__func__ if is_method else called, BuiltinFunctionType):  # type: ignore[attr-defined]
        return {}
    return {"calls": called.__name__, **_on(called.__self__)}  # type: ignore[attr-defined]


def _on(value: object) -> dict[str, str]:
    kind = type(value)
    if value is None or kind is ModuleType:
        return {}
    if issubclass(kind, dist.Work):
        known = {"handle": family(operation_of(value)), "message": number_of(value)}
        return {"on": "handle", **{name: text for name, text in known.items() if text}}
    return {"on": "store" if issubclass(kind, _STORE) else "other"}


def _made_by(frame: FrameType, code: Code, at: int) -> dict[str, str]:
    """Return the same of a handle that torch has just returned, as in `dist.irecv(x, 0).wait()`."""
    before = code.steps[at - 1]
    if not is_call(before):
        return {}
    made, function = code.method(at - 1), None
    if made is None:
        function = _variable(frame, code.function(at - 1))
    elif isinstance(module := _value(frame, code, made), ModuleType):
        function = module.__dict__.get(str(code.steps[made].argval))
    if not isinstance(function, FunctionType) or function.__module__ != dist.irecv.__module__:
        return {}
    # Records may have another name of a collective.
    kind = family(function.__name__.removeprefix("i"))
    return {"on": "handle", **({"handle": kind} if kind in OF_SOME else {})}


def number_of(handle: object) -> str:
    """Return the number by which this process tells a handle from others; "" if it can't be kept."""
    try:
        return str(_messages.get(handle) or _messages.setdefault(handle, next(_numbers)))
    except TypeError:  # no weak reference to it
        return ""


def _polled(frames: Sequence[FrameType]) -> dict[str, str]:
    """Return what the innermost loop in which a thread sleeps `polls`, a `handle` or a `store`, and of which
    operation the handle is; empty if neither, or if it can end without a look at them."""
    for frame in frames[:_LOOKED_AT]:
        code = Code(frame.f_code)
        asked = code.asked(code.at(frame.f_lasti))
        if asked is None:
            continue  # it has been called in a loop, perhaps
        for method, at in methods(code, asked):
            found = _on(_value(frame, code, at)) if at is not None and method in _OF_A_WAIT else {}
            if found.pop("on", "") == "store":
                return {"polls": "store"}
            if method == "is_completed":  # perhaps of an object of the program with handles
                return {"polls": "handle", **found}
        break
    return {}


def _value(frame: FrameType, code: Code, method: int) -> object:
    """Return the object of a method; None if that takes more than to read a variable and attributes, as of
    `handles.pop().wait()`, or a property."""
    names = code.names_before(method)
    if not names:
        return None
    value = _variable(frame, names[0])
    for name in names[1:]:
        try:
            value = object.__getattribute__(value, "__dict__").get(name)
        except AttributeError:
            return None
    return value


def _variable(frame: FrameType, name: str) -> object:
    spaces = (variables(frame), frame.f_globals, frame.f_builtins)
    return next((space[name] for space in spaces if name in space), None)
