"""Types that `typing` has no name for, and texts of others in a message of ours."""

from collections.abc import Callable
from typing import Any

Buffer = Any
"""Anything with the buffer protocol, which has a name from Python 3.12 on."""
Json = Any
"""A JSON value. Code that reads one from a message checks it."""
Message = dict[str, Json]
"""A JSON object: what ranks send each other."""
ReportProgress = Callable[[int, int], None]
"""Called with the bytes done so far, and the bytes in all."""


def shortened(text: str, most: int = 200) -> str:
    """Cut a text after a word, and say so by an ellipsis."""
    if len(text) <= most:
        return text
    return (text[:most].rpartition(" ")[0] or text[:most]) + " …"


def size_text(nbytes: float) -> str:
    """Format bytes as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"
