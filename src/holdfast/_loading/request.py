"""The arguments of a load, checked once, and its report: the same for plain, DCP and Megatron loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast._io.renamed import Rename, check_rename
from holdfast._layout.patterns import Patterns
from holdfast._options import Options
from holdfast._protocol.call import Call, check_names
from holdfast._state.leaf import Flat
from holdfast._store.base import Store
from holdfast.errors import BadInput

RAISE, SKIP = "raise", "skip"


class LoadReport(msgspec.Struct, frozen=True):
    """What a load did on this rank."""

    path: str
    step: int | None
    tensors: int
    """Names that were filled, objects included."""
    bytes_needed: int
    """Bytes of the checkpoint's tensors that this rank needs."""
    bytes_read: int
    """Bytes that this rank read, the index included."""
    seconds: float
    missing: tuple[str, ...] = ()
    """Names that the state has and the checkpoint does not: they kept their values (strict=False), or an
    optimizer still has no state under them."""
    unasked: tuple[str, ...] = ()
    """Names of the checkpoint that no rank has asked for, at most 10,000 of those that `include` and
    `exclude` select; they are also logged. Of a published model, weights. Loads by the functions of torch
    DCP, and Megatron's of its own checkpoints, list none: a part is mostly what is wanted there."""
    skipped: tuple[str, ...] = ()
    """Tensors that have another shape in the checkpoint, and kept their values (on_shape="skip")."""


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What a load of this rank was asked for.

    collect: returns the leaves of the state for a rank. What it raises is reported to the other ranks.
    signature: what else distinguishes this call from others on the same folder; the same on all ranks.
    left_out: names of a published model's weights that this rank does not ask for on purpose.
    may_be_left: whether another weight may be asked for by no rank, the same on all; others fail the load.
    tells_rest: whether names that no rank asks for are told of; those of a published model always are.
    may_be_empty: whether all ranks may ask for nothing (torch DCP accepts that).
    lenient: how the caller's function is told to load what is there, for an error about names that are not.
    The other fields are the arguments of `holdfast.load`.
    """

    store: Store
    collect: Callable[[int], Flat]
    call: Call
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    strict: bool = True
    cast: bool = False
    rename: Rename | None = None
    on_shape: str = RAISE
    options: Options = field(default_factory=Options)
    signature: object = None
    left_out: frozenset[str] = frozenset()
    may_be_left: Callable[[str], bool] = lambda name: True
    tells_rest: bool = True
    may_be_empty: bool = False
    lenient: str = "strict=False"

    def __post_init__(self) -> None:
        check_names(include=self.include, exclude=self.exclude)
        check_rename(self.rename)
        if self.on_shape not in (RAISE, SKIP):
            raise BadInput(f"on_shape must be 'raise' or 'skip', not {self.on_shape!r}.")

    @property
    def patterns(self) -> Patterns:
        return self.include, self.exclude
