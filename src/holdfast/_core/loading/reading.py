"""Read what a load has planned: tensors directly into the state, objects to be put there later."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast._core.format import objects
from holdfast._core.format.limits import bounded_memory
from holdfast._core.io.file_reader import read_into
from holdfast._core.io.source import Source
from holdfast._core.layout.tensor import OBJECT
from holdfast._core.loading.filling import announce
from holdfast._core.loading.numbers import check_number, put_exactly, taken_apart
from holdfast._core.loading.plan import LoadPlan
from holdfast._core.loading.request import LoadRequest
from holdfast._core.loading.tied import check_same
from holdfast._core.protocol.operation import Operation
from holdfast._core.state.leaf import Leaf
from holdfast._core.state.memory import BytesMemory, CallerStreams


def read_tensors(
    source: Source,
    request: LoadRequest,
    plan: LoadPlan,
    leaves: Sequence[Leaf],
    streams: CallerStreams,
    operation: Operation,
) -> int:
    """Read and verify the rows of a plan. Return the number of bytes that were read of data files."""
    operation.bytes_total = plan.reads.bytes_needed
    # Autograd is told before the first byte: a load that fails half way has changed tensors, too.
    announce(plan.wanted, [leaves[leaf] for leaf in plan.filled])
    streams.wait()  # what training has queued on the GPU still reads and writes these tensors
    with torch.no_grad():
        for tensor in plan.blank:
            tensor.detach().zero_()
    threads = request.options.writer_threads
    read = read_into(request.store, plan.wanted, plan.columns, plan.reads, threads, operation.progress)
    check_same(request.store, source, plan.wanted, plan.tied.unknown, operation.tick)
    for row, target in plan.counts.items():
        number = plan.wanted.memory[row].tensor  # type: ignore[attr-defined]
        put_exactly(plan.wanted.specs[row].name, number, target)
    # The caller's streams do not wait for copies on this thread's streams, so finish them here.
    streams.finish()
    return read


def decode_objects(
    source: Source, request: LoadRequest, plan: LoadPlan, leaves: Sequence[Leaf]
) -> dict[int, object]:
    """Return the objects that were read, by index of the leaf that each fills."""
    decoded: dict[int, object] = {}
    for spec, memory, leaf in zip(plan.wanted.specs, plan.wanted.memory, plan.filled, strict=True):
        if spec.kind != OBJECT:
            continue
        assert isinstance(memory, BytesMemory)
        with bounded_memory(f"The object {spec.name!r} of {request.store.url}"):
            data = source.object_prefix + memory.value(spec.shape[0])
            present = leaves[leaf].value if leaf not in plan.numbers else None
            value = objects.decode(data, spec.name, present)
        if leaf in plan.numbers:
            check_number(spec, value)
        if leaf in plan.wholes:
            decoded.update(taken_apart(leaves, leaf, plan.wholes[leaf], value, request.strict))
        else:
            decoded[leaf] = value
    return decoded | plan.scalars
