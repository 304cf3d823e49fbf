"""Values of standard-library classes that a state may contain, as arguments of their constructors."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import io
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

Parts = tuple[object, ...]


def _buffer(content: bytes, position: int) -> io.BytesIO:
    made = io.BytesIO(content)
    made.seek(position)
    return made


def _fraction(numerator: int, denominator: int) -> fractions.Fraction:
    # Text is refused: with a large exponent it would create a huge number.
    if type(numerator) is not int or type(denominator) is not int:
        raise TypeError("a part of a fraction is no whole number")
    return fractions.Fraction(numerator, denominator)


def _with_fold(kind: Callable[..., object], *parts: object) -> object:
    return kind(*parts[:-1], fold=parts[-1])


PARTS: dict[type, Callable[[Any], Parts]] = {
    io.BytesIO: lambda v: (v.getvalue(), v.tell()),
    collections.deque: lambda v: ([*v], v.maxlen),
    datetime.date: lambda v: (v.year, v.month, v.day),
    datetime.time: lambda v: (v.hour, v.minute, v.second, v.microsecond, v.tzinfo, v.fold),
    datetime.datetime: lambda v: (
        *(v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond),
        *(v.tzinfo, v.fold),
    ),
    datetime.timedelta: lambda v: (v.days, v.seconds, v.microseconds),
    datetime.timezone: lambda v: v.__getinitargs__(),
    fractions.Fraction: lambda v: (v.numerator, v.denominator),
    decimal.Decimal: lambda v: (str(v),),
    **dict.fromkeys((pathlib.PosixPath, pathlib.WindowsPath), lambda v: (str(v),)),
    **dict.fromkeys((pathlib.PurePosixPath, pathlib.PureWindowsPath), lambda v: (str(v),)),
}
"""Map of classes to functions that return the parts of a value."""
MAKE: dict[str, Callable[..., object]] = {
    **{kind.__name__: kind for kind in PARTS},
    "BytesIO": _buffer,
    "Fraction": _fraction,
    "datetime": partial(_with_fold, datetime.datetime),
    "time": partial(_with_fold, datetime.time),
    # A path of another operating system becomes a path of this one.
    "PosixPath": pathlib.Path,
    "WindowsPath": pathlib.Path,
}
"""Map of class names to functions that create a value from its parts."""
