"""Where a rank's code is: told by a thread of that rank, asked by those who are about to give it up.

A rank that others wait for may be in user code, in a collective, or at the end of its program, so nothing
that it does on its own can tell. One thread of its process waits in the message store for a question, on a
client of its own, and asks nobody meanwhile. It wakes also while the main thread is in C code that has
released the GIL. Who is stopped, has ended, or holds the GIL does not answer, and the error goes without.

`where/<rank>/ask` is claimed by the first that asks; all others who ask until the answer is there share it.
The answer, `where/<rank>`, says which questions it answers. Ranks that are threads of one process (tests) are
looked at without a message.
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
"""Seconds before a rank is given up at which it is asked."""
PATIENCE = 0.5
"""Seconds that an answer takes, at most."""
LONGEST = 4096
"""Characters of an answer."""
KEPT = 64
"""Questions that an answer names."""
FAREWELL = 1.0
"""Seconds that it may take to tell the threads of all ranks that the message store is about to end."""


class Question(msgspec.Struct, frozen=True):
    """Who waits for a rank, to that rank."""

    ticket: str = ""
    """Of this question and no other."""
    call: str = ""
    """The key of the call in which it is waited for."""
    by: int = -1
    """A rank."""
    ends: bool = False
    """No question: the message store ends, and so is this thread to."""


class Answer(msgspec.Struct, frozen=True):
    """A rank, to all who have asked."""

    tickets: list[str]
    """The last questions that it has heard, the latest last; this answers all of them."""
    at: str


def _question_key(rank: int) -> str:
    return f"where/{rank}/ask"


def _answer_key(rank: int) -> str:
    return f"where/{rank}"


# -- who is asked ---------------------------------------------------------------------------------


class _Teller:
    """The thread of this process that answers for a rank."""

    def __init__(self, base: Wakeable, caller: threading.Thread) -> None:
        self.pid, self.base, self.caller = os.getpid(), base, caller
        self.thread = start_thread(self._run, "holdfast-where", base.rank)
        base.on_end(self.end)

    def _run(self) -> None:
        with suppress(HoldfastError):  # the message store has ended, or the job is another one's
            self._serve(self.base.base("where"))
        with _lock:
            if _tellers.get(self.base) is self:
                del _tellers[self.base]

    def _serve(self, client: Wakeable) -> None:
        rank = client.rank
        key, heard = _question_key(rank), list[str]()
        _here[client.job(), rank] = self.caller
        if _is_end(client.get([key])[0]):
            client.delete([key])  # it was said to an earlier one
        # This first answer shows that a thread listens here: `_say_end` tells only ranks that have one.
        client.put(_answer_key(rank), msgspec.to_builtins(Answer(heard, "")))
        while True:
            client.wait_long(key)
            message = client.get([key])[0]
            # Deleted before the stack is taken: who asks after this gets a new ticket and a fresh answer.
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
                # The next answer overwrites this one, perhaps before it was read. So an answer also names
                # earlier tickets.
                heard = [*heard, question.ticket][-KEPT:]
                stacks = "; ".join(filter(None, (has_ended(), where_threads_are(self.caller))))
                client.put(_answer_key(rank), msgspec.to_builtins(Answer(heard, stacks[:LONGEST])))

    def end(self) -> None:
        """End the thread: this process lets go of the message store, or ends. (A thread that comes back from
        the store's client while the interpreter is finalised aborts the process.) The lowest rank mostly
        hosts the store: it tells the threads of all ranks, or each would write to its terminal that its
        connection is lost."""
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
        while listening and time.monotonic() < ends:  # what they are asking must be answered first
            time.sleep(0.01)
            listening = _there(base, listening)


def _there(base: Wakeable, ranks: list[int]) -> list[int]:
    """Those of some ranks whose threads are there."""
    messages = base.get([_answer_key(rank) for rank in ranks])
    return [rank for rank, message in zip(ranks, messages, strict=True) if message is not None]


_tellers: dict[Wakeable, _Teller] = {}
_here: WeakValueDictionary[tuple[str, int], threading.Thread] = WeakValueDictionary()
"""By job and rank: the thread that called for it, of the ranks of this process."""
_lock = threading.Lock()


def tell_where(roster: Roster) -> None:
    """From now on other ranks can ask where this one is, also between calls. Never raises, asks nobody.

    A fork does not answer for the rank, and can't begin to: it has its parent's connections.
    """
    caller = threading.current_thread()
    if caller.name.startswith("holdfast-"):  # what goes on beside the program
        caller = threading.main_thread()
    if roster.world_size == 1:
        return
    if isinstance(roster, MemoryRoster):
        _here.setdefault((roster.job(), roster.rank), caller)
    elif isinstance(roster, Wakeable) and not is_over():
        with _lock, suppress(HoldfastError):  # no more threads: others do without
            base = roster.base()
            known = _tellers.get(base)
            if known is None or (known.pid == os.getpid() and not known.thread.is_alive()):
                _tellers[base] = _Teller(base, caller)
                at_exit(Stage.THREADS, _end_all)


def end_tellers(roster: Roster) -> None:
    """This rank has nothing more to say, and is about to let go of the store: see `_Teller.end`."""
    if isinstance(roster, Wakeable) and (known := _tellers.get(roster.base())) is not None:
        known.end()


def _end_all() -> Failure | None:
    for teller in list(_tellers.values()):
        teller.end()
    return None


# -- who asks -------------------------------------------------------------------------------------


class Inquiry:
    """What one call of this rank asks of ranks that it waits for."""

    def __init__(self, roster: Roster | None) -> None:
        """None: nobody is there who could be asked."""
        self._roster = roster
        self._tickets: dict[int, str] = {}
        self._near: dict[int, str] = {}
        """Answers of ranks that are threads of this process."""
        self._until = 0.0

    def ask(self, ranks: Iterable[int], call: str) -> None:
        """Ask those that were not asked yet, and wait for nothing but the message store."""
        roster = self._roster
        for rank in ranks:
            if roster is None or rank in self._tickets or rank in self._near:
                continue
            with suppress(HoldfastError):  # the call itself meets the same loss, and says so
                near = _here.get((roster.job(), rank))
                if near is not None and near.is_alive():
                    self._near[rank] = where_thread_is(near)
                elif isinstance(roster, Wakeable):
                    mine = Question(secrets.token_hex(6), call, roster.rank)
                    # If another rank's question stands already, share its ticket: one answer serves both.
                    standing = roster.base().claim(_question_key(rank), msgspec.to_builtins(mine))
                    self._tickets[rank] = (_read(standing, Question) or mine).ticket
                    self._until = time.monotonic() + PATIENCE

    def answers(self, ranks: Sequence[int], patience: float) -> dict[int, str]:
        """Where those are who were asked and have answered; waits for the rest, at most `patience` seconds
        and until `PATIENCE` after the last question."""
        locations = {rank: self._near[rank] for rank in ranks if rank in self._near}
        waiting = [rank for rank in ranks if rank in self._tickets]
        ends = min(self._until, time.monotonic() + patience)
        while waiting and self._roster is not None and isinstance(self._roster, Wakeable):
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
    """A message as what it should be; None if it is something else."""
    with suppress(msgspec.ValidationError):
        return None if message is None else msgspec.convert(message, kind)
    return None
