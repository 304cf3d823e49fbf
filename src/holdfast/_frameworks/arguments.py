"""Converts the arguments of a call to keywords by the signature of the installed, replaced function.

Positions differ between versions: megatron-core 0.17 removed `common_strategy` from the middle. So positional
arguments are bound to the signature of the original, and the replacement is called with keywords.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import cache, wraps
from typing import Any, TypeVar, cast

from holdfast.errors import BadInput

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@cache
def names_of(function: Function) -> tuple[str, ...]:
    """Return the names of a function's parameters, except for `*args` and `**kwargs`."""
    return tuple(name for name, one in inspect.signature(function).parameters.items() if one.kind in _NAMED)


def by_name(
    original: Function, known: Collection[str], args: tuple[object, ...], named: dict[str, object]
) -> dict[str, object]:
    """Return the arguments of a call of `original` by name.

    known: the parameters of the replacement; ones that the original lacks may be given by name.
    Raises TypeError where the original would, and BadInput for an unknown argument, unless it has its default
    value.
    """
    theirs = inspect.signature(original)
    names = names_of(original)
    more = {name: value for name, value in named.items() if name in known and name not in names}
    try:
        bound = theirs.bind(*args, **{name: value for name, value in named.items() if name not in more})
    except TypeError as error:
        raise TypeError(f"{original.__qualname__}(): {error}") from None
    given = {name: value for name, value in bound.arguments.items() if name in names}
    for name, one in theirs.parameters.items():
        if one.kind is inspect.Parameter.VAR_KEYWORD:
            given |= bound.arguments.get(name, {})
    for name in [name for name in given if name not in known]:
        value = given.pop(name)
        if name not in names or value is not theirs.parameters[name].default:
            raise BadInput(
                f"{original.__module__}.{original.__qualname__} was given {name}={value!r}, which this "
                f"version of Holdfast does not know.",
                hint=f"Leave {name} out, or call holdfast.uninstall() and the framework's own function.",
            )
    return given | more


def taking_those_of(original: Function) -> Callable[[F], F]:
    """Decorate a function to take positional arguments in the order of the original, and keywords."""

    def decorate(ours: F) -> F:
        known = names_of(ours)

        @wraps(ours)
        def call(*args: object, **named: object) -> object:
            return ours(**by_name(original, known, args, named))

        return cast(F, call)

    return decorate
