"""Reads what Holdfast itself has proven and written to a log: a roll call, a long wait in a save or another
call of Holdfast, and the ranks that were absent from a collective of a session."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from holdfast._core.layout.ranks import ranks_of
from holdfast._watch.collector import RANKS, Collector
from holdfast._watch.evidence import OwnVerdict, SourceLine
from holdfast._watch.log_lines import OWN, Prefixed
from holdfast._watch.verdict import MEANS, NOBODY_WAITS, listed
from holdfast.errors import BadInput

LONGEST = 400
"""Maximum number of characters that are shown of a line."""
_CALL = re.compile(r"Roll call of (\d+) of (\d+) ranks, because ")
_SILENT = re.compile(r"(ranks? \d[\d, -]*): no answer\.")
_OVER = re.compile(r"of the last roll call (?:is over|(has ended)\b)")
_CAME = re.compile(r"rank (\d{1,6})(?=[^:]* came after \d+ s)")
_LIST = r"ranks? \d[\d, -]*"
_PLACE = re.compile(rf"({_LIST}?): (.*)")
_ABSENT = re.compile(
    rf"({_LIST}?)(?:, for which ranks wait elsewhere,)? (?:has|have|is|are) not (?:come|answered|there)\b"
)
_WAITING = re.compile(rf"({_LIST}?) waits? (?:in|at) ")
_CAUSE = re.compile(rf"({'|'.join(MEANS)}): (.*?)\.?$")
_FOLDER = re.compile(r"holdfast diagnose (.+) tells more\.$")
_FOR = r"for (?:rank \d{1,6}|\d+ ranks) to (?P<what>.+?): (?P<infos>rank \d.*)"
_WAIT = re.compile(rf"rank (?P<by>\d{{1,6}}) has waited (?P<seconds>\d+) s {_FOR}")
_GAVE_UP = re.compile(
    r"failed after [\d.]+ s, because (?P<why>the deadline passed|a rank was given up) while "
    rf"rank (?P<by>\d{{1,6}}) waited {_FOR}"
)
_ITS_HEAD_ENDED = re.compile(r" failed after [\d.]+ s: (?P<infos>rank \d.*)")
"""The error after the end of the rank that decides a call (`Call._on_gone`)."""
_NOT_IN = re.compile(r"not in that collective: (?P<infos>rank \d.*)")
_FIRST = re.compile(r"The session ended because rank (\d{1,6}) ")
_INFO = re.compile(r"(?:^|; )rank (\d{1,6})(?: \(host [^()]*\)|, which has not been heard of)")
_SEEN = re.compile(r"^, last seen in phase '.*?'(?: [\d.]+ s ago)?")
_MORE = re.compile(r"; and \d+ more$")
_CIRCLE = re.compile(r"a circle, which nothing can end: (.+?)(?:; its |; thread |$)")
_STATES = {
    "ended": re.compile(
        r"its program has ended|it has destroyed its process group|"
        r"its process has ended(?! with exit code [^0])"
    ),
    "stopped": re.compile(r"it is stopped by a "),
    "unreachable": re.compile(r"its host has not answered for \d+ s"),
}
"""By the cause that they prove: states of a rank, as its kernel, its neighbours or itself have told them."""


class OwnWords:
    """Reads Holdfast's own lines of one log into a collector. The latest verdict counts: earlier ones were
    about other waits."""

    def __init__(self, collector: Collector) -> None:
        self._to = collector
        self._stream: str | None = None
        """The stream with an unfinished roll call."""
        self._call: list[tuple[str, SourceLine]] = []
        """The lines of that roll call so far."""

    def read(self, line: Prefixed, source: SourceLine) -> bool:
        """Return whether a line is Holdfast's own, and nothing else is to be read from it."""
        text = line.text
        is_own = OWN.search(text) is not None
        follows = line.stream == self._stream and text.startswith("  ")
        if (call := _CALL.search(text)) is not None:
            self._stream, self._call = line.stream, []
            self._to.note_world(int(call[2]) if len(call[2]) < 7 else 0)
        elif line.stream == self._stream and not follows:
            self._stream = None
        if call is not None or follows:
            self._call.append((text.strip(), source))
            self._to.own = of_roll_call(self._call)
        elif is_own or any(part in text for part in (" while rank ", " failed after ", "not in that coll")):
            self._wait(line, source)
        if is_own or follows:
            self._to.remark("told", text.strip(), source)
        return is_own or follows

    def _wait(self, line: Prefixed, source: SourceLine) -> None:
        text, own = line.text, self._to.own
        if (wait := _WAIT.search(text)) is not None:
            before = f"rank {wait['by']} has waited {wait['seconds']} s for "
            self._note(wait, source, (before, f" to {wait['what']}"), (int(wait["by"]),))
        elif (wait := _GAVE_UP.search(text)) is not None:
            after = f" to {wait['what']}, until {wait['why']}"
            self._note(wait, source, (f"rank {wait['by']} waited for ", after), (int(wait["by"]),))
        elif (wait := _ITS_HEAD_ENDED.search(text)) is not None:
            self._note(wait, source, ("a call of Holdfast has failed, as it needs ", ""))
        elif (wait := _NOT_IN.search(text)) is not None:
            first = _FIRST.search(text)
            whose = int(first[1]) if first is not None else line.rank
            of = f" of rank {whose}" if whose is not None else ""
            self._note(wait, source, (f"a collective{of} failed; not in it: ", ""), keep=True)
        elif own is not None and own.is_wait and (came := _CAME.findall(text)):
            absent = tuple(rank for rank in own.absent if rank not in set(map(int, came)))
            late = f"{own.summary}; {listed(own.absent)}, but {listed(absent)}, came later"
            facts = tuple(fact for fact in own.facts if fact[0][0] in absent)
            cause = _cause(absent, facts)
            later = msgspec.structs.replace(own, summary=late, absent=absent, facts=facts, cause=cause)
            self._to.own = later if absent else None
        elif own is not None and not own.is_wait and (over := _OVER.search(text)) is not None:
            self._to.own = msgspec.structs.replace(own, may_be_over=True) if over[1] else None

    def _note(
        self,
        wait: re.Match[str],
        source: SourceLine,
        around: tuple[str, str],
        waiting: tuple[int, ...] = (),
        keep: bool = False,
    ) -> None:
        """Note a wait for the ranks in its `infos`.

        around: the text of the verdict before and after these ranks. keep: keep a verdict about these ranks
            that stands already, such as that of the roll call before the same timeout.
        """
        infos = re.split(r"\.(?: (?=[A-Z])|$)", wait["infos"])[0]  # hints follow
        shown = _MORE.sub("", infos)
        found = list(_INFO.finditer(shown))
        absent = tuple(sorted({int(one[1]) for one in found}))
        facts = []
        for one, after in zip(found, [*found[1:], None], strict=True):
            text = shown[one.end() : after.start() if after is not None else len(shown)]
            if fact := _SEEN.sub("", text).lstrip(":, ") or text.lstrip(", "):
                facts.append(((int(one[1]),), fact))
        own = self._to.own
        if not absent or (keep and own is not None and set(absent) <= set(own.absent)):
            return
        self._to.own = OwnVerdict(
            f"{around[0]}{listed(absent)}{'' if shown == infos else ' and others'}{around[1]}",
            absent,
            waiting,
            is_whole=shown == infos,
            is_wait=True,
            facts=tuple(facts),
            cause=_cause(absent, facts, f"{around[0]}{listed(absent)}{around[1]}")
            if shown == infos
            else None,
            lines=((wait[0][:LONGEST], source),),
        )


def _cause(
    absent: Sequence[int], facts: Sequence[tuple[tuple[int, ...], str]], wait: str = ""
) -> tuple[str, str] | None:
    """Return the cause that the facts about all ranks of a wait prove; None if they prove none.

    wait: the wait for them, which closes a circle.
    """
    circle = next((found for _, fact in facts if (found := _CIRCLE.match(fact)) is not None), None)
    if circle is not None:
        return "cycle", "; ".join(filter(None, (circle[1], wait)))
    for kind, state in _STATES.items():
        parts = [(ranks[0], part) for ranks, fact in facts for part in fact.split("; ")]
        proven = {rank: part for rank, part in parts if state.match(part)}
        if absent and proven.keys() == set(absent):
            return kind, f"{listed(absent)}: {proven[absent[0]]}"
    return None


def of_roll_call(lines: list[tuple[str, SourceLine]]) -> OwnVerdict:
    """Return the verdict in the lines of a roll call (`answering.summary`)."""
    said = [text for text, _ in lines[1:]]
    cause = next((found for text in said[:2] if (found := _CAUSE.match(text)) is not None), None)
    first = said[0].removesuffix(".") if said else ""
    summary = "" if _CAUSE.match(first) or said[:1] == [NOBODY_WAITS] else first
    absent = tuple(sorted({rank for text in _ABSENT.findall(summary) for rank in _ranks(text)}))
    waiting = _WAITING.match(summary)
    places = [(_ranks(found[1]), found[2]) for text in said[1:] if (found := _PLACE.match(text)) is not None]
    folder = next((found[1] for text in said if (found := _FOLDER.match(text)) is not None), "")
    return OwnVerdict(
        summary,
        absent,
        _ranks(waiting[1]) if waiting is not None else (),
        facts=tuple(place for place in places if place[0] and set(place[0]) <= set(absent)),
        cause=(cause[1], cause[2]) if cause is not None else None,
        lines=tuple(lines),
        folder=folder,
        heard_of=_heard_of([text for text, _ in lines]),
    )


def _heard_of(said: list[str]) -> tuple[int, ...]:
    """Return the ranks that have answered a roll call; none as long as its lines don't tell which."""
    call = _CALL.search(said[0])
    if call is None or max(len(call[1]), len(call[2])) > 6 or int(call[2]) > RANKS:
        return ()
    silent = {rank for text in said if (found := _SILENT.match(text)) for rank in _ranks(found[1])}
    heard = tuple(rank for rank in range(int(call[2])) if rank not in silent)
    return heard if len(heard) == int(call[1]) else ()


def _ranks(text: str) -> tuple[int, ...]:
    """Return the ranks of `ranks 0-1, 3`; none if it has no such list."""
    try:
        ranks = ranks_of(re.sub("ranks? ", "", text))
    except BadInput:
        return ()
    return ranks if ranks[-1] < RANKS else ()
