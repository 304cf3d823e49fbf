"""Retention: which steps of a run are kept (the newest, periodic ones, the best). Pure: no storage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from math import isfinite
from typing import NamedTuple, SupportsFloat

import msgspec

from holdfast._core.base.values import Message, given
from holdfast._core.format.names import PARTIAL
from holdfast.errors import BadInput

MODES = ("min", "max")


class StepFacts(NamedTuple):
    """Facts about a step from its index."""

    step: int
    created: float | None = None
    """Seconds since 1970; None: not known."""
    metrics: Message | None = None
    """None: not known. A metric that was not finite is None in it."""
    left: bool = False
    """Whether the run has left it behind by going back to an older step."""
    partial: bool | None = None
    """Whether it was saved with `include=` or `exclude=`. None: not known."""


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """The rules by which steps are kept; a step is kept if any rule selects it. See `Checkpoints`."""

    keep: int | None = None
    keep_every: int | timedelta | None = None
    best: str | None = None
    best_mode: str | None = None
    keep_best: int = 1

    def __post_init__(self) -> None:
        keep = self.keep
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise BadInput(f"keep must be at least 1, or None to keep every step, not {given(keep)}.")
        check_interval("keep_every", self.keep_every)
        if self.keep_every is not None and keep is None:
            raise BadInput(
                f"keep_every={self.keep_every!r} says which steps stay besides the newest `keep`; without "
                "keep= all of them stay."
            )
        if self.best is not None and (not isinstance(self.best, str) or not self.best):
            raise BadInput(f"best must be the name of a metric, not {self.best!r}.")
        # No default: both modes are common, and the wrong one would remove the best step.
        if self.best is not None and self.best_mode not in MODES:
            raise BadInput(
                f"best={self.best!r} needs best_mode='min' or 'max', whether a low value is better or a high "
                f"one, not {self.best_mode!r}."
            )
        if self.best is None and self.best_mode is not None:
            raise BadInput(f"best_mode={self.best_mode!r} needs best=, the name of a metric.")
        most = self.keep_best
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise BadInput(f"keep_best must be a number of steps from 1 on, not {most!r}.")
        if most > 1 and (keep is None or self.best is None):
            raise BadInput(
                f"keep_best={most} needs best=, the name of a metric, and keep=; without keep= all steps "
                "stay."
            )

    @property
    def asks_the_index(self) -> bool:
        """Whether the rules need facts from the indexes, not only step numbers."""
        return self.best is not None or isinstance(self.keep_every, timedelta)

    def stays_by_number(self, step: int) -> bool:
        return isinstance(self.keep_every, int) and step % self.keep_every == 0

    def kept(self, steps: Collection[StepFacts]) -> dict[int, str]:
        """Return the steps to keep, each with its reasons: ascending, but steps that were left behind come
        first, because they count as older than all others.

        Unknown facts are no reason to remove a step: if a rule needs the time or metrics of a step and they
        are not known, the step is kept.
        """
        ascending = sorted(steps, key=lambda facts: (not facts.left, facts.step))
        if self.keep is None:
            return dict.fromkeys((facts.step for facts in ascending), "all steps are kept")
        newest = {facts.step for facts in ascending[-self.keep :]}
        whole = self._newest_whole(ascending)
        best, last, found = self._best(ascending)[: self.keep_best], None, dict[int, str]()
        best_text = (
            f"best {self.best}" if self.keep_best == 1 else f"one of the {self.keep_best} best by {self.best}"
        )
        for before, facts in zip((None, *ascending), ascending, strict=False):
            if before is not None and before.left != facts.left:
                last = None  # each branch has its own times
            why = [f"one of the newest {self.keep}"] if facts.step in newest else []
            if facts.step in whole and not why:
                of = f"the newest {self.keep} whole ones"
                why.append(f"it may be one of {of}" if facts.partial is None else f"one of {of}")
            if self.stays_by_number(facts.step):
                why.append(f"every {self.keep_every} steps")
            if isinstance(self.keep_every, timedelta):
                if facts.created is None:
                    why.append("its time is not known")
                # From the oldest on, so that the choice does not depend on steps that were already removed.
                # A negative distance (a clock that was set back) also selects the step.
                elif last is None or not 0 <= facts.created - last < self.keep_every.total_seconds():
                    last = facts.created
                    why.append(f"every {self.keep_every}")
            if self.best is not None and facts.metrics is None:
                why.append("its metrics are not known")
            if facts.step in best:
                why.append(best_text)
            if why:
                found[facts.step] = ", ".join(why)
        return found

    def _newest_whole(self, ascending: Sequence[StepFacts]) -> set[int]:
        """Return the newest `keep` steps that are not partial, and newer ones of which that is not known."""
        found, left = set[int](), self.keep
        for facts in reversed(ascending):
            if left == 0:
                break
            if not facts.partial:
                found.add(facts.step)
            if facts.partial is False and left is not None:
                left -= 1
        return found

    def best_step(self, steps: Collection[StepFacts]) -> int | None:
        """Return the step with the best metric, the newest of equal ones; None if no step has that metric."""
        return next(iter(self._best(steps)), None)

    def _best(self, steps: Collection[StepFacts]) -> list[int]:
        """Return the steps that have the metric, the best first."""
        sign = 1 if self.best_mode == "max" else -1
        known = [
            (sign * value, facts.step)
            for facts in steps
            if (value := _number((facts.metrics or {}).get(self.best or ""))) is not None
        ]
        return [step for _, step in sorted(known, reverse=True)]

    def checked(self, metrics: Mapping[str, SupportsFloat]) -> Message:
        """Return metrics as stored in an index: numbers, and None for a number that is not finite.

        Raises BadInput if they are not numbers, or if the metric for the best step is missing.
        """
        found: Message = {}
        try:
            for name, value in metrics.items():
                number = float(value)
                found[str(name)] = number if isfinite(number) else None
        except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise BadInput(f"metrics must be names with numbers, not {given(metrics)}: {error}.") from None
        if self.best is not None and self.best not in found:
            has = ", ".join(sorted(found)) or "nothing"
            raise BadInput(
                f"metrics has no {self.best!r}, by which best= chooses; it has {has}.",
                hint="A step without metrics= is saved, and is not compared.",
            )
        return found

    def __str__(self) -> str:
        rules = [f"the newest {self.keep}" if self.keep is not None else "all"]
        if self.keep_every is not None:
            unit = " steps" if isinstance(self.keep_every, int) else ""
            rules.append(f"one every {self.keep_every}{unit}")
        if self.best is not None:
            which = "one" if self.keep_best == 1 else str(self.keep_best)
            rules.append(
                f"the {which} with the {'lowest' if self.best_mode == 'min' else 'highest'} {self.best}"
            )
        return ", ".join(rules)

    def describe(self) -> Message:
        """Return the rules as stored in an index, for users and `inspect`."""
        every = self.keep_every
        seconds = f"{every.total_seconds()} s" if isinstance(every, timedelta) else every
        rules = {
            "keep": self.keep,
            "keep_every": seconds,
            "best": self.best,
            "best_mode": self.best_mode,
            "keep_best": self.keep_best if self.keep_best > 1 else None,
        }
        return {name: value for name, value in rules.items() if value is not None}


def retention_of(described: object) -> Retention | None:
    """Return the rules in an index, which is not trusted; None if there are none, or they are invalid."""
    if not isinstance(described, dict):
        return None
    names = ("keep", "keep_every", "best", "best_mode")
    rules: Message = {name: described.get(name) for name in names}
    rules["keep_best"] = described.get("keep_best", 1)
    try:
        if isinstance(rules["keep_every"], str):
            rules["keep_every"] = timedelta(seconds=float(rules["keep_every"].removesuffix(" s")))
        return Retention(**rules)
    except (BadInput, ValueError, OverflowError):
        return None


def facts_of(step: int, about: Mapping[str, object]) -> StepFacts:
    """Return the facts about a step in an index, which is not trusted. Without the keys, there are no
    metrics, and the step is whole."""
    created, metrics, partial = about.get("created"), about.get("metrics", {}), about.get(PARTIAL, False)
    return StepFacts(
        step,
        _number(created),
        metrics if isinstance(metrics, dict) else None,
        partial=partial if isinstance(partial, bool) else None,
    )


def check_interval(argument: str, every: object) -> None:
    """Raise BadInput if it is neither a number of steps, nor a timedelta, nor None."""
    if every is None or (isinstance(every, int) and not isinstance(every, bool) and every >= 1):
        return
    if not isinstance(every, timedelta) or every <= timedelta(0):
        raise BadInput(
            f"{argument} must be a number of steps from 1 on, or a datetime.timedelta above 0, "
            f"not {given(every)}."
        )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with suppress(OverflowError):  # a whole number that no float holds
        return float(value) if isfinite(value) else None
    return None
