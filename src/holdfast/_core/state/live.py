"""Containers of a state that each save and each load refreshes.

The result of `get_state_dict` may be built once and saved after every step. Meanwhile an optimizer creates
states, replaces tensors and numbers, and a schedule changes the learning rate. So the containers know where
their values come from, and are refreshed before they are saved or filled. Values that the user has put in or
removed stay as they are.

A copy by `copy` or `pickle` is a plain dict with the values of that time. `dict(...)` and printing show the
values of the last refresh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

State: TypeAlias = dict[str, Any]
"""A state by names. The type of a value depends on its name."""
StateDict: TypeAlias = Mapping[Any, Any]
"""A dict of a user or an optimizer, to be read: its keys may also be numbers."""
_GONE = object()
K = TypeVar("K")
V = TypeVar("V")


class LiveSource(Protocol):
    """The model or optimizers that the values of live containers come from."""

    def loaded(self) -> None:
        """Take over the values that a load has put into the containers."""
        ...


def renew(target: MutableMapping[K, V], fresh: Mapping[K, V], last: dict[K, V]) -> None:
    """Put fresh values into a dict. `last` has the values that were put there the last time; all others are
    the user's."""
    for key in [key for key in last if key not in fresh]:
        # The source no longer has this key. A value that the user has put in its place stays.
        if target.get(key, _GONE) is last.pop(key):
            del target[key]
    for key, value in fresh.items():
        present = target.get(key, _GONE)
        # By identity: a value of the user's stays, even if it equals the last one.
        if present is last.get(key, _GONE) or present is value:
            target[key] = last[key] = value


MakeTensor = Callable[[str, torch.dtype, Sequence[int]], torch.Tensor]
"""Creates a tensor for a name of the checkpoint: (key, dtype, shape)."""


def zeros(key: str, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a plain tensor in host memory, for a value that belongs to no parameter."""
    return torch.zeros(tuple(shape), dtype=dtype, device="cpu")


class Rest:
    """A placeholder for names under a prefix that are in the checkpoint but not in the state. A load creates
    values for the keys that `takes` accepts, and passes them to `fill`."""

    __slots__ = ("fill", "make", "parameter", "takes")

    def __init__(
        self,
        fill: Callable[[StateDict], None],
        make: MakeTensor | None = None,
        parameter: torch.Tensor | None = None,
        takes: Callable[[str], bool] = lambda key: True,
    ) -> None:
        self.fill, self.parameter, self.takes = fill, parameter, takes
        self.make: MakeTensor = make or zeros


class OpenDict(dict[object, object]):
    """A dict to which a load adds missing keys that the checkpoint has, if `takes` accepts them."""

    __slots__ = ("takes",)

    def __init__(self, content: StateDict, takes: Callable[[str], bool] = lambda key: True) -> None:
        super().__init__(content)
        self.takes = takes

    def rest(self) -> list[tuple[str, Rest]]:
        """Return the placeholder for its missing keys, with its path relative to this dict."""
        return [("", Rest(self.update, takes=self.takes))]


class LiveDict(dict[Any, object]):
    """A dict of the values that `fetch` returns. `rest` returns placeholders for further values that a load
    may add, each with its path."""

    __slots__ = ("_fetch", "_last", "rest", "source")

    def __init__(
        self,
        fetch: Callable[[], StateDict],
        source: LiveSource | None = None,
        rest: Callable[[], list[tuple[str, Rest]]] = list,
    ) -> None:
        super().__init__()
        self._fetch, self.source, self.rest = fetch, source, rest
        self._last: dict[object, object] = {}
        # Now, so that it can be read before any save or load.
        self.look_again()

    def look_again(self) -> None:
        renew(self, self._fetch(), self._last)

    def settle(self) -> None:
        """Treat the present values of keys that the source has as fetched, not as the user's."""
        fresh = self._fetch()
        self._last |= {key: value for key, value in self.items() if key in fresh}

    def __reduce__(self) -> tuple[object, ...]:
        self.look_again()
        # A plain dict: torch's weights-only reader knows no class of ours.
        return dict, (dict(self),)


class ParameterState(LiveDict):
    """The state of one parameter in an optimizer. It is empty until the first step with a gradient.

    A save skips an empty one, or writes what `zeros` returns. A load creates the values that the checkpoint
    has under its name, and puts them into it.
    """

    __slots__ = ("make", "parameter", "zeros")

    def __init__(
        self,
        fetch: Callable[[], StateDict],
        parameter: torch.Tensor,
        make: MakeTensor,
        zeros: Callable[[], State] = dict,
        source: LiveSource | None = None,
    ) -> None:
        self.parameter, self.make, self.zeros = parameter, make, zeros
        super().__init__(fetch, source, lambda: [("", Rest(self.update, make, parameter))])

    @property
    def is_awaited(self) -> bool:
        """Whether there is a state, or will be one after the optimizer's next step. A frozen parameter may
        have an earlier one."""
        return bool(self) or self.parameter.requires_grad

    def fill(self, loaded: StateDict) -> None:
        """Replace the present state by a loaded one."""
        # The object stays the same, so all references to it see the loaded values.
        self.clear()
        self.update(loaded)


class LiveList(list[object]):
    """A list of the dicts that `fetch` returns: `param_groups`.

    A load also adds keys to the dicts that only the checkpoint has: an optimizer may count steps there, or a
    schedule store a rate.
    """

    __slots__ = ("_fetch", "_last", "source")

    def __init__(self, fetch: Callable[[], list[State]], source: LiveSource | None = None) -> None:
        super().__init__()
        self._fetch, self.source = fetch, source
        self._last: list[State] = []
        self.look_again()

    def look_again(self) -> None:
        fresh = self._fetch()
        # Groups have no names, so they are matched by position; if there are fewer now, the last ones go.
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
        """Treat the present values as fetched, as in a LiveDict."""
        self._last = [dict(group) if isinstance(group, Mapping) else {} for group in self]

    def plain(self) -> list[object]:
        """Return a list of dicts, to be stored as one object."""
        return [dict(group) if isinstance(group, Mapping) else group for group in self]

    def __reduce__(self) -> tuple[object, ...]:
        self.look_again()
        return list, (list(self),)


def settle(value: object) -> None:
    """Settle and refresh a state and the containers in it."""
    if isinstance(value, LiveDict | LiveList):
        value.settle()
        value.look_again()
    for inner in value.values() if isinstance(value, Mapping) else ():
        if isinstance(inner, LiveDict | LiveList):
            settle(inner)
