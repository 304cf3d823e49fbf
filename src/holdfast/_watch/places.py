"""Formats where ranks are, and the facts about each from its stacks and the kernel."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from holdfast._watch.evidence import Evidence, Rank, is_of_a_library
from holdfast._watch.positions import (
    BUSY,
    Position,
    is_another_call,
    later_of,
    position_among,
    position_of,
    positions_of,
)
from holdfast._watch.verdict import RankPlace, listed

MOVED = 1 << 16
"""Transferred bytes below this number may be heartbeats, and are not shown."""
_CHILD = re.compile(r"(?:^|/)subprocess\.py|popen_\w+\.py|^libc.*waitpid")
_LOADER = re.compile(r"^(?:_next_data|_get_data|_try_get_data|_next_index)$")
SHOWN = 8
"""Maximum number of places shown."""


def places(evidence: Evidence) -> tuple[RankPlace, ...]:
    """Group ranks by their position, the smallest group first."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank, one in positions_of(evidence).items():
        phase = evidence.ranks[rank].phase
        found[f"{_does(one)} at {one.call}" + (f", in {phase}" if phase else "")].append(rank)
    fewest = sorted(found.items(), key=lambda item: len(item[1]))
    return tuple(RankPlace(tuple(ranks), in_number(text, ranks)) for text, ranks in fewest)


def _does(one: Position) -> str:
    return {"differentiates": "is in backward", "exits": "is at its exit,"}.get(one.does, one.does)


def known_of(evidence: Evidence, ranks: Iterable[int]) -> tuple[RankPlace, ...]:
    """Format the facts about these ranks; ranks with the same facts become one place."""
    found: dict[tuple[str, ...], list[int]] = defaultdict(list)
    nothing = "no line of it tells anything" if evidence.has_only_logs() else "it has not answered"
    for number in ranks:
        rank = evidence.ranks.get(number)
        found[tuple(_facts(rank)) if rank is not None else (nothing,)].append(number)
    return tuple(
        RankPlace(tuple(numbers), "; ".join(in_number(fact, numbers) for fact in facts))
        for facts, numbers in list(found.items())[:SHOWN]
    )


_PLURAL = {
    "is at its exit,": "are at their exit,",
    "is": "are",
    "waits": "wait",
    "opens": "open",
    "has": "have",
    "uses": "use",
    "it has": "they have",
    "no line of it tells": "no line of them tells",
    "its stacks": "their stacks",
}
_VERB = re.compile(rf"^(?:{'|'.join(_PLURAL)})(?!\w)")


def in_number(fact: str, ranks: Collection[int]) -> str:
    """Return a fact about one rank in the plural, if it is about several."""
    if len(ranks) == 1:
        return fact
    return _VERB.sub(lambda verb: _PLURAL[verb[0]], fact).replace(", and moves: later", ", and move: later")


def _facts(rank: Rank) -> Iterator[str]:
    yield from (ending.what for ending in rank.endings[:2])
    if rank.state:
        yield rank.state
    if not rank.stacks:
        if not rank.endings and not rank.state:
            yield (
                "it has issued nothing that fits"
                if rank.operations or rank.progress
                else "its stacks are not known"
            )
        return
    one = position_among(rank.stacks)
    later = later_of(rank, one.stack)
    inner = f" in {one.stack.calls[0]}" if one.call != one.stack.calls[0] else ""
    where = f"{_does(one)} at {one.call}{inner}"
    if later is None:
        yield where
    elif later.calls == one.stack.calls and is_another_call(one.stack, later):
        yield f"{where}, and moves: later there in another call"
    elif later.calls == one.stack.calls:
        yield f"{where}, at both looks"
    else:
        yield f"{where}, and moves: later at {position_of(later).call}"
    if rank.busy is not None:
        yield f"uses the CPU {rank.busy:.0%} of the time" if rank.busy > BUSY else "uses little CPU"
    if rank.moved > MOVED:
        yield f"has moved {rank.moved / 1e6:.1f} MB between the looks"
    if any(_CHILD.search(call.file) for call in one.stack.calls[:4]):
        yield "waits for a child process"
    if any(_LOADER.match(call.function) for call in one.stack.calls):
        yield "waits for its data loader"
    if rank.phase:
        yield f"in phase {rank.phase}"
    own = [position_of(stack) for stack in rank.stacks if stack is not one.stack]
    threads = [other for other in own if not is_of_a_library(other.call)]
    yield from (f"thread {other.stack.thread} {_does(other)} at {other.call}" for other in threads[:2])


def told(found: Iterable[RankPlace]) -> list[str]:
    """Format places, a line each."""
    return [f"{listed(one.ranks)}: {one.text}" for one in list(found)[:SHOWN]]
