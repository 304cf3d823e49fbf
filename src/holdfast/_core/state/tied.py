"""Tied weights: rows of a shard table that are the same elements of the same memory, under several names."""

from __future__ import annotations

from collections import Counter

from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.state.memory import TensorMemory


def find_ties(table: ShardTable) -> dict[int, int]:
    """Return the rows with the memory of another row, and that row: of those alike, the first by name.

    Rows are alike if dtype, global shape, box and replica are the same, too. Views that only overlap are not
    tied.
    """
    # Mostly the address is known, and no function is called for a tensor.
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
    """Return where the elements of a tensor begin; 0 if it has none."""
    return memory.tensor.data_ptr() if memory.tensor.numel() else 0
