"""Where the code of a rank is: ranks that wait for it ask, its heart answers, or the kernel where that can't.

The first rank that asks claims `where/<rank>/ask`; all others who ask before the answer is there share its
question. The heart of the asked rank looks for it at every beat, and answers in `where/<rank>`, with the
questions that this answers. While that process holds the GIL, its heart does not run: then a neighbour on its
machine answers for it, with what the kernel shows, and with the stack that faulthandler writes on a signal.
Ranks that are threads of one process (tests) are looked at without a message.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

import msgspec

from holdfast._roster.base import Roster, get_ours
from holdfast._roster.links import knock
from holdfast._roster.memory import MemoryRoster
from holdfast._roster.presence import Seen, read, see
from holdfast._stacks import where_dumped, where_thread_is, where_threads_are
from holdfast.errors import HoldfastError

ASK_BEFORE = 2.5
"""A rank is asked this many seconds before it is given up."""
PATIENCE = 2.0
"""Seconds to wait for an answer, at most."""
GRACE = 1.5
"""Seconds in which a rank answers for itself; then a neighbour does."""
LONGEST = 4096
"""Characters of an answer, at most."""
KEPT = 64
"""Questions that an answer lists, at most."""


class Question(msgspec.Struct, frozen=True):
    """From a rank that waits to the rank that it waits for."""

    ticket: str = ""
    """Identifies this question."""


class Answer(msgspec.Struct, frozen=True):
    """From a rank, or for it, to all who have asked."""

    tickets: list[str]
    """The last questions that were read, the latest last; this answers all of them."""
    at: str
    """Where its code is."""


def _question_key(rank: int) -> str:
    return f"where/{rank}/ask"


def _answer_key(rank: int) -> str:
    return f"where/{rank}"


# -- the rank that answers ------------------------------------------------------------------------


class Answering:
    """Answers for this rank, and for its neighbours that can't. A part of its beacon."""

    def __init__(self, rank: int) -> None:
        self.caller: threading.Thread | None = None
        """The thread of the program that makes the calls."""
        self._rank = rank
        self._heard: list[str] = []
        self._open: dict[int, tuple[str, float]] = {}
        """Of each neighbour, a question that it has not answered, and since when."""

    def beat(self, roster: Roster, near: Sequence[int]) -> None:
        """Answer what was asked. near: the neighbours on this machine that may not be able to."""
        base = roster.base()
        with suppress(HoldfastError):
            ranks = [self._rank, *near]
            questions = get_ours(base, [_question_key(rank) for rank in ranks])
            for rank, message in zip(ranks, questions, strict=True):
                question = read(message, Question)
                if question is None:
                    self._open.pop(rank, None)
                elif rank == self._rank:
                    self._answer(base, rank, question, where_threads_are(self.caller))
                elif self._is_overdue(rank, question):
                    self._answer(base, rank, question, where_seen(see(roster, [rank])[rank]))

    def _is_overdue(self, rank: int, question: Question) -> bool:
        ticket, since = self._open.setdefault(rank, (question.ticket, time.monotonic()))
        if ticket != question.ticket:
            self._open[rank] = question.ticket, time.monotonic()
            return False
        return time.monotonic() - since >= GRACE

    def _answer(self, base: Roster, rank: int, question: Question, where: str) -> None:
        # Deleted first: who asks after this gets a new ticket and a new answer.
        base.delete([_question_key(rank)])
        # The next answer overwrites this one, perhaps before it was read. So an answer also lists earlier
        # tickets.
        self._heard = [*self._heard, question.ticket][-KEPT:]
        base.put(_answer_key(rank), msgspec.to_builtins(Answer(self._heard, where[:LONGEST])))


def where_seen(seen: Seen) -> str:
    """Say where a process of this machine is, without its help; "" if that can't be seen."""
    if seen.vitals is None or not seen.state:
        return ""
    return seen.held() or where_dumped(seen.vitals.who.stack())


_here: WeakValueDictionary[tuple[str, int], threading.Thread] = WeakValueDictionary()
"""By job and rank, of the ranks that are threads of this process: the thread that made the call."""


def note_caller(roster: Roster) -> threading.Thread:
    """Note the thread of the program that makes the calls of this rank, and return it."""
    caller = threading.current_thread()
    if caller.name.startswith("holdfast-"):  # a thread of ours, not of the program
        caller = threading.main_thread()
    if isinstance(roster, MemoryRoster) and roster.world_size > 1:
        _here.setdefault((roster.job(), roster.rank), caller)
    return caller


# -- the rank that asks ---------------------------------------------------------------------------


class Inquiry:
    """The questions of one call of this rank to ranks that it waits for."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._tickets: dict[int, str] = {}
        self._near: dict[int, str] = {}
        """Answers of ranks that are threads of this process."""
        self._until = 0.0

    def ask(self, ranks: Iterable[int], seen: dict[int, Seen]) -> None:
        """Ask those that were not asked yet, without waiting for the answers."""
        roster = self._roster
        for rank in ranks:
            if rank in self._tickets or rank in self._near:
                continue
            with suppress(HoldfastError):  # the call itself meets the same error, and raises it
                near = _here.get((roster.job(), rank)) if isinstance(roster, MemoryRoster) else None
                if near is not None and near.is_alive():
                    self._near[rank] = where_thread_is(near)
                    continue
                mine = Question(secrets.token_hex(6))
                # If another rank has asked already, share its ticket: one answer serves both.
                standing = roster.base().claim(_question_key(rank), msgspec.to_builtins(mine))
                self._tickets[rank] = (read(standing, Question) or mine).ticket
                self._until = time.monotonic() + PATIENCE
                vitals = seen[rank].vitals if rank in seen else None
                if vitals is not None and vitals.who.port:
                    knock(vitals.who.address, vitals.who.port)

    def answers(self, ranks: Sequence[int], seen: dict[int, Seen], patience: float) -> dict[int, str]:
        """Return where ranks are. Waits for answers, at most `patience` seconds and until `PATIENCE` after
        the last question; then looks at those of this machine."""
        where = {rank: self._near[rank] for rank in ranks if rank in self._near}
        waiting = [rank for rank in ranks if rank in self._tickets]
        ends = min(self._until, time.monotonic() + patience)
        while waiting:
            with suppress(HoldfastError):
                messages = get_ours(self._roster.base(), [_answer_key(rank) for rank in waiting])
                for rank, message in zip(waiting, messages, strict=True):
                    answer = read(message, Answer)
                    if answer is not None and self._tickets[rank] in answer.tickets:
                        where[rank] = answer.at[:LONGEST]
            waiting = [rank for rank in waiting if rank not in where]
            if time.monotonic() >= ends:
                break
            time.sleep(0.02)
        return where | {rank: where_seen(seen[rank]) for rank in waiting if rank in seen}

    def again(self) -> None:
        """Forget what was asked, so that the next question gets a new answer."""
        self._tickets.clear()
        self._near.clear()
