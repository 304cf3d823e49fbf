"""The mark that distinguishes the `.metadata` of a Holdfast checkpoint, written for tools that look for one,
from that of a torch DCP checkpoint.

No torch, no NumPy.
"""

from __future__ import annotations

MARKER = "THIS_IS_A_HOLDFAST_CHECKPOINT__LOAD_IT_WITH_holdfast.dcp.load"
"""The file that such a `.metadata` refers to (`holdfast.integrations.dcp_metadata` writes it); no such file
exists."""
MARKER_HEAD = 4096
"""The file name lies in this many first bytes of a `.metadata`."""


def is_marker(head: bytes) -> bool:
    """Return whether a `.metadata` belongs to a Holdfast checkpoint. head: its first MARKER_HEAD bytes or
    more."""
    return MARKER.encode() in head[:MARKER_HEAD]
