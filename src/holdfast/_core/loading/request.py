"""The arguments of a load, checked once, and its report: the same for plain, DCP and Megatron loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast._core.base.options import Options
from holdfast._core.base.values import check_switches
from holdfast._core.io.renamed import Rename, check_rename
from holdfast._core.layout.patterns import Patterns
from holdfast._core.protocol.call import Call, check_names
from holdfast._core.state.leaf import Flat
from holdfast._core.store.base import Store, bounded
from holdfast.errors import BadInput

RAISE, SKIP = "raise", "skip"


class LoadReport(msgspec.Struct, frozen=True):
    """The result of a load on this rank."""

    path: str
    step: int | None
    tensors: int
    """Number of names that were filled, objects included."""
    bytes_needed: int
    """Bytes of the checkpoint's tensors that this rank needs."""
    bytes_read: int
    """Bytes that this rank read, the index included."""
    seconds: float
    missing: tuple[str, ...] = ()
    """Names in the state that the checkpoint lacks: they kept their values (strict=False), or are optimizer
    states that still do not exist."""
    unasked: tuple[str, ...] = ()
    """Names in the checkpoint that no rank requested, at most 10,000 of those that `include` and `exclude`
    select; they are also logged. For a published model: its weights. Always empty for loads through torch
    DCP's functions, and through Megatron's from its own checkpoints: partial loads are usual there."""
    skipped: tuple[str, ...] = ()
    """Tensors whose shape differs in the checkpoint; they kept their values (on_shape="skip")."""


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """The arguments of a load on this rank.

    collect: returns the leaves of the state for a rank. Exceptions from it are reported to the other ranks.
    signature: further values that distinguish this call from others on the same folder; equal on all ranks.
    left_out: weights of a published model that this rank does not request on purpose.
    may_be_left: a predicate: may no rank request this weight? The same on all ranks; others fail the load.
    left_together: a predicate: may this weight be left only if no rank requests any such weight?
    tells_rest: report names that no rank requests; for a published model they are always reported.
    may_be_empty: all ranks may request nothing (torch DCP accepts that).
    lenient: the argument of the caller's function that permits missing names, for the hint of an error.
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
    left_together: Callable[[str], bool] = lambda name: False
    tells_rest: bool = True
    may_be_empty: bool = False
    lenient: str = "strict=False"

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", bounded(self.store, self.call.deadline))
        check_names(include=self.include, exclude=self.exclude)
        check_rename(self.rename)
        check_switches(strict=self.strict, cast=self.cast)
        if self.on_shape not in (RAISE, SKIP):
            raise BadInput(f"on_shape must be 'raise' or 'skip', not {self.on_shape!r}.")

    @property
    def patterns(self) -> Patterns:
        return self.include, self.exclude
