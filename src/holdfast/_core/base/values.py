"""Shared type aliases, and formatting of values in messages."""

import re
import time
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.errors import BadInput

Buffer = Any
"""An object with the buffer protocol (`collections.abc.Buffer` since Python 3.12)."""
Json = Any
"""A JSON value. Code that reads one from a message checks it."""
Message = dict[str, Json]
"""A JSON object, as ranks send to each other."""
NO_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The exceptions of msgspec for bytes that are not JSON of the requested type."""
ReportProgress = Callable[[int, int], None]
"""A progress callback: called with the bytes done and the total bytes."""


_NUMBER = re.compile("([0-9]{1,18})")


def natural(name: str) -> list[str | int]:
    """Return a key that sorts names as people do: layer 10 after layer 9."""
    parts: list[str | int] = list(_NUMBER.split(name))
    parts[1::2] = map(int, parts[1::2])
    return parts


def shortened(text: str, most: int = 200) -> str:
    """Cut a text after a word, and say so by an ellipsis."""
    if len(text) <= most:
        return text
    return (text[:most].rpartition(" ")[0] or text[:most]) + " …"


def given(value: object) -> str:
    """Return an argument of the wrong type as text, on one line: it may be the whole state of a model."""
    return shortened(" ".join(repr(value).split()))


def amount(number: int, what: str) -> str:
    """Return a number of things as text: `1 tensor`, `2 tensors`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def told(error: BaseException) -> str:
    """Return the type and the text of an error of other code, as the end of a sentence with its full stop."""
    text = ": ".join(filter(None, (type(error).__name__, str(error).strip())))
    return text if text.endswith((".", "!", "?")) else f"{text}."


def check_switches(**switches: object) -> None:
    """Raise BadInput for arguments that are neither True nor False: any text counts as true in Python."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise BadInput(f"{name} must be True or False, not {given(value)}.")


def printable(value: object) -> str:
    """Return a value as text, with control characters escaped."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def time_text(seconds: float | None) -> str:
    """Format a time, in seconds since 1970, as `2026-11-24 03:49:12 +0100`; None as an empty text."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))


def age_text(seconds: float | None, now: float) -> str:
    """Format how long ago a time was, as `3 min`; None as an empty text."""
    if seconds is None:
        return ""
    passed = max(now - seconds, 0.0)  # the clock of another host may be ahead
    for unit, length, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 72)):
        if passed < most * length:
            return f"{passed / length:.0f} {unit}"
    return f"{passed / 86400:,.0f} days"


def size_text(nbytes: float) -> str:
    """Format bytes as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"
