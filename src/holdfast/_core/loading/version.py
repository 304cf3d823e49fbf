"""The version of a checkpoint that a load reads: the committer chooses it, and every rank opens the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from holdfast._core.io.missing_files import file_missing, is_still_there
from holdfast._core.io.open_checkpoint import open_source
from holdfast._core.io.source import Source
from holdfast._core.protocol.messages import Chosen
from holdfast._core.protocol.operation import Operation
from holdfast._core.store.base import VISIBLE_WITHIN, NotFound, Store
from holdfast._core.store.pins import Pin
from holdfast.errors import NotCommitted, Replaced


class Version:
    def __init__(self, store: Store, operation: Operation) -> None:
        self._store, self._operation = store, operation
        self._opened = ExitStack()
        self._pin: Pin | None = None
        """On the committer: keeps the checkpoint until all ranks have read it."""
        self._source: Source | None = None
        """On the committer: the version that it chose, open until it has read it."""

    def choose(self) -> Chosen:
        """Committer: choose the version that is there now, and keep it."""
        # Pinned on one rank only, and until all have read: file servers search a list of the locks of a file.
        self._pin = Pin(self._store, self._operation.context.deadline)
        try:
            self._source = index = self._opened.enter_context(open_source(self._store))
            self._operation.cancel.check()  # the caller may have gone on without this thread
            return Chosen(index.identity, index.about.get("created"))
        except BaseException:
            self.let_go()
            raise

    def let_go(self) -> None:
        """Close what is open, and no longer keep the checkpoint."""
        self._opened.close()
        if self._pin is not None:
            self._pin.close()

    @contextmanager
    def open(self, chosen: Chosen) -> Iterator[Source]:
        """Open the version that the committer chose, as soon as it is visible here; a network file system may
        show it late. Raises Replaced if there is a newer version, also while it is read."""
        with self._opened:
            source = self._source if self._source is not None else self._wait_for(chosen)
            try:
                yield source
            except NotFound as error:
                # An overwrite deletes the old data once its index is in place. A missing file is damage only
                # if the index is still the same.
                if is_still_there(self._store, chosen.identity):
                    raise file_missing(self._store, error) from None
                raise self._replaced() from None

    def _wait_for(self, chosen: Chosen) -> Source:
        context = self._operation.context
        ends = context.clock.now() + min(VISIBLE_WITHIN, context.deadline.left())
        while True:
            with suppress(NotCommitted):
                index = self._opened.enter_context(open_source(self._store))
                if index.identity == chosen.identity:
                    return index
                # By the clocks at the two commits: a clock that was set back costs time, but never loads a
                # wrong version.
                created, before = index.about.get("created"), chosen.created
                if isinstance(created, float) and isinstance(before, float) and created > before:
                    raise self._replaced()
                self._opened.close()
            self._operation.cancel.check()
            if context.clock.now() >= ends:
                raise self._replaced()
            context.clock.sleep(0.05)

    def _replaced(self) -> Replaced:
        return Replaced(
            f"{self._store.url} was replaced or removed while rank {self._operation.context.rank} loaded it.",
            hint="Load again.",
        )
