"""The origin of a slice, in its index: the key `slice` of `about`.

A slice is what `holdfast fetch` copies for some ranks: an index like a checkpoint's (`names.SLICE`) that
lists all names of the source, but only the chunks that were fetched. No torch, no NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from holdfast._core.base.values import shortened
from holdfast._core.ready import ready
from holdfast.errors import CorruptCheckpoint

ABOUT = "slice"
CHECKPOINT, PUBLISHED = "checkpoint", "published"
"""Kinds of sources: a Holdfast checkpoint, a folder of the Hugging Face hub."""


class SliceOrigin(msgspec.Struct, frozen=True):
    """The source of a slice, and the ranks that it was fetched for."""

    identity: str
    """Identity of the source's version. All slices of it have the same, so ranks on several hosts can load
    together."""
    kind: str
    source: str
    ranks: str
    """In the format of `layout.ranks.ranks_text`."""
    grid: str
    fetch: str
    """A digest of what was fetched, so that the same command resumes with the same files."""

    @property
    def fetched_for(self) -> str:
        """Ranks and grid, for messages."""
        return f"ranks {self.ranks} of {self.grid}"


def read_origin(about: Mapping[str, object], where: str) -> SliceOrigin:
    """Return the origin in an index's `about`; CorruptCheckpoint if there is none."""
    try:
        origin = msgspec.convert(about.get(ABOUT), ready(SliceOrigin))
    except msgspec.ValidationError as error:
        raise CorruptCheckpoint(
            f"{where} does not say what it was fetched from: {shortened(str(error))}."
        ) from None
    if origin.kind not in (CHECKPOINT, PUBLISHED):
        raise CorruptCheckpoint(
            f"{where} was fetched from {origin.kind[:40]!r}, which this Holdfast can't read."
        )
    return origin
