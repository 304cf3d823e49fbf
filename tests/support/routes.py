"""Which functions of Holdfast a call enters, in order: what docs/architecture.md lists and a test
compares."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import holdfast

ROOT = str(Path(holdfast.__file__).parent) + "/"
_NO_FUNCTIONS = ("<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


class Route(NamedTuple):
    """The functions that a call entered, each once, in the order of their first entry; and how often the file
    changed."""

    functions: list[str]
    files: set[str]
    changes: int


def trace(call: Callable[[], Any]) -> Route:
    """Run `call` and follow it on every thread that it starts."""
    seen: dict[CodeType, str] = {}
    files: set[str] = set()
    changes, last = 0, ""

    def look(frame: FrameType) -> None:
        nonlocal changes, last
        code = frame.f_code
        file = code.co_filename[len(ROOT) :]
        changes += file != last and code not in seen
        last = file
        files.add(file)
        seen.setdefault(code, _name(code))

    _follow(call, look)
    return Route(list(seen.values()), files, changes)


def handed(call: Callable[[], Any], kind: type) -> set[str]:
    """Run `call` and return the functions that it hands an instance of `kind`, but for those of `kind`."""
    found: set[str] = set()

    def look(frame: FrameType) -> None:
        code = frame.f_code
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(isinstance(frame.f_locals.get(name), kind) for name in arguments):
            found.add(_name(code))

    _follow(call, look)
    own = f"{kind.__module__.removeprefix('holdfast.')}.{kind.__name__}."
    return {name for name in found if not name.startswith(own)}


def _name(code: CodeType) -> str:
    return f"{code.co_filename[len(ROOT) : -3].replace('/', '.')}.{code.co_qualname}"


def _follow(call: Callable[[], Any], look: Callable[[FrameType], None]) -> None:
    """Run `call`, and look at the frame of each call of a function of Holdfast."""
    lock = threading.Lock()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT) or code.co_name in _NO_FUNCTIONS:
            return
        with lock:
            look(frame)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
