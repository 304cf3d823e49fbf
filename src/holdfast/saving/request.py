"""What a save was asked for, checked once: the same value for synchronous, asynchronous, DCP and Megatron
saves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import BadInput
from holdfast.layout.grid import Grid
from holdfast.options import Options
from holdfast.protocol.arguments import check_grid, check_options, check_texts
from holdfast.protocol.call import Call, whole_step
from holdfast.roster.base import Message
from holdfast.state.flatten import Flat
from holdfast.store.base import Store

PREVIOUS = "previous"


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """A save of this rank: what, where, with whom, and what its caller does on the way.

    collect: yields the state's leaves for a rank. What it raises is told to the other ranks.
    The fields up to `options` are the arguments of `holdfast.save`.
    previous: committer: where the names to compare with are, if the folder has no checkpoint yet.
    permit: committer: raises if it may not save; called with a tick before it begins and before it commits.
    after: committer: called once the save is committed.
    report: each rank: what it tells the committer with what it has written. Must not raise.
    merge_reports: committer: turns the reports of all ranks into an addition to the notes. Must not raise.
    """

    store: Store
    collect: Callable[[int], Flat]
    call: Call
    step: int | None = None
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    expected: str | Iterable[str] | None = None
    overwrite: bool = True
    grid: Grid | None = None
    notes: Any = None
    options: Options = field(default_factory=Options)
    previous: Callable[[], Store | None] = lambda: None
    permit: Callable[[Callable[[], None]], None] = lambda tick: None
    after: Callable[[], None] = lambda: None
    report: Callable[[], Message] = dict
    merge_reports: Callable[[dict[int, Message]], Message] = lambda reports: {}

    def __post_init__(self) -> None:
        check_grid(self.grid)
        check_options(self.options)
        check_texts("include", self.include)
        check_texts("exclude", self.exclude)
        if isinstance(self.expected, Iterable) and not isinstance(self.expected, str):
            object.__setattr__(self, "expected", tuple(self.expected))  # an iterator is gone after one look
        check_texts("expected", self.expected)
        if self.step is not None:
            object.__setattr__(self, "step", whole_step(self.step))
        try:
            json.dumps(self.notes)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(
                f"notes= must be a JSON value (text, numbers, lists, dicts): {error}.",
                hint="Put tensors and other objects into the state.",
            ) from None

    @property
    def title(self) -> str:
        """How errors name this save."""
        return f"save of {self.store.url}" + (f" (step {self.step})" if self.step is not None else "")
