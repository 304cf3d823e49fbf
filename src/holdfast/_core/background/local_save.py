"""A save into the local folders of hosts, which the durable save of the same copy follows.

Each host makes a checkpoint of what its ranks hold, by the ordinary protocol among these ranks. Then all
ranks agree whether every host has made it, and save the copy into the run, as without local folders.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from holdfast._core.background.arena import Arena
from holdfast._core.background.pending import Pending
from holdfast._core.background.sinks import StagedSink, forget_copied
from holdfast._core.background.stage import Staged, witnessed
from holdfast._core.background.writer_client import WriterClient
from holdfast._core.base.deadline import REAL_CLOCK
from holdfast._core.base.values import Json, size_text
from holdfast._core.plan.save import plan_save
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.protocol.operation import agree
from holdfast._core.saving.holders import Holders
from holdfast._core.saving.job import SaveJob, SaveReport
from holdfast._core.saving.request import SaveRequest
from holdfast.errors import BadInput, HoldfastError, RosterLost, SaveFailed

log = logging.getLogger("holdfast")


class CopiedSave(SaveJob):
    """A save of a state that another one has collected.

    error: of that, if it failed.
    """

    def __init__(
        self, request: SaveRequest, table: ShardTable, holders: Holders, error: HoldfastError | None
    ) -> None:
        self._given, self._error = (table, holders), error
        super().__init__(request)

    def _collect(self) -> None:
        if self._error is not None:
            raise self._error
        self.table, self._holders = self._given


class LocalSave(SaveJob):
    """The save of this rank into the folder of its host.

    durable: the save of all ranks that follows.
    number: which save of this rank it is. on_number: called with the highest one of all ranks.
    on_durable: called on each rank once the durable save is committed. Neither may raise.
    """

    def __init__(
        self,
        request: SaveRequest,
        durable: SaveRequest,
        number: int,
        on_number: Callable[[int], None],
        on_durable: Callable[[], None],
    ) -> None:
        self._durable, self._on_durable = durable, on_durable
        self._number, self._on_number = number, on_number
        self._of_all, self._holders_of_all = ShardTable(), Holders(ShardTable())
        """As `table`, with the replicas that are declared for the ranks of all hosts."""
        self._staged: Staged | None = None
        super().__init__(request)

    def everyone(self) -> tuple[int, ...]:
        return self._durable.call.participants

    def _collect(self) -> None:
        super()._collect()
        self._of_all, self._holders_of_all = self.table, self._holders
        if self.request.is_part and any(one is not None and one[1] > 1 for one in self.table.replicas):
            # Those of this host agree on their own.
            self.table = ShardTable(
                self.rank,
                self.table.specs,
                self.table.boxes,
                [one if one == (0, 1) else None for one in self.table.replicas],
                self.table.unsharded,
                self.table.memory,
                self.table.deferred,
            )
            self._holders = Holders(self.table)

    def enter(self) -> None:
        # The offsets of an uneven shard line follow from the lengths on all hosts. Ranks that know that it
        # is uneven refuse, so that no other host's copy, with offsets of an even one, is of a whole step.
        late = zip(self.table.specs, self.table.deferred, strict=True)
        uneven = next((spec.name for spec, one in late if one is not None and one.start < 0), None)
        if self.request.is_part and uneven is not None:
            raise SaveFailed(
                f"{self.request.title}: the place of rank {self.rank}'s part of {uneven!r} depends on ranks "
                "of other hosts.",
                rank=self.rank,
            )
        super().enter()
        if self.commit is not None:
            self.commit.before = None  # the durable save warns if nothing has changed

    def keep(self, staged: Staged | None) -> None:
        """Keep what the durable save needs of the copied state; called before its tensors may change."""
        self._staged, table = staged, self._of_all
        if staged is None or table is self.table or self.collect_error is not None:
            return
        declared = [one or (0, 1) for one in table.replicas]
        found = witnessed(table, plan_save(table, declared, self._durable.options))
        self._staged = replace(staged, witnessed=found)
        forget_copied(table)

    def too_large(self, nbytes: int, budget: int) -> BadInput:
        """Return the error of a state that is larger than the memory of its copy."""
        return BadInput(
            f"The asynchronous save copies {size_text(nbytes)} on rank {self.rank}, but host_memory_budget "
            f"allows {size_text(budget)} at a time, and with local= a state is copied as a whole.",
            rank=self.rank,
            hint="Raise the budget, share the writing among more ranks, or save without local=.",
        )

    def run_both(
        self,
        pending: Pending,
        run: Callable[[SaveJob], SaveReport],
        writer: WriterClient,
        arena: Arena | None,
    ) -> SaveReport:
        """Run this save by `run`, then the durable one, whose report is returned."""
        local: SaveReport | None = None
        failure: HoldfastError | None = None
        try:
            local = run(self)
        except RosterLost:
            raise  # the ranks can agree on nothing
        except HoldfastError as error:
            failure = error
        # The time until the local commit is no time that the other storage has taken.
        call = self._durable.call
        durable = replace(self._durable, call=replace(call, deadline=call.limits.deadline(REAL_CLOCK)))
        is_known = self.collect_error is not None or pending.is_given_up(failure)
        is_whole = self._agree(durable, failure, is_known)
        pending.has_local(local if is_whole else None)
        job = CopiedSave(durable, self._of_all, self._holders_of_all, self.collect_error)
        assert self._staged is not None
        job.sink = StagedSink(writer, arena, self._staged)
        pending._attempt(job)
        try:
            report = run(job)
        except HoldfastError as error:
            error.hint = f"{error.hint}{pending.kept}".strip()
            raise
        self._on_durable()
        return report

    def _agree(self, durable: SaveRequest, failure: HoldfastError | None, is_known: bool) -> bool:
        """Return whether every host has committed the step; the same on all ranks. is_known: the durable save
        will fail for the same reason."""
        call = replace(durable.call, line=None)

        def choose(answers: dict[int, Json]) -> Json:
            failed = {rank: why for rank, (_, why) in answers.items() if why is not None}
            most = max(number for number, _ in answers.values())
            if not failed and any(number != most for number, _ in answers.values()):
                failed = {call.rank: "ranks have made different numbers of saves"}
            if failed and not is_known:
                rank, why = min(failed.items())
                log.warning(
                    "Step %s is not in the local folders, and goes to %s only: rank %d: %s",
                    *(durable.step, durable.store.url, rank, why),
                )
            return [not failed, most]

        title = f"question whether step {durable.step} is in all local folders"
        mine = [self._number, None if failure is None else failure.message]
        is_whole, most = agree(title, f"{durable.store.url}|local|{durable.step}", choose, call, mine)
        self._on_number(most)
        return bool(is_whole)
