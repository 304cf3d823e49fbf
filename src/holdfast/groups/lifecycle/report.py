"""What a warm-up did on a rank."""

from __future__ import annotations

import msgspec


class IssuedOperation(msgspec.Struct, frozen=True):
    """What one operation of one group took on this rank."""

    operation: str
    seconds: float
    bytes_taken: int
    """Of the GPU's memory, as the driver counts it; 0 without one."""


class WarmedGroup(msgspec.Struct, frozen=True):
    """What warming up one group took on this rank."""

    name: str
    """torch's."""
    description: str
    ranks: tuple[int, ...]
    round: int
    seconds: float
    bytes_taken: int
    """Of the GPU's memory, as the driver counts it; 0 without one."""
    was_warm: bool
    """Had it a communicator before?"""
    operations: tuple[IssuedOperation, ...]
    """In the order in which they were issued."""
    left_out: tuple[str, ...]
    """Operations that it is used for, and that its backend does not have."""


class WarmUpReport(msgspec.Struct, frozen=True):
    """What `warm_up` did on this rank."""

    groups: tuple[WarmedGroup, ...]
    """In the order in which they were warmed up."""
    rounds: int
    groups_in_world: int
    """Different groups, over all ranks."""
    seconds: float

    @property
    def bytes_taken(self) -> int:
        """Of this rank's GPU, by all groups."""
        return sum(group.bytes_taken for group in self.groups)

    @property
    def operation_seconds(self) -> dict[str, float]:
        """Seconds that each operation took, over all groups."""
        total: dict[str, float] = {}
        for group in self.groups:
            for issued in group.operations:
                total[issued.operation] = total.get(issued.operation, 0.0) + issued.seconds
        return total
