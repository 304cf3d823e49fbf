"""Tied weights: rows of a shard table that are the same elements of the same memory, under several names."""

from __future__ import annotations

from collections import Counter

from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.state.memory import TensorMemory


def find_ties(table: ShardTable) -> dict[int, int]:
    """Map each tied row to the row that it is tied to: the first by name among rows with the same memory.

    Tied rows also have the same dtype, global shape, box and replica. Views that only overlap are not tied.
    """
    # Usually the address is known, so that no function is called per tensor.
    pointers = [
        memory.address or _pointer(memory) if type(memory) is TensorMemory else 0 for memory in table.memory
    ]
    seen = Counter(pointers)
    groups: dict[tuple[object, ...], list[int]] = {}
    for row, pointer in enumerate(pointers):
        if pointer and seen[pointer] > 1:
            tensor = table.memory[row].tensor  # type: ignore[attr-defined]
            place = pointer, tensor.device, tensor.shape, tensor.stride(), tensor.dtype
            bits = tensor.is_conj(), tensor.is_neg()  # these views of a tensor have other elements
            where = table.specs[row][1:], table.boxes[row], table.replicas[row], table.deferred[row]
            groups.setdefault((*place, *bits, *where), []).append(row)
    found: dict[int, int] = {}
    for rows in groups.values():
        first, *others = sorted(rows, key=lambda row: table.specs[row].name)
        found |= dict.fromkeys(others, first)
    return found


def _pointer(memory: TensorMemory) -> int:
    """Return the address of a tensor's first element; 0 if it has no elements."""
    return memory.tensor.data_ptr() if memory.tensor.numel() else 0
