"""Requests for the stack of a rank: waiting ranks ask, and its heart answers, or a neighbour if it can't.

The first rank that asks claims `where/<rank>/ask`; all others who ask before the answer is there share its
question. The heart of the asked rank checks for it at every beat, and answers in `where/<rank>`, with the
tickets of the answered questions. While that process holds the GIL, its heart does not run: then a neighbour
on its machine answers for it, with what the kernel shows, and with the stack that faulthandler writes on a
signal. Ranks that are threads of one process (tests) are looked at without a message.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

import msgspec

from holdfast._core.base.stacks import where_dumped, where_thread_is, where_threads_are
from holdfast._core.roster.base import Roster, get_ours
from holdfast._core.roster.links import knock
from holdfast._core.roster.lost import Seen, see
from holdfast._core.roster.memory import MemoryRoster
from holdfast._core.roster.presence import read
from holdfast.errors import HoldfastError

ASK_BEFORE = 2.5
"""Seconds before a timeout at which a rank is asked for its stack."""
PATIENCE = 2.0
"""Maximum seconds to wait for an answer."""
GRACE = 1.5
"""Seconds within which a rank should answer itself; after that a neighbour does."""
LONGEST = 4096
"""Maximum characters of an answer."""
KEPT = 64
"""Maximum number of tickets in an answer."""


class Question(msgspec.Struct, frozen=True):
    """From a waiting rank to an awaited rank."""

    ticket: str = ""
    """Identifies this question."""


class StackAnswer(msgspec.Struct, frozen=True):
    """From a rank, or a neighbour on its behalf, to all ranks that asked."""

    tickets: list[str]
    """The tickets of the last questions, latest last; this answers all of them."""
    at: str
    """Its stack."""


def _question_key(rank: int) -> str:
    return f"where/{rank}/ask"


def _answer_key(rank: int) -> str:
    return f"where/{rank}"


# -- the rank that answers ------------------------------------------------------------------------


class StackAnswering:
    """Answers questions to this rank, and to neighbours that can't answer. A part of the beacon."""

    def __init__(self, rank: int) -> None:
        self.caller: threading.Thread | None = None
        """The thread of the program that makes the calls."""
        self._rank = rank
        self._heard: list[str] = []
        self._open: dict[int, tuple[str, float]] = {}
        """Unanswered question per neighbour, and since when."""

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
        base.put(_answer_key(rank), msgspec.to_builtins(StackAnswer(self._heard, where[:LONGEST])))


def where_seen(seen: Seen) -> str:
    """Describe what a process of this machine is doing, without its cooperation; "" if unknown."""
    if seen.vitals is None or not seen.state:
        return ""
    return seen.held() or where_dumped(seen.vitals.who.stack())


_here: WeakValueDictionary[tuple[str, int], threading.Thread] = WeakValueDictionary()
"""(job, rank) -> the calling thread, for ranks that are threads of this process."""


def note_caller(roster: Roster) -> threading.Thread:
    """Record and return the program's thread that makes the calls of this rank."""
    caller = threading.current_thread()
    if caller.name.startswith("holdfast-"):  # a thread of ours, not of the program
        caller = threading.main_thread()
    if isinstance(roster, MemoryRoster) and roster.world_size > 1:
        _here.setdefault((roster.job(), roster.rank), caller)
    return caller


# -- the rank that asks ---------------------------------------------------------------------------


class Inquiry:
    """The questions of one call to the ranks that it waits for."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._tickets: dict[int, str] = {}
        self._near: dict[int, str] = {}
        """Answers of ranks that are threads of this process."""
        self._until = 0.0

    def ask(self, ranks: Iterable[int], seen: dict[int, Seen]) -> None:
        """Ask ranks that were not asked yet, without waiting for the answers."""
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
        """Return the stacks of ranks. Waits for answers up to `patience` seconds, and until `PATIENCE`
        seconds after the last question at most; then inspects processes of this machine itself."""
        where = {rank: self._near[rank] for rank in ranks if rank in self._near}
        waiting = [rank for rank in ranks if rank in self._tickets]
        ends = min(self._until, time.monotonic() + patience)
        while waiting:
            with suppress(HoldfastError):
                messages = get_ours(self._roster.base(), [_answer_key(rank) for rank in waiting])
                for rank, message in zip(waiting, messages, strict=True):
                    answer = read(message, StackAnswer)
                    if answer is not None and self._tickets[rank] in answer.tickets:
                        where[rank] = answer.at[:LONGEST]
            waiting = [rank for rank in waiting if rank not in where]
            if time.monotonic() >= ends:
                break
            time.sleep(0.02)
        return where | {rank: where_seen(seen[rank]) for rank in waiting if rank in seen}

    def again(self) -> None:
        """Forget the questions, so that the next one gets a new answer."""
        self._tickets.clear()
        self._near.clear()
