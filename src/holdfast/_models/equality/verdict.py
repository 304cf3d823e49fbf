"""The result of `same`, as values."""

from __future__ import annotations

from collections import Counter

import msgspec

from holdfast._core.layout.tensor import Dims, listed

_SHOWN = 3
"""Wrong tensors of an engine, or objects, that the text of a result names."""


class Unlike(msgspec.Struct, frozen=True):
    """A tensor that differs between the two places."""

    name: str
    a: str
    """Its dtype and shape in that place, or why it can't be read; and whether values of the other place do
    not fit into that dtype."""
    b: str
    elements: int | None = None
    """How many elements differ; None without `where=True`, and of a live state."""
    first: Dims | None = None
    """Index of the first of them."""
    ranks: Dims = ()
    """Of an engine: the ranks that hold the wrong elements; if `surely` is False, the ranks of which one or
    more do."""
    surely: bool = False
    adapter: str = ""
    """Of a tensor that an adapter on one side changes: "left out" if the other side holds exactly the base
    model's, "twice" if it holds that with the adapter merged twice; "" if neither is proven."""

    @property
    def where(self) -> str:
        """The ranks, in words."""
        numbers = ", ".join(map(str, self.ranks))
        if len(self.ranks) == 1:
            return f"rank {numbers}"
        return f"ranks {numbers}" if self.surely else f"one or more of ranks {numbers}"


class Same(msgspec.Struct, frozen=True):
    """The result of `same`."""

    a: str
    b: str
    same: bool
    """Whether every weight is in both places, and equal."""
    equal: int
    different: tuple[Unlike, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    converted: dict[str, str]
    """Names whose dtypes differ, and the less exact dtype in which they were compared."""
    rounded: dict[str, str]
    """Names of `converted` whose more exact elements had to be rounded for this, and to which dtype."""
    bytes_read: int
    """Bytes of weights that were read; 0 if fingerprints were enough."""
    not_in_engine: tuple[str, ...] = ()
    """Beside an engine, published tensors of layers that predict further tokens, which it has in another
    model. They were not compared."""
    merge: str = ""
    """What is proven of the merge of an adapter on the other side, in words (`Unlike.adapter`)."""
    prefix_a: str = ""
    """What names begin with in that place, such as `model.`, and are named without here."""
    prefix_b: str = ""
    by_fingerprints: int = 0
    """How many tensors were compared by fingerprints that both places have."""
    objects: tuple[str, ...] = ()
    """Names of what is stored as an object in a place, such as a NumPy array or a sparse tensor, under a name
    that a weight could have. They were not compared."""

    def __str__(self) -> str:
        said = [f"the same: {_tensors(self.equal)}"]
        if not self.same:
            said = [f"different: {_tensors(len(self.different))}", f"equal: {self.equal}"]
            said += [f"only in {self.a}: {len(self.only_a)}", f"only in {self.b}: {len(self.only_b)}"]
        if self.merge:
            said.append(self.merge)
        if wrong := [one for one in self.different if one.ranks]:
            said.append(listed([f"{one.name!r} on {one.where}" for one in wrong], str, _SHOWN))
        # "The same" must not be mistaken for equality of the more exact values.
        said += [f"compared as {dtype}: {_tensors(n)}" for dtype, n in self.compared_as().items()]
        for place, prefix in self.prefixes():
            said.append(f"names in {place} are without {prefix!r}")
        if self.not_in_engine:
            said += [f"not in the engine, and not compared: {_tensors(len(self.not_in_engine))}"]
        if self.objects:
            said.append(f"not compared: what is stored as an object ({listed(self.objects, repr, _SHOWN)})")
        return "; ".join(said)

    def prefixes(self) -> list[tuple[str, str]]:
        """Return the places whose names begin with a prefix that is left out here, and the prefix."""
        pairs = (self.a, self.prefix_a), (self.b, self.prefix_b)
        return [(place, prefix) for place, prefix in pairs if prefix]

    def compared_as(self) -> dict[str, int]:
        """Return how many tensors were compared in a less exact dtype, by that dtype."""
        return Counter(self.converted.values())


def _tensors(number: int) -> str:
    return f"{number:,} tensor{'' if number == 1 else 's'}"
