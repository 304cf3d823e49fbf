"""Where the code of a rank is: a thread of that rank answers, ranks that are about to give it up ask.

A rank that others wait for may be in user code, in a collective, or at the end of its program, so its main
thread can't answer. One thread of its process waits in the message store for a question, with a client of its
own, and sends no requests meanwhile. It also wakes while the main thread is in C code that has released the
GIL. A process that is stopped, has ended, or holds the GIL does not answer; the error is then raised without.

The first rank that asks claims `where/<rank>/ask`; all others who ask before the answer is there share its
question. The answer, `where/<rank>`, lists the questions that it answers. Ranks that are threads of one
process (tests) are looked at without a message.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec

from holdfast.errors import HoldfastError
from holdfast.exits import Failure, Stage, at_exit, has_ended, is_over
from holdfast.roster.base import Roster, Wakeable
from holdfast.roster.memory import MemoryRoster
from holdfast.stacks import where_thread_is, where_threads_are
from holdfast.threads import start_thread
from holdfast.values import Message

T = TypeVar("T", bound=msgspec.Struct)

ASK_BEFORE = 0.75
"""A rank is asked this many seconds before it is given up."""
PATIENCE = 0.5
"""Seconds to wait for an answer, at most."""
LONGEST = 4096
"""Characters of an answer, at most."""
KEPT = 64
"""Questions that an answer lists, at most."""
FAREWELL = 1.0
"""Seconds to tell the threads of all ranks that the message store is about to end."""


class Question(msgspec.Struct, frozen=True):
    """From a rank that waits to the rank that it waits for."""

    ticket: str = ""
    """Identifies this question."""
    call: str = ""
    """The key of the call in which the rank is waited for."""
    by: int = -1
    """The rank that asks."""
    ends: bool = False
    """Not a question: the message store ends, and the thread is to end, too."""


class Answer(msgspec.Struct, frozen=True):
    """From a rank to all who have asked."""

    tickets: list[str]
    """The last questions that the rank has read, the latest last; this answers all of them."""
    at: str
    """Its stacks."""


def _question_key(rank: int) -> str:
    return f"where/{rank}/ask"


def _answer_key(rank: int) -> str:
    return f"where/{rank}"


# -- the rank that answers ------------------------------------------------------------------------


class _Teller:
    """The thread of this process that answers for a rank."""

    def __init__(self, base: Wakeable, caller: threading.Thread) -> None:
        self.pid, self.base, self.caller = os.getpid(), base, caller
        self.thread = start_thread(self._run, "holdfast-where", base.rank)
        base.on_end(self.end)

    def _run(self) -> None:
        with suppress(HoldfastError):  # the message store has ended, or belongs to another job
            self._serve(self.base.base("where"))
        with _lock:
            if _tellers.get(self.base) is self:
                del _tellers[self.base]

    def _serve(self, client: Wakeable) -> None:
        rank = client.rank
        key, heard = _question_key(rank), list[str]()
        _here[client.job(), rank] = self.caller
        if _is_end(client.get([key])[0]):
            client.delete([key])  # it was meant for an earlier thread
        # This first answer shows that a thread listens here: `_say_end` tells only ranks that have one.
        client.put(_answer_key(rank), msgspec.to_builtins(Answer(heard, "")))
        while True:
            client.wait_long(key)
            message = client.get([key])[0]
            # Deleted before the stack is taken: who asks after this gets a new ticket and a new answer.
            client.delete([key])
            if _is_end(message):
                client.delete([_answer_key(rank)])
                return
            if message is None:
                continue
            if client.get([key])[0] == message:
                return  # a store that can't delete would wake this thread for ever
            question = _read(message, Question)
            if question is not None:
                # The next answer overwrites this one, perhaps before it was read. So an answer also lists
                # earlier tickets.
                heard = [*heard, question.ticket][-KEPT:]
                stacks = "; ".join(filter(None, (has_ended(), where_threads_are(self.caller))))
                client.put(_answer_key(rank), msgspec.to_builtins(Answer(heard, stacks[:LONGEST])))

    def end(self) -> None:
        """End the thread, because this process closes the message store, or ends.

        A thread that returns from the store's client while the interpreter finalises would abort the process.
        The lowest rank mostly hosts the store: it ends the threads of all ranks, or each of them would write
        to its terminal that its connection is lost.
        """
        if self.pid != os.getpid() or not self.thread.is_alive():
            return
        ends = time.monotonic() + FAREWELL

        def say() -> None:
            with suppress(HoldfastError):
                self._say_end(ends)

        try:
            # On a thread, because the store may not answer and the process must be able to end.
            start_thread(say, "holdfast-where-end").join(FAREWELL)
        except HoldfastError:  # no more threads
            say()
        self.thread.join(max(0.0, ends - time.monotonic()))

    def _say_end(self, ends: float) -> None:
        rank, base = self.base.rank, self.base
        listening = [rank] if rank else list(range(base.world_size))
        listening = _there(base, listening)
        for other in listening:
            base.put(_question_key(other), msgspec.to_builtins(Question(ends=True)))
        while listening and time.monotonic() < ends:  # the store must answer their requests before it ends
            time.sleep(0.01)
            listening = _there(base, listening)


def _there(base: Wakeable, ranks: list[int]) -> list[int]:
    """Return those of the ranks whose threads are listening."""
    messages = base.get([_answer_key(rank) for rank in ranks])
    return [rank for rank, message in zip(ranks, messages, strict=True) if message is not None]


_tellers: dict[Wakeable, _Teller] = {}
_here: WeakValueDictionary[tuple[str, int], threading.Thread] = WeakValueDictionary()
"""By job and rank, of the ranks of this process: the thread that made the call."""
_lock = threading.Lock()


def tell_where(roster: Roster) -> None:
    """Let other ranks ask from now on where this one is, also between calls. Never raises; sends no request.

    A forked process does not answer for the rank: its connections are its parent's.
    """
    caller = threading.current_thread()
    if caller.name.startswith("holdfast-"):  # a thread of ours, not of the program
        caller = threading.main_thread()
    if roster.world_size == 1:
        return
    if isinstance(roster, MemoryRoster):
        _here.setdefault((roster.job(), roster.rank), caller)
    elif isinstance(roster, Wakeable) and not is_over():
        with _lock, suppress(HoldfastError):  # no thread can be started: this rank will not answer
            base = roster.base()
            known = _tellers.get(base)
            if known is None or (known.pid == os.getpid() and not known.thread.is_alive()):
                _tellers[base] = _Teller(base, caller)
                at_exit(Stage.THREADS, _end_all)


def end_tellers(roster: Roster) -> None:
    """End this rank's thread before it closes the store: see `_Teller.end`."""
    if isinstance(roster, Wakeable) and (known := _tellers.get(roster.base())) is not None:
        known.end()


def _end_all() -> Failure | None:
    for teller in list(_tellers.values()):
        teller.end()
    return None


# -- the rank that asks ---------------------------------------------------------------------------


class Inquiry:
    """The questions of one call of this rank to ranks that it waits for."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._tickets: dict[int, str] = {}
        self._near: dict[int, str] = {}
        """Answers of ranks that are threads of this process."""
        self._until = 0.0

    def ask(self, ranks: Iterable[int], call: str) -> None:
        """Ask those that were not asked yet, without waiting for the answers."""
        roster = self._roster
        for rank in ranks:
            if rank in self._tickets or rank in self._near:
                continue
            with suppress(HoldfastError):  # the call itself meets the same error, and raises it
                near = _here.get((roster.job(), rank))
                if near is not None and near.is_alive():
                    self._near[rank] = where_thread_is(near)
                elif isinstance(roster, Wakeable):
                    mine = Question(secrets.token_hex(6), call, roster.rank)
                    # If another rank has asked already, share its ticket: one answer serves both.
                    standing = roster.base().claim(_question_key(rank), msgspec.to_builtins(mine))
                    self._tickets[rank] = (_read(standing, Question) or mine).ticket
                    self._until = time.monotonic() + PATIENCE

    def answers(self, ranks: Sequence[int], patience: float) -> dict[int, str]:
        """Return the locations of ranks that have answered. Waits for the rest, at most `patience` seconds
        and until `PATIENCE` after the last question."""
        locations = {rank: self._near[rank] for rank in ranks if rank in self._near}
        waiting = [rank for rank in ranks if rank in self._tickets]
        ends = min(self._until, time.monotonic() + patience)
        while waiting and isinstance(self._roster, Wakeable):
            with suppress(HoldfastError):
                messages = self._roster.base().get([_answer_key(rank) for rank in waiting])
                for rank, message in zip(waiting, messages, strict=True):
                    answer = _read(message, Answer)
                    if answer is not None and self._tickets[rank] in answer.tickets:
                        locations[rank] = answer.at[:LONGEST]
            waiting = [rank for rank in waiting if rank not in locations]
            if time.monotonic() >= ends:
                break
            time.sleep(0.02)
        return locations


def _is_end(message: Message | None) -> bool:
    question = _read(message, Question)
    return question is not None and question.ends


def _read(message: Message | None, kind: type[T]) -> T | None:
    """Convert a message to its type; None if it does not fit."""
    with suppress(msgspec.ValidationError):
        return None if message is None else msgspec.convert(message, kind)
    return None
