"""A Megatron run folder: `iter_0000010/` for each iteration, and `latest_checkpointed_iteration.txt`, which
names the newest committed one."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

from holdfast.background.pending import Pending
from holdfast.errors import HoldfastError
from holdfast.format.names import TRACKER
from holdfast.integrations.huggingface.export import ExportReport, ExportRequest
from holdfast.integrations.megatron import mcore
from holdfast.integrations.megatron.checkpointing import load_state
from holdfast.integrations.megatron.metadata import mark
from holdfast.integrations.megatron.saving import State, read_state_dict
from holdfast.protocol.call import Call, whole_step
from holdfast.run.folder import RunFolder
from holdfast.saving.job import SaveJob
from holdfast.store.base import replace_file
from holdfast.store.local import open_store
from holdfast.store.run_folder import committed_steps

log = logging.getLogger("holdfast")


class Checkpoints(RunFolder):
    """The iterations of one run, `run/iter_0000010/` and so on, as Megatron-LM names them.

    Only after a commit, `latest_checkpointed_iteration.txt` is written: it names the newest committed
    iteration. `keep` is the number of committed iterations that stay (None: all). The other arguments are
    those of `holdfast.Checkpoints`.
    """

    megatron = True

    def save(
        self,
        iteration: int,
        sharded_state_dict: mcore.StateDict,
        *,
        content_metadata: mcore.StateDict | None = None,
    ) -> Pending | None:
        """Save an iteration: copy its state, and return. `committed()` of the result waits for the commit.

        As in `holdfast.Checkpoints.save`, at most `in_flight` saves run at a time.
        """
        iteration = whole_step(iteration)

        def make(call: Call) -> SaveJob:
            return read_state_dict(
                self._folder(iteration),
                State(sharded_state_dict, content_metadata),
                call,
                step=iteration,
                grid=self._grid,
                options=self._options,
                permit=partial(self._permit, call),
                after=lambda: self._committed(iteration),
            )

        return self._save(make, iteration)

    def load(
        self,
        sharded_state_dict: mcore.StateDict,
        iteration: int | None = None,
        *,
        strict: mcore.StrictHandling | str = mcore.StrictHandling.ASSUME_OK_UNEXPECTED,
        fallback: bool = True,
    ) -> Any:
        """Load the newest committed iteration, or the given one; return as `load`, or None if there is none.

        All ranks load the same one. If it is damaged, the one before it is loaded, with a warning, unless
        `fallback=False` or an iteration was given.
        """
        return self._load(
            lambda store, call: load_state(store, sharded_state_dict, strict, call, self._options),
            iteration,
            fallback,
        )

    def export_hf(
        self,
        iteration: int,
        out: str | os.PathLike[str],
        *,
        like: str | os.PathLike[str],
        dtype: str | None = None,
        strict: bool = True,
    ) -> ExportReport:
        """Export an iteration's weights to a folder that transformers loads.

        All ranks call it. Each writes some of the files completely; there is no gathering and no collective.
        Waits first for saves that still run, which may include this iteration. Arguments and errors: as in
        `holdfast.huggingface.export`.
        """
        iteration = whole_step(iteration)
        self._settle()
        return ExportRequest(
            store=self._folder(iteration),
            base=open_store(like),
            out=open_store(out),
            call=self._call(),
            dtype=dtype,
            strict=strict,
        ).run()

    def _committed(self, iteration: int) -> None:
        # The tracker comes last: it must only name folders that frameworks take for a checkpoint.
        mark(self._folder(iteration))
        self._retire(iteration)
        with self.tidying:
            # Not always this one: with several saves in flight, a newer one may have been committed before.
            newest = max(committed_steps(self.store), default=iteration)
            try:
                replace_file(self.store, TRACKER, str(newest).encode())
            except HoldfastError as error:  # the checkpoint is committed; the next save writes it again
                log.warning("%s could not be written in %s: %s", TRACKER, self.store.url, error)
