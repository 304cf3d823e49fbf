"""The arguments of a save, checked once: the same value for synchronous, asynchronous, DCP and Megatron
saves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from holdfast._core.base.options import Options
from holdfast._core.base.values import Json, Message, check_switches
from holdfast._core.format.names import PARTIAL
from holdfast._core.layout.grid import Grid
from holdfast._core.protocol.call import Call, check_names, whole_step
from holdfast._core.state.leaf import Flat
from holdfast._core.store.base import Store, bounded
from holdfast.errors import BadInput

PREVIOUS = "previous"


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """A save of this rank: its arguments, the participants, and the callbacks of its caller.

    collect: returns the state's leaves for a rank. Its exceptions are sent to the other ranks.
    The fields up to `options`, but `about`, are the arguments of `holdfast.save`.
    about: further metadata for the index (docs/format.md).
    objects_may_differ: if ranks have different objects under one name, save that of the lowest rank and
        warn (torch DCP does so without a warning); by default that is an error.
    previous: committer: returns the checkpoint to compare names with, if the folder has none yet.
    permit: committer: raises if it may not save; called with a tick and the name of the attempt, before it
        begins and before it commits.
    ended: committer: called with the name of the attempt, and whether it was committed, once that is known.
        Must not raise.
    may_be_empty: whether all ranks may have nothing to save (torch DCP accepts that).
    mark: committer: called once the save is committed, before others may move it. Must not raise.
    is_part: the participants hold only a part of the tensors, so these may have gaps.
    marks: names of the files that `mark` writes; other markers, of a save that is replaced, are deleted.
    after: committer: called at the end.
    label: begins the name of the attempt, and so the names of data files.
    report: each rank: returns a message for the committer, sent after the writing. Must not raise.
    copies: each rank: returns which ranks hold the same values (`messages.RowDigest`). Must not raise.
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
    notes: Json = None
    about: Message = field(default_factory=dict)
    options: Options = field(default_factory=Options)
    objects_may_differ: bool = False
    previous: Callable[[], Store | None] | None = None
    permit: Callable[[Callable[[], None], str], None] | None = None
    ended: Callable[[str, bool], None] | None = None
    may_be_empty: bool = False
    is_part: bool = False
    mark: Callable[[], None] | None = None
    marks: tuple[str, ...] = ()
    after: Callable[[], None] | None = None
    label: str = ""
    report: Callable[[], Message] | None = None
    copies: Callable[[], list[list[tuple[int, int, int]]]] | None = None
    merge_reports: Callable[[dict[int, Message]], Message] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", bounded(self.store, self.call.deadline))
        if isinstance(self.expected, Iterable) and not isinstance(self.expected, str):
            object.__setattr__(self, "expected", tuple(self.expected))  # an iterator can be read only once
        check_names(include=self.include, exclude=self.exclude, expected=self.expected)
        check_switches(overwrite=self.overwrite, objects_may_differ=self.objects_may_differ)
        if self.step is not None:
            object.__setattr__(self, "step", whole_step(self.step))
        if self.include is not None or self.exclude:
            object.__setattr__(self, "about", {**self.about, PARTIAL: True})
        try:
            # Encoded now: the index is made at the commit, after all ranks have written, and by then the
            # caller may have changed what it gave.
            object.__setattr__(self, "notes", json.loads(json.dumps(self.notes)))
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(
                f"notes= must be a JSON value (text, numbers, lists, dicts): {error}.",
                hint="Put tensors and other objects into the state.",
            ) from None

    @property
    def title(self) -> str:
        return f"save of {self.store.url}" + (f" (step {self.step})" if self.step is not None else "")
