"""The prefix of a model's names in a state or checkpoint, as `model.` in `{"model": model}`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from holdfast.errors import BadInput


def prefix_of(names: Collection[str], fits: Callable[[str], bool], where: str, hint: str) -> str:
    """Return the prefix without which weights have the names of a model, such as `model.`; "" if some have
    these names as they are, or if none has them without any prefix.

    names: of weights. fits: tells whether the model has a name. where, hint: for errors.
    Raises BadInput if the weights of several models have its names, each under another prefix.
    """
    found = prefixes_of(names, fits)
    if len(found) > 1:
        keys = ", ".join(repr(prefix.removesuffix(".")) for prefix in sorted(found))
        raise BadInput(f"{where} holds several models whose names fit: {keys}.", hint=hint)
    return found[0] if found else ""


def prefixes_of(names: Collection[str], fits: Callable[[str], bool]) -> list[str]:
    """Return all prefixes without which weights have the names of a model; none if some have these names as
    they are."""
    if any(map(fits, names)):
        return []
    found: list[str] = []
    for name in names:
        if not name.startswith(tuple(found)):
            found += [prefix for prefix in _prefixes(name) if fits(name[len(prefix) :])][:1]
    # A shorter prefix may have been found after one that it begins.
    return [one for one in found if not any(one != other and one.startswith(other) for other in found)]


def _prefixes(name: str) -> Iterator[str]:
    end = name.find(".")
    while end >= 0:
        yield name[: end + 1]
        end = name.find(".", end + 1)
