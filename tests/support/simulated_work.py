"""What a simulated rank does in a save or a turn, in place of real files and groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast._core.base.values import Message
from holdfast._core.protocol.messages import Assigned, Final, RowList, Written
from holdfast.errors import CommitUnconfirmed, Conflict, CoverageError, StorageError

if TYPE_CHECKING:
    from tests.support.simulate import World


class SimulatedSave:
    """The save of one simulated rank, in one of its calls."""

    def __init__(self, world: World, rank: int, call: int, attempt: str) -> None:
        self.world, self.rank, self.call, self.attempt = world, rank, call, attempt
        self.plain = world.rng.choice([None, "same", "same", f"own {rank}"])

    def _fail(self, where: str) -> None:
        if self.world.faults.fails_at.get((self.rank, self.call)) == where:
            raise StorageError(f"Call {self.call} fails on rank {self.rank} in {where}.")

    def enter(self) -> None: ...

    def row_digest(self) -> str | None:
        self._fail("row_digest")
        return self.plain

    def copies(self) -> list[list[tuple[int, int, int]]]:
        return self.world.copies

    def list_rows(self) -> RowList:
        return RowList([str(self.plain)], [])

    def assign(self, lists: dict[int, RowList]) -> dict[int, Assigned]:
        return {rank: Assigned(replicas=[]) for rank in lists}

    def write(self, assigned: Assigned | None) -> Written:
        self._fail("write")
        if self.rank in self.world.faults.write_fails:
            raise StorageError(f"Writing failed on rank {self.rank}: No space left on device.")
        self.world.durable.add((self.rank, self.call))
        return Written(self.call, None, [])

    def prepare(self, written: dict[int, Written]) -> None:
        self.named = {rank: int(message.step or 0) for rank, message in written.items()}
        if self.world.faults.bad_coverage:
            raise CoverageError("Tensor 'w' is not covered.")

    def publish(self) -> Final:
        from tests.support.simulate import PublishedIndex

        kind = self.world.faults.publish
        if kind == "refused":
            raise StorageError("Publishing failed: Input/output error.")
        if kind == "conflict":
            raise Conflict("Another save was there first.")
        self.world.published.append(PublishedIndex(self.attempt, self.named, self.world.clock.time))
        if kind == "unsynced":
            raise CommitUnconfirmed("The index is in place, but storage could not confirm it.")
        return Final()

    def mark(self) -> None:
        pass

    def tidy(self) -> None:
        pass

    def is_moved(self) -> bool:
        return self.attempt in self.world.moved

    def is_committed(self) -> bool:
        world = self.world
        if self.attempt in world.moved:
            return False
        seen = [index for index in world.published if world.clock.time >= index.since + world.faults.lag]
        return bool(seen) and seen[-1].attempt == self.attempt


class SimulatedTask:
    """What one simulated rank does in a turn: it goes on beside the protocol, and may fail or never end."""

    def __init__(self, world: World, rank: int, call: int) -> None:
        self.world, self.rank, self.call = world, rank, call
        self.ends = float("inf")

    def contribute(self) -> Message:
        return {}

    def decide(self, said: dict[int, Message]) -> dict[int, Message]:
        if self.world.faults.bad_coverage:
            raise CoverageError("Ranks don't fit together.")
        return {rank: {} for rank in said}

    def begin(self, answer: Message) -> None:
        if self.world.faults.stuck.get(self.rank) is None:
            self.ends = self.world.clock.time + self.world.rng.choice([0.0, 0.1, 3.0])

    def wait(self, seconds: float) -> None:
        pass

    def poll(self) -> Message | None:
        if self.world.clock.time < self.ends:
            return None
        if self.rank in self.world.faults.write_fails:
            raise StorageError(f"Acting failed on rank {self.rank}.")
        self.world.durable.add((self.rank, self.call))
        return {}

    def finish(self, reports: dict[int, Message]) -> Message:
        return {"reports": len(reports)}
