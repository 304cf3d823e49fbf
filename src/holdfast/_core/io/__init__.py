"""Transfer bytes between memory and data files: writing hashes and syncs them, reading verifies them.

No torch and no messages between ranks. `file_writer` writes one rank's files, `file_reader` executes a read
plan, `open_checkpoint` opens whatever can be loaded. Imported by `saving`, `loading`, `background` and
`maintenance`.

Formats that the core does not know are registered here, not in a module beside, because `import holdfast`
registers one and should import little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from holdfast._core.format.index import Index
    from holdfast._core.io.source import Source
    from holdfast._core.store.base import Store

    Opener: TypeAlias = Callable[[Store, Index | None], Source | None]
    """Opens the source that an index describes or, without an index, what is in a folder; None if there is
    none of its format."""

_importers: list[Callable[[], Opener]] = []


def register_format(import_opener: Callable[[], Opener]) -> None:
    """Register a format of sources. import_opener: called at each folder that may have the format."""
    _importers.append(import_opener)


def registered_openers() -> list[Opener]:
    """Return what opens the registered formats, imported."""
    return [import_opener() for import_opener in _importers]
