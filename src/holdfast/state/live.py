"""Containers of a state that each save and each load looks at again.

What `get_state_dict` returns may be built once and saved after every step. By then an optimizer has made
states that it did not have, has replaced tensors and numbers, and a schedule has changed the learning rate.
So its containers know where their values come from, and are renewed before they are saved, or filled. What
the user has put there, or has taken out, stays as he left it.

A copy of one by `copy` or `pickle` is a plain dict of what is there at that time. `dict(...)` and printing
give what was found the last time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

State: TypeAlias = dict[str, Any]
"""A state by names. The values are the user's: only those who know a name know what it stands for."""
StateDict: TypeAlias = Mapping[Any, Any]
"""A dict of the user's, or an optimizer's, to be read: its keys may be numbers, too."""
_GONE = object()
K = TypeVar("K")
V = TypeVar("V")


class Source(Protocol):
    """Where the values of live containers come from."""

    def loaded(self) -> None:
        """Take over what a load has put into them."""
        ...


def renew(target: MutableMapping[K, V], fresh: Mapping[K, V], last: dict[K, V]) -> None:
    """Put fresh values into a dict; `last` is what was put there the last time. What is not that is the
    user's."""
    for key in [key for key in last if key not in fresh]:
        # It is gone where it came from. What the user has put in its place stays.
        if target.get(key, _GONE) is last.pop(key):
            del target[key]
    for key, value in fresh.items():
        present = target.get(key, _GONE)
        # By identity: an equal value that the user has put there is the user's all the same.
        if present is last.get(key, _GONE) or present is value:
            target[key] = last[key] = value


Make = Callable[[str, torch.dtype, Sequence[int]], torch.Tensor]
"""Makes a tensor for a name that the checkpoint has: (key, dtype, shape)."""


def zeros(key: str, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A plain tensor in host memory, for what belongs to no parameter."""
    return torch.zeros(tuple(shape), dtype=dtype)


class Rest:
    """What a checkpoint has under a name, and the state has not: a load makes it, of the keys that it takes,
    and fills it in."""

    __slots__ = ("fill", "make", "parameter", "takes")

    def __init__(
        self,
        fill: Callable[[StateDict], None],
        make: Make | None = None,
        parameter: torch.Tensor | None = None,
        takes: Callable[[str], bool] = lambda key: True,
    ) -> None:
        self.fill, self.parameter, self.takes = fill, parameter, takes
        self.make: Make = make or zeros


class OpenDict(dict[Any, object]):
    """A dict that gets from a checkpoint also what it has not, of the keys that it takes."""

    __slots__ = ("takes",)

    def __init__(self, content: StateDict, takes: Callable[[str], bool] = lambda key: True) -> None:
        super().__init__(content)
        self.takes = takes

    def rest(self) -> list[tuple[str, Rest]]:
        """The path to it from here, and what it is."""
        return [("", Rest(self.update, takes=self.takes))]


class LiveDict(dict[Any, object]):
    """A dict of what `fetch` finds. `rest` says what a load may put into it beside that, and where."""

    __slots__ = ("_fetch", "_last", "rest", "source")

    def __init__(
        self,
        fetch: Callable[[], StateDict],
        source: Source | None = None,
        rest: Callable[[], list[tuple[str, Rest]]] = list,
    ) -> None:
        super().__init__()
        self._fetch, self.source, self.rest = fetch, source, rest
        self._last: dict[Any, object] = {}
        # At once, so that it can be read before any save or load.
        self.look_again()

    def look_again(self) -> None:
        """Renew the values."""
        renew(self, self._fetch(), self._last)

    def settle(self) -> None:
        """Take what is in here for found, not for the user's, where it is what the values come from by
        now."""
        fresh = self._fetch()
        self._last |= {key: value for key, value in self.items() if key in fresh}

    def __reduce__(self) -> tuple[object, ...]:
        self.look_again()
        # A plain dict: torch's weights-only reader knows no class of ours.
        return dict, (dict(self),)


class ParameterState(LiveDict):
    """What an optimizer keeps for one parameter. It is empty until the first step with a gradient.

    A save passes an empty one by, or writes what `zeros` gives. A load makes what the checkpoint has under
    its name, and puts that into it.
    """

    __slots__ = ("make", "parameter", "zeros")

    def __init__(
        self,
        fetch: Callable[[], StateDict],
        parameter: torch.Tensor,
        make: Make,
        zeros: Callable[[], State] = dict,
        source: Source | None = None,
    ) -> None:
        self.parameter, self.make, self.zeros = parameter, make, zeros
        super().__init__(fetch, source, lambda: [("", Rest(self.update, make, parameter))])

    @property
    def is_awaited(self) -> bool:
        """Is there a state, or will there be one once the optimizer takes a step? A frozen parameter may have
        one of earlier."""
        return bool(self) or self.parameter.requires_grad

    def fill(self, loaded: StateDict) -> None:
        """Put a loaded state in the present one's place."""
        # The object stays: whoever was given this state sees what is loaded.
        self.clear()
        self.update(loaded)


class LiveList(list[object]):
    """A list of dicts, `param_groups`, of what `fetch` finds.

    Each gets from a checkpoint also what it has not: an optimizer may count steps there, a schedule keep a
    rate.
    """

    __slots__ = ("_fetch", "_last", "source")

    def __init__(self, fetch: Callable[[], list[State]], source: Source | None = None) -> None:
        super().__init__()
        self._fetch, self.source = fetch, source
        self._last: list[State] = []
        self.look_again()

    def look_again(self) -> None:
        """Renew the values of each dict."""
        fresh = self._fetch()
        # Groups have no names: they are known by their place, and if there are fewer now the last ones go.
        del self[len(fresh) :], self._last[len(fresh) :]
        for index, group in enumerate(fresh):
            if index == len(self):
                self.append({})
            if index == len(self._last):
                self._last.append({})
            mine = self[index]
            if isinstance(mine, dict):
                renew(mine, group, self._last[index])

    def settle(self) -> None:
        """As a LiveDict's."""
        self._last = [dict(group) if isinstance(group, Mapping) else {} for group in self]

    def replace(self, loaded: Iterable[object]) -> None:
        """Put a loaded list in the present one's place."""
        self[:] = loaded

    def plain(self) -> list[object]:
        """A list of dicts that is to be stored as one object."""
        return [dict(group) if isinstance(group, Mapping) else group for group in self]

    def __reduce__(self) -> tuple[object, ...]:
        self.look_again()
        return list, (list(self),)


def settle(value: object) -> None:
    """Settle a state and what is in it, and look at it again."""
    if isinstance(value, LiveDict | LiveList):
        value.settle()
        value.look_again()
    for inner in value.values() if isinstance(value, Mapping) else ():
        if isinstance(inner, LiveDict | LiveList):
            settle(inner)
