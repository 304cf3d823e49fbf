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
    lock = threading.Lock()

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal changes, last
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT) or code.co_name in _NO_FUNCTIONS:
            return
        with lock:
            file = code.co_filename[len(ROOT) :]
            changes += file != last and code not in seen
            last = file
            files.add(file)
            seen.setdefault(code, f"{file[:-3].replace('/', '.')}.{code.co_qualname}")

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return Route(list(seen.values()), files, changes)
