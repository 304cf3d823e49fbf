"""Tensors that two published models both have in 8 bits: they are compared multiplied by their scales, as a
load reads them. Their bits say less: they may have blocks of other sizes, or scales of another form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from holdfast._core.layout.tensor import FLOATS, TensorSpec
from holdfast._models.equality.sides import Side
from holdfast._models.views.published_model import PublishedModel
from holdfast._models.views.quantized import IN_8_BITS, SUFFIXES, base_of
from holdfast._models.views.scaled import scales_read

Specs = Mapping[str, TensorSpec]
Prints = Mapping[str, str]


def multiplied(
    sides: tuple[Side, Side],
    specs: tuple[Specs, Specs],
    prints: tuple[Prints, Prints],
    parts: Callable[[TensorSpec], Iterable[str]],
) -> set[str]:
    """Return the names of such tensors; without those of which fingerprints say that elements and scales are
    the same, and those whose scales can't be read on both sides.

    parts: returns the tensors of the second side that make up one of the first, which only that has.
    """
    models = [side.published for side in sides]
    if models[0] is None or models[1] is None:
        return set()
    found = {
        name
        for name in specs[0].keys() - specs[1].keys()
        if specs[0][name].dtype == IN_8_BITS
        and _scales(models[0], name) is not None
        and _can_be_read(models[1], parts(specs[0][name]), specs[1])
    }
    for name in specs[0].keys() & specs[1].keys():
        if {one[name].dtype for one in specs} == {IN_8_BITS}:
            scales = [_scales(model, name) for model in models if model is not None]
            if None not in scales and not (scales[0] == scales[1] and _are_equal(name, scales[0], prints)):
                found.add(name)
    return found


def _scales(model: PublishedModel, name: str) -> tuple[str, object] | None:
    """Return the name of a tensor's scales, and what else determines how they are read; None if they can't
    be."""
    place = model.place(name)
    read = None if place is None else scales_read(model, place)
    return None if read is None else (read[0].name, (read[0].shape, read[0].code, read[1]))


def _can_be_read(model: PublishedModel, names: Iterable[str], specs: Specs) -> bool:
    codes = {name: specs[name].dtype if name in specs else None for name in names}
    return bool(codes) and all(
        code in FLOATS or (code == IN_8_BITS and _scales(model, name) is not None)
        for name, code in codes.items()
    )


def _are_equal(name: str, scales: tuple[str, object] | None, prints: tuple[Prints, Prints]) -> bool:
    both = [(one.get(name), one.get(scales[0])) for one in prints if scales is not None]
    return both[0] == both[1] and None not in both[0]


def goes_with(name: str, multiplied: set[str], theirs: Specs) -> bool:
    """Return whether a tensor is the scales of one of `multiplied`, or scales of activations that only one
    side has: these belong to no weight."""
    base = base_of(name)
    return base in multiplied and (
        name.removeprefix(base) in SUFFIXES or (base != name and name not in theirs)
    )
