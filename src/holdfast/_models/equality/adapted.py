"""Whether a difference from a model with an adapter is a merge that was left out, or made twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast._models.equality.pairs import Pair
from holdfast._models.equality.sides import Side
from holdfast._models.equality.verdict import Unlike
from holdfast._models.views.adapter import Product
from holdfast._models.views.published_model import PublishedModel

LEFT_OUT, TWICE = "left out", "twice"


class Alternative(NamedTuple):
    """Another way in which the adapter may have been merged."""

    words: str
    """What is wrong with it; "" for a right one."""
    times: int
    pair: Pair


def side_with_adapter(sides: tuple[Side, Side]) -> int | None:
    """Return which of two sides is a model with an adapter; None if neither is, or both."""
    found = [place for place, side in enumerate(sides) if side.published and side.published.adapter]
    return found[0] if len(found) == 1 else None


def alternatives(pair: Pair, place: int, model: PublishedModel, parts: set[str]) -> Iterator[Alternative]:
    """Yield other ways in which an adapter may have been merged into a tensor; none if it does not change it.

    place: the side of the pair that is the model with the adapter. parts: the published tensors of it.
    """
    changes = [change for name in parts for change in model.changes.get(name, ())]
    if not changes:
        return
    # PEFT merges into the model in the dtype in which it was loaded, which may be the other side's.
    cast = pair._replace(
        regions=tuple(
            region._replace(
                stored=(region.dtype, region.stored[1]) if place == 0 else (region.stored[0], region.dtype)
            )
            for region in pair.regions
        )
    )
    if cast != pair:
        yield Alternative("", 1, cast)
    yield Alternative(LEFT_OUT, 0, pair)
    # The second merge of DoRA's needs norms of rows of the first, which are not stored.
    if not any(isinstance(change.by, Product) and change.by.magnitude for change in changes):
        yield Alternative(TWICE, 2, pair)
        if cast != pair:
            yield Alternative(TWICE, 2, cast)


def merge_told(where: str, changed: int, unlike: Sequence[Unlike]) -> str:
    """Return what is proven of the merge in a place, in words; "" if nothing is.

    changed: how many of the compared tensors the adapter changes.
    """
    said = []
    for words, what in ((LEFT_OUT, "the base model without the adapter"), (TWICE, "the adapter twice")):
        count = sum(one.adapter == words for one in unlike)
        if count:
            said.append(
                f"{where} holds {what} ({count:,} of the {changed:,} tensors that the adapter is for)"
            )
    return "; ".join(said)
