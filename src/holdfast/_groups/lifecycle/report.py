"""The report of a warm-up on one rank."""

from __future__ import annotations

import msgspec


class IssuedOperation(msgspec.Struct, frozen=True):
    """Time and memory that one operation of one group took on this rank."""

    operation: str
    seconds: float
    bytes_taken: int
    """Of the GPU's memory, as the driver counts it; 0 without one."""


class WarmedGroup(msgspec.Struct, frozen=True):
    """Time and memory that the warm-up of one group took on this rank."""

    name: str
    """torch's name of the group."""
    description: str
    ranks: tuple[int, ...]
    round: int
    seconds: float
    bytes_taken: int
    """Of the GPU's memory, as the driver counts it; 0 without one."""
    was_warm: bool
    """Whether it had a communicator before."""
    operations: tuple[IssuedOperation, ...]
    """In the order in which they were issued."""
    left_out: tuple[str, ...]
    """Operations that the group needs, but its backend lacks."""


class WarmUpReport(msgspec.Struct, frozen=True):
    """Result of `warm_up` on this rank."""

    groups: tuple[WarmedGroup, ...]
    """In the order in which they were warmed up."""
    rounds: int
    groups_in_world: int
    """Number of different groups over all ranks."""
    seconds: float

    @property
    def bytes_taken(self) -> int:
        """Bytes of this rank's GPU that all groups took."""
        return sum(group.bytes_taken for group in self.groups)

    @property
    def operation_seconds(self) -> dict[str, float]:
        """Seconds that each operation took, over all groups."""
        total: dict[str, float] = {}
        for group in self.groups:
            for issued in group.operations:
                total[issued.operation] = total.get(issued.operation, 0.0) + issued.seconds
        return total
