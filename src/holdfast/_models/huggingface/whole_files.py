"""A folder in which a file gets its name once it is whole."""

from __future__ import annotations

import os
import secrets

from holdfast._core.store.base import storage_errors
from holdfast._core.store.filesystem import sync_folder
from holdfast._core.store.local import LocalStore, LocalWriter


class WholeFiles(LocalStore):
    """A store that writes `.<name>.<random>.partial`, and renames that when it is finished."""

    capabilities = LocalStore.capabilities._replace(reopens=False)  # its url opens a LocalStore

    def create(self, path: str) -> LocalWriter:
        folder, name = os.path.split(path)
        # A unique name, because another call, or one that was given up, may still write.
        hidden = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.partial")
        return _Renamed(self._for_writing(hidden), self._for_writing(path))


class _Renamed(LocalWriter):
    def __init__(self, hidden: str, path: str) -> None:
        super().__init__(hidden)
        self._hidden, self._final = hidden, path

    def finish(self) -> None:
        super().finish()
        with storage_errors("Renaming", self._hidden):
            os.replace(self._hidden, self._final)
            sync_folder(os.path.dirname(self._final))
