"""Anything with the buffer protocol; typing has no name for it before Python 3.12."""

from typing import Any

Buffer = Any
