"""The arguments of a call by name, as the installed version of the replaced function takes them.

Another version may have another argument at the same position: megatron-core 0.17 took `common_strategy` out
of the middle. So positions are bound by the signature of the original, and ours gets names.
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
    """Return the names of a function's arguments; without those that collect others."""
    return tuple(name for name, one in inspect.signature(function).parameters.items() if one.kind in _NAMED)


def by_name(
    original: Function, known: Collection[str], args: tuple[object, ...], named: dict[str, object]
) -> dict[str, object]:
    """Return the arguments of a call of `original` by name.

    known: the names that ours takes; those that the original lacks may be given by name.
    Raises TypeError where the original would, and BadInput for an argument that is not known, unless it has
    its default value.
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
    """Make a function take its arguments as the original does: by its positions, or by name."""

    def decorate(ours: F) -> F:
        known = names_of(ours)

        @wraps(ours)
        def call(*args: object, **named: object) -> object:
            return ours(**by_name(original, known, args, named))

        return cast(F, call)

    return decorate
