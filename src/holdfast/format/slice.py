"""What the index of a slice says of where it was taken from: the key `slice` of its `about`.

A slice is what `holdfast fetch` copies for some ranks: an index like a checkpoint's (`names.SLICE`) that
lists all names of the source, with chunks of what was fetched only. No torch, no NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from holdfast.errors import CorruptCheckpoint

ABOUT = "slice"
CHECKPOINT, PUBLISHED = "checkpoint", "published"
"""Kinds of sources: a Holdfast checkpoint, a folder of the Hugging Face hub."""


class Origin(msgspec.Struct, frozen=True):
    """Where a slice comes from, and for whom it was fetched."""

    identity: str
    """Of the source's version. Slices of it on several hosts share it, so that their ranks load together."""
    kind: str
    source: str
    ranks: str
    """As `layout.ranks.ranks_text` writes them."""
    grid: str
    fetch: str
    """What was fetched, as a digest: the same command goes on with the same files."""

    @property
    def fetched_for(self) -> str:
        """For messages."""
        return f"ranks {self.ranks} of {self.grid}"


def read_origin(about: Mapping[str, object], where: str) -> Origin:
    """The origin in an index's `about`; CorruptCheckpoint if it says none."""
    try:
        origin = msgspec.convert(about.get(ABOUT), Origin)
    except msgspec.ValidationError as error:
        raise CorruptCheckpoint(
            f"{where} does not say what it was fetched from: {str(error)[:200]}."
        ) from None
    if origin.kind not in (CHECKPOINT, PUBLISHED):
        raise CorruptCheckpoint(
            f"{where} was fetched from {origin.kind[:40]!r}, which this Holdfast can't read."
        )
    return origin
