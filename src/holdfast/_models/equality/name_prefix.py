"""A prefix that names have on one side of `same` only, such as `model.` of a state that was saved as
`{"model": model}`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from holdfast._core.layout.patterns import selector
from holdfast._models.equality.sides import Side
from holdfast._models.views.prefixes import prefix_of, prefixes_of
from holdfast.errors import BadInput


def leave_out_prefix(
    lead: Side, other: Side, include: Sequence[str] | None, exclude: Sequence[str] | None
) -> Callable[[str], bool]:
    """Find such a prefix, and leave it out. Return a function that tells whether patterns keep a name; they
    may be of names with the prefix, or without it.

    Raises BadInput if one side holds several models, each under another prefix, beside a published one, and
    for a pattern to include that matches no name: what it was to name would be passed over.
    """
    wanted, allowed = selector((include, None)), selector((None, exclude))

    def kept(side: Side) -> list[str]:
        names = side.weights()
        return [name for name in names if wanted(name) and allowed(name)] or list(names)

    def leave_out(side: Side, prefix: str) -> bool:
        names = side.weights()
        if not prefix or len({name.removeprefix(prefix) for name in names}) < len(names):
            return False
        side.leave_out(prefix)
        return True

    changed = None
    if lead.published is None and other.published is not None:
        view, theirs = other.published.view_if_known, other.weights()
        found = prefix_of(
            kept(lead),
            lambda name: name in theirs or (view is not None and view.knows(name)),
            lead.where,
            'Choose one, such as include=["model"] (--include model).',
        )
        changed = lead if leave_out(lead, found) else None
    elif lead.published is None:
        for side, has in ((lead, other.weights()), (other, lead.weights())):
            # Checkpoints of unlike models may have names that begin in many ways.
            several = prefixes_of(kept(side), has.__contains__)
            if len(several) == 1 and leave_out(side, several[0]):
                changed = side
                break
    stored_names = [side.stored_name(name) for side in (lead, other) for name in side.weights()]
    for pattern in include or ():
        one = selector(([pattern], None))
        if not any(map(one, (*stored_names, *lead.weights(), *other.weights()))):
            raise BadInput(f"include: no weight in either place has a name that matches {pattern!r}.")
    if changed is None:
        return lambda name: wanted(name) and allowed(name)
    stored = changed.stored_name
    return lambda name: (wanted(name) or wanted(stored(name))) and allowed(name) and allowed(stored(name))


def refuse_passed(passed: Mapping[str, str], chosen: Sequence[str], lead: Side, other: Side) -> None:
    """Raise BadInput if patterns choose a published tensor, and not the one that it is compared as.

    passed: the tensors of `lead` that no pattern chooses, by the published ones that they are made of.
    """
    if hidden := [name for name in chosen if name in passed]:
        raise BadInput(
            f"include: {hidden[0]!r} of {other.where} is compared as {passed[hidden[0]]!r} of {lead.where}, "
            "which no pattern matches.",
            hint=f"Give patterns of the names in {lead.where}.",
        )
