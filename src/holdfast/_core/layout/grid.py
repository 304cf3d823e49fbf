"""Named axes over consecutive ranks, in two views: the layout of dense weights and that of experts.

The same ranks are factored twice, as in Megatron: into tp x cp x dp x pp for dense weights, and into
etp x ep x edp x pp for experts. `order` lists the axes from the fastest-varying to the slowest, in any
permutation that Megatron accepts (`tp-cp-ep-dp-pp` is its default). Pure arithmetic: it gives the coordinates
and groups of any rank of any world, without a process group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from holdfast.errors import BadInput

AXES = ("tp", "cp", "ep", "dp", "pp")
DENSE = ("tp", "cp", "dp", "pp")
EXPERT = ("etp", "ep", "edp", "pp")
_SLOT = {"etp": "tp", "edp": "dp"}
_SIZES = ("world", "tp", "pp", "cp", "ep", "etp", "vpp")


@dataclass(frozen=True, slots=True)
class Grid:
    """A layout of `world` ranks. Sizes default to 1; `dp` and `edp` follow from the others."""

    world: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    """Tensor parallelism within an expert; Megatron's default is `tp`."""
    vpp: int = 1
    """Model chunks per pipeline rank (virtual pipeline); it does not affect ranks."""
    order: str = "tp-cp-ep-dp-pp"
    first_rank: int = 0
    dense: dict[str, int] = field(init=False, repr=False, compare=False)
    expert: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        etp = self.tp if self.etp is None else self.etp
        object.__setattr__(self, "etp", etp)
        for name in _SIZES:
            if _whole(name, getattr(self, name)) < 1:
                raise BadInput(f"Grid {name}={getattr(self, name)} must be at least 1.")
        _whole("first_rank", self.first_rank)
        if not isinstance(self.order, str):
            raise BadInput(f"Grid order must be a text such as {'-'.join(AXES)!r}, not {self.order!r}.")
        names = self.order.split("-")
        if len(set(names)) != len(names) or not set(names) <= set(AXES):
            raise BadInput(f"Grid order {self.order!r} must list some of {'-'.join(AXES)}, each once.")
        sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "ep": self.ep}
        for name, size in sizes.items():
            if size > 1 and name not in names:
                raise BadInput(f"Grid {name}={size}, but order {self.order!r} leaves {name} out.")
        names += [name for name in AXES if name not in names]  # of size 1, so their position does not matter
        object.__setattr__(self, "order", "-".join(names))
        dp = self._rest("tp x cp x pp", self.tp * self.cp * self.pp)
        edp = self._rest("etp x ep x pp", etp * self.ep * self.pp)
        object.__setattr__(self, "dense", {"tp": self.tp, "cp": self.cp, "dp": dp, "pp": self.pp})
        object.__setattr__(self, "expert", {"etp": etp, "ep": self.ep, "edp": edp, "pp": self.pp})
        # The stride is the distance of ranks in a pipeline. A rank has one pipeline for all of its weights.
        strides = [self._stride_of_pp(axes) for axes in (DENSE, EXPERT)]
        if self.pp > 1 and names[-1] != "pp" and (edp != dp or strides[0] != strides[1]):
            raise BadInput(
                f"With order {self.order!r} dense weights and experts would have different groups (dp={dp}, "
                f"edp={edp}, pipeline stages {strides[0]} and {strides[1]} ranks apart); put pp last, as "
                f"Megatron requires."
            )

    def _stride_of_pp(self, axes: tuple[str, ...]) -> int:
        sizes, fast_to_slow = self._view(axes)
        return math.prod(sizes[name] for name in fast_to_slow[: fast_to_slow.index("pp")])

    def _rest(self, what: str, product: int) -> int:
        if self.world % product:
            raise BadInput(f"A world of {self.world} ranks is not divisible by {what} = {product}.")
        return self.world // product

    def _view(self, axes: tuple[str, ...]) -> tuple[dict[str, int], list[str]]:
        """Return the sizes of the view that has `axes`, and its axes from fastest to slowest."""
        if set(axes) <= set(DENSE):
            sizes = self.dense
        elif set(axes) <= set(EXPERT):
            sizes = self.expert
        else:
            raise BadInput(f"Axes {axes} must all be dense ({DENSE}) or all expert ({EXPERT}).")
        slot = {_SLOT.get(name, name): name for name in sizes}
        return sizes, [slot[name] for name in self.order.split("-") if name in slot]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank in both views: tp, cp, dp, pp and etp, ep, edp."""
        place = rank - self.first_rank
        if not 0 <= place < self.world:
            raise BadInput(
                f"Rank {rank} is not in this grid of ranks {self.first_rank} to "
                f"{self.first_rank + self.world - 1}."
            )
        by_axis: dict[str, int] = {}
        for axes in (EXPERT, DENSE):
            sizes, fast_to_slow = self._view(axes)
            rest = place
            for name in fast_to_slow:
                rest, by_axis[name] = divmod(rest, sizes[name])
        return by_axis

    def rank_of(self, **coordinates: int) -> int:
        """Return the rank at these coordinates of one view; axes left out are 0."""
        sizes, fast_to_slow = self._view(tuple(coordinates))
        rank, stride = 0, 1
        for name in fast_to_slow:
            coordinate = coordinates.get(name, 0)
            if not 0 <= coordinate < sizes[name]:
                raise BadInput(f"{name}={coordinate} is outside 0..{sizes[name] - 1}.")
            rank, stride = rank + coordinate * stride, stride * sizes[name]
        return self.first_rank + rank

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return all groups that span `axes` (of one view), each with its ranks in order, as Megatron
        does."""
        return [tuple(row) for row in self.table(*axes).tolist()]

    def table(self, *axes: str) -> npt.NDArray[np.int64]:
        """Return `groups` as an array of shape (groups, ranks per group)."""
        sizes, fast_to_slow = self._view(axes)
        slow_to_fast = fast_to_slow[::-1]
        ranks = np.arange(self.first_rank, self.first_rank + self.world, dtype=np.int64)
        shaped = ranks.reshape([sizes[name] for name in slow_to_fast])
        # Stable: axes of the group go to the end and keep their order, so ranks of a group ascend, as in
        # Megatron's lists.
        permutation = sorted(range(len(slow_to_fast)), key=lambda index: slow_to_fast[index] in axes)
        return shaped.transpose(permutation).reshape(-1, math.prod(sizes[name] for name in axes))

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the group over `axes` that contains `rank`."""
        self.coordinates(rank)  # raises if the grid has no such rank
        table = self.table(*axes)
        members: list[int] = table[(table == rank).any(axis=1)][0].tolist()
        return tuple(members)

    def replica(self, rank: int, *axes: str) -> tuple[int, int]:
        """Return (index, count) of a tensor replicated over `axes`, as `Shard(replica=)` takes it."""
        members = self.group(rank, *axes)
        return members.index(rank), len(members)

    def text(self) -> str:
        """Return the grid as text that `grid_of` reads: the sizes that differ from their defaults."""
        plain = Grid(self.world, tp=self.tp)
        parts = [f"world={self.world}"]
        for name in (*_SIZES[1:], "order", "first_rank"):
            value = getattr(self, name)
            if value != (1 if name == "tp" else getattr(plain, name)):
                parts.append(f"{name}={value}")
        return ",".join(parts)

    def describe(self) -> dict[str, int | str]:
        """Return plain values for an index header or a message; equal layouts have equal descriptions."""
        sizes: dict[str, int | str] = {**self.dense, **self.expert}
        return {
            "world": self.world,
            **sizes,
            "vpp": self.vpp,
            "order": self.order,
            "first_rank": self.first_rank,
        }


def _whole(name: str, size: int) -> int:
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise BadInput(f"Grid {name} must be a whole number, not {size!r}.", hint="Write Grid(16, tp=2).")
    return size


def grid_of(text: str) -> Grid:
    """Parse a grid such as `world=64,tp=2,pp=4,ep=8`; names are those of `Grid`. Raises BadInput."""
    numbers: dict[str, int] = {}
    order = "-".join(AXES)
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name in numbers:
            raise BadInput(f"The grid {text!r} says {name} twice.")
        if name == "order" and value:
            order = value
        elif name in (*_SIZES, "first_rank") and value.isascii() and value.isdecimal() and len(value) < 10:
            numbers[name] = int(value)
        else:
            raise BadInput(
                f"The grid {text!r} has {part.strip()!r} in it, which is no size.",
                hint=f"Write world=64,tp=2,pp=4,ep=8; known are {', '.join(_SIZES)}, first_rank and order.",
            )
    if "world" not in numbers:
        raise BadInput(f"The grid {text!r} does not say how many ranks there are.", hint="Write world=64,...")
    return Grid(numbers.pop("world"), order=order, **numbers)
