"""How the `.metadata` beside a Holdfast checkpoint, made for tools that look for one, is told from that of a
torch DCP checkpoint.

No torch, no NumPy.
"""

from __future__ import annotations

MARKER = "THIS_IS_A_HOLDFAST_CHECKPOINT__LOAD_IT_WITH_holdfast.dcp.load"
"""The file that such a `.metadata` points at (`holdfast.integrations.dcp_metadata` writes it); there is none
of that name."""
MARKER_HEAD = 4096
"""Bytes at its begin in which that name stands."""


def is_marker(head: bytes) -> bool:
    """Does a `.metadata` begin as the marker beside a Holdfast checkpoint? `head`: its first MARKER_HEAD
    bytes or more."""
    return MARKER.encode() in head[:MARKER_HEAD]
