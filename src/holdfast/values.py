"""Types that `typing` has no name for."""

from typing import Any

Buffer = Any
"""Anything with the buffer protocol, which has a name from Python 3.12 on."""
Json = Any
"""A JSON value. Code that reads one from a message checks it."""
Message = dict[str, Json]
"""A JSON object: what ranks send each other."""
