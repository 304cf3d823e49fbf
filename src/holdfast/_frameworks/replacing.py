"""Makes the replacements and the guards that a framework's description asks for (`framework.Framework`)."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from importlib import import_module
from types import UnionType

from holdfast._frameworks.folders import refuse_urls
from holdfast._frameworks.framework import Framework
from holdfast._frameworks.guard import guarded
from holdfast._frameworks.patching import Replacement
from holdfast._frameworks.settings import Settings


def replacements_of(framework: Framework, settings: Settings) -> list[Replacement]:
    """Return the replacements for a framework's functions, and for those of it that are guarded."""
    replacements: list[Replacement] = []
    if framework.patches:
        every: Iterator[Replacement] = import_module(framework.patches).replacements(settings)
        replacements += [item for item in every if settings.is_on(item.part)]
    if settings.guard:
        kinds = int if framework.paths_differ else int | str | os.PathLike
        replacements += [guard_of(place, settings, framework.told_by, kinds) for place in framework.guards]
    return replacements


def guard_of(
    place: str,
    settings: Settings,
    told_by: Sequence[str] = (),
    kinds: type | UnionType = int,
    optional: bool = True,
    reached: Callable[[str], None] = lambda place: None,
) -> Replacement:
    """Make the replacement that guards a function, `module:qualified name`: waits inside have deadlines.

    told_by: arguments that identify a call (`Framework.told_by`), if their types are among `kinds`. Empty for
        a user's own function: a rank may count its own steps, or have a folder of its own.
    reached: called first in each call of the function, with its dotted name.
    """
    module, _, name = place.partition(":")

    def make(function: Callable[..., object]) -> Callable[..., object]:
        @wraps(function)
        def call(*args: object, **named: object) -> object:
            reached(f"{module}.{name}")
            given = _arguments(function, args, named)
            refuse_urls(place, given)
            told = _told_apart(given, told_by, kinds)
            with guarded(name, call=told, like_stock=True, job=settings.of_a_guard()):
                return function(*args, **named)

        return call

    return Replacement(module, name, "guard", make, optional=optional)


def _arguments(
    function: Callable[..., object], args: tuple[object, ...], named: dict[str, object]
) -> dict[str, object]:
    """Return the arguments of a call by name; none if they are wrong, as the function itself then says."""
    with suppress(TypeError, ValueError):
        return inspect.signature(function).bind(*args, **named).arguments
    return {}


def _told_apart(given: Mapping[str, object], told_by: Sequence[str], kinds: type | UnionType) -> str:
    """Return a text that identifies a call, equal on all ranks; "" if no argument does."""
    for path in told_by:
        first, *attributes = path.split(".")
        value = given.get(first)
        for attribute in attributes:
            value = getattr(value, attribute, None)
        if isinstance(value, kinds):
            return f"{path}={value}"
    return ""
