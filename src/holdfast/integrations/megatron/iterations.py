"""A Megatron run folder: `iter_0000010/` for each iteration, and `latest_checkpointed_iteration.txt`, kept in
step."""

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

    After each commit, and never before, `latest_checkpointed_iteration.txt` is written: it names the newest
    iteration that is committed. `keep` is how many committed iterations stay (None: all). The other arguments
    are those of `holdfast.Checkpoints`.
    """

    megatron = True

    def save(
        self,
        iteration: int,
        sharded_state_dict: mcore.StateDict,
        *,
        content_metadata: mcore.StateDict | None = None,
    ) -> Pending | None:
        """Save an iteration: copy its state, and go on. `committed()` of what this returns waits until it is
        durable.

        What holds for `holdfast.Checkpoints.save` holds here: at most `in_flight` saves are under way.
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
        """Load the newest committed iteration, or the one given: what `load` returns, None if there is none.

        All ranks load the same one. One that turns out to be damaged is passed over for the one before it,
        with a warning, unless `fallback=False` or an iteration was named.
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
        """Make a folder that transformers loads, of an iteration's weights. All ranks call it: each writes
        some of the files, whole; nothing is gathered, and no collective is entered.

        Waits for saves under way first, of which the iteration may be one. out, like, dtype, strict, and what
        is raised: as in `holdfast.huggingface.export`.
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
        # The tracker comes last: it must never name what frameworks do not take for a checkpoint.
        mark(self._folder(iteration))
        self._retire(iteration)
        with self.tidying:
            # Not simply this one: with several saves in flight a newer one may have been committed before it.
            newest = max(committed_steps(self.store), default=iteration)
            try:
                replace_file(self.store, TRACKER, str(newest).encode())
            except HoldfastError as error:  # the checkpoint is committed; the next save writes it again
                log.warning("%s could not be written in %s: %s", TRACKER, self.store.url, error)
