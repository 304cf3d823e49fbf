"""A Megatron run folder: `iter_0000010/` for each iteration, and `latest_checkpointed_iteration.txt`, which
names the newest committed one."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import SupportsFloat

from holdfast._core.background.pending import Pending
from holdfast._core.base.values import check_switches
from holdfast._core.format.names import TRACKER
from holdfast._core.protocol.call import Call, begin_call, whole_step
from holdfast._core.run.folder import RunFolder
from holdfast._core.run.turns import one_at_a_time
from holdfast._core.saving.job import SaveJob
from holdfast._core.store.local import open_local
from holdfast._core.store.run_folder import newest_steps
from holdfast._frameworks.foreign_errors import raising
from holdfast._frameworks.megatron import mcore
from holdfast._frameworks.megatron.checkpointing import load_state
from holdfast._frameworks.megatron.errors import of_megatron
from holdfast._frameworks.megatron.metadata import mark, write_after_commit
from holdfast._frameworks.megatron.saving import read_state_dict
from holdfast._models.huggingface.export import ExportReport, run_export
from holdfast.errors import HoldfastError

log = logging.getLogger("holdfast")


class Checkpoints(RunFolder):
    """The iterations of one run, `run/iter_0000010/` and so on, as Megatron-LM names them.

    Only after a commit, `latest_checkpointed_iteration.txt` is written: it names the newest committed
    iteration. `keep` is the number of committed iterations that stay (None: all). The other arguments are
    those of `holdfast.Checkpoints`.
    """

    megatron = True

    @raising(of_megatron)
    def save(
        self,
        iteration: int,
        sharded_state_dict: mcore.StateDict,
        *,
        content_metadata: mcore.StateDict | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        force: bool = False,
        timeout: float | None = None,
    ) -> Pending | None:
        """Save an iteration: copy its state, and return. `committed()` of the result waits for the commit.

        As in `holdfast.Checkpoints.save`, at most `in_flight` saves run at a time; metrics, force and timeout
        are as there.
        """
        iteration = whole_step(iteration)

        def make(call: Call) -> SaveJob:
            return read_state_dict(
                self._folder(iteration),
                sharded_state_dict,
                call,
                content_metadata=content_metadata,
                step=iteration,
                about=self._about(metrics),
                grid=self._job.grid,
                options=self._job.options,
                permit=partial(self._permit_save, call, iteration),
                mark=lambda: mark(self._folder(iteration)),
                after=lambda: self._committed(iteration),
            )

        return self._save(make, iteration, force, timeout)

    @raising(of_megatron)
    def load(
        self,
        sharded_state_dict: mcore.StateDict,
        iteration: int | None = None,
        *,
        strict: mcore.StrictHandling | str = mcore.StrictHandling.ASSUME_OK_UNEXPECTED,
        fallback: bool = True,
    ) -> mcore.Loaded:
        """Load the newest committed iteration, or the given one; return as `load`, or None if there is none.

        All ranks load the same one. If it is damaged, the one before it is loaded, with a warning, unless
        `fallback=False` or an iteration was given.
        """
        return self._load(
            lambda store, _, call: load_state(store, sharded_state_dict, strict, call, self._job.options),
            iteration,
            fallback,
        )

    @one_at_a_time
    def export_hf(
        self,
        iteration: int,
        out: str | os.PathLike[str],
        *,
        like: str | os.PathLike[str],
        dtype: str | None = None,
        quantize: str | None = None,
        strict: bool = True,
    ) -> ExportReport:
        """Export an iteration's weights to a folder that transformers loads.

        All ranks call it. Each writes some of the files completely; there is no gathering and no collective.
        Waits first for saves that still run, which may include this iteration. Arguments and errors: as in
        `holdfast.huggingface.export`.
        """
        iteration = whole_step(iteration)
        check_switches(strict=strict)
        self._settle()
        call = begin_call(self._job)
        return run_export(
            self._folder(iteration),
            open_local(like, "export"),
            open_local(out, "export"),
            call,
            dtype=dtype,
            quantize=quantize,
            strict=strict,
        )

    def _committed(self, iteration: int) -> None:
        # The tracker comes last: it must only name folders that frameworks take for a checkpoint.
        self._retire(iteration)
        with self._old.tidying:
            # Not always this one: with several saves in flight, a newer one may have been committed before.
            try:
                newest = next(iter(newest_steps(self.store, 1)), iteration)
            except HoldfastError as error:
                log.warning("%s was not written in %s: %s", TRACKER, self.store.url, error)
            else:
                write_after_commit(self.store, TRACKER, str(newest))
