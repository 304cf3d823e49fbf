"""Who is lost: the only place that judges whether a rank or a process can still come.

Who waits for a rank, watches one, or explains a hang asks here and acts on the verdict: a `Seen` about a rank
or a process, or a `Gone` for all ranks. docs/decisions/0051-who-is-lost.md lists who asks.

Rule 1: Everything that decides it must live here in this file: which evidence counts, how long it has to
last, and the sentence of each verdict. Evidence is read elsewhere (`process`, `links`, `presence`), and acted
on elsewhere. A second judge fails in tests/roster/test_lost.py.

Rule 2: Only a kernel proves death: that of this host (no process with this pid and start time, or a zombie),
that of the other host (rule 6), or one that a neighbour has asked, and says so (`Gone`).

Rule 3: A rank that says how its program has ended has left, and no wait goes on for it. Its process may still
be there: in calls at the end of programs (`past_end`) only the end of the process counts.

Rule 4: Silence is not death. A process that is there may hold the GIL, be stopped, or wait for storage: it is
waited for until the deadline, and what holds it is only reported (`Seen.held`).

Rule 5: What can't be told is no verdict (`there` is None): a rank that has never spoken, a process on another
host. A /proc that can't be read shows no end.

Rule 6: What a path to another host shows counts only while the rank renews no message, and no other neighbour
renews that it hears the rank. If the kernel has closed the connection in order and the port refuses another,
the process has ended after `MISSED` messages. If the port refuses after a reset, as a firewall does, too, or
the host does not answer, the rank is lost after `lost_after`, and `MISSED` messages. A rank that can't read
the message store judges nobody on another host: it may be the one that is cut off.

Rule 7: The absence of the observer counts against nobody (`LONGEST_TURN`, `AWAY`).

Rule 8: A verdict ends with the next sign of life: a later message of the same process refutes `Gone`. Who
waits looks twice before it acts: what it waits for may have come just before the end.

Rule 9: The process that hosts the message store has ended if its port refuses and this kernel says so. On
another host, its kernel must have closed a connection of the store in order, or the store not have answered
for `lost_after`, with no open path to it. An end with exit code 0 is no failure.

Rule 10: To give up a live rank is a wish of the caller (`stall_timeout`), and no verdict: `Stalls` only
measures for how long nothing has changed.

Rule 11: An end is a success by exit code 0, or by the rank's own word (`LEFT`). An end of unknown exit code
(`ENDED`) is neither a success nor the cause of a hang.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from holdfast._core.base.deadline import REAL_CLOCK, Clock, check_seconds
from holdfast._core.base.values import Message
from holdfast._core.roster.base import Roster, get_ours
from holdfast._core.roster.links import Path
from holdfast._core.roster.presence import Vitals, at_key, gone_key, read
from holdfast._core.roster.process import ENDED, HELD, Identity
from holdfast.errors import RankInfo, RosterLost

MISSED = 3
"""Number of missing messages after which a rank counts as silent."""
LONGEST_TURN = 5.0
"""Seconds between two looks that count towards `lost_after` at most; in a large world, twice their pace."""
AWAY = 5.0
"""If two looks are this many seconds further apart than planned, this process itself did not run."""
DYING = 1.0
"""Maximum seconds between the loss of a process's connections and its end."""
PROGRAM_ENDED = "its program has ended"
DESTROYED = "it has destroyed its process group"
LEFT = (PROGRAM_ENDED, DESTROYED)
"""What a rank says that has left without an error."""
_SUCCESS = re.compile(r"exit(?:ed with)? code 0\b")


class Gone(msgspec.Struct, frozen=True):
    """`gone/<rank>`: the report of a rank that has observed the end of another rank's process."""

    token: str
    """`Identity.token` of the ended process: the rank may have a new process by now."""
    how: str
    clean: bool = False
    """Whether its exit code was 0, or it had announced its end."""
    beat: int = 0
    """Its last `Vitals.beat` at that time."""

    def is_of(self, vitals: Vitals) -> bool:
        """Return whether this report is about that process, which has sent no message since."""
        return self.token == vitals.who.token and vitals.beat <= self.beat


class Seen(NamedTuple):
    """The verdict about a rank, or a process."""

    vitals: Vitals | None = None
    """Its presence message; None if it has never sent one."""
    ended: str = ""
    """Why it can't arrive any more, by the kernel or its own announcement; "" if it may arrive."""
    gone: Gone | None = None
    """A neighbour's report of its end, if it has sent no message since."""
    there: bool | None = None
    """Whether its process is alive; None if this host can't tell."""
    state: str = ""
    """The state letter of its process in /proc; "" if not visible from this host."""
    exited_with_0: bool = False
    """Whether its process has ended with exit code 0, as far as a kernel still knew."""

    def is_in(self, key: str) -> bool:
        """Return whether its message lists an operation."""
        return self.vitals is not None and key in self.vitals.operations

    def is_lost(self, past_end: bool = False) -> bool:
        """Return whether it can't arrive any more. past_end: in a call at the end of programs (rule 3)."""
        return bool(self.ended) and not (past_end and self.there is not False)

    def told(self, gone: Gone) -> Seen:
        """Return the verdict after an end that this rank's own watch has found, and not published yet."""
        has_left = self.vitals is not None and bool(self.vitals.ended)
        return self._replace(ended=self.ended or gone.how, there=self.there if has_left else False)

    def held(self) -> str:
        """Return why its process can't run, such as `it is stopped by a signal (state T)`; "" if it can."""
        return f"it is {HELD[self.state]} (state {self.state})" if self.state in HELD else ""

    def is_success(self) -> bool:
        """Return whether it has ended without an error (rule 11)."""
        return self.exited_with_0 or self.ended in LEFT or _SUCCESS.search(self.ended) is not None

    def is_cause(self) -> bool:
        """Return whether its end can be the cause of a hang (rule 11)."""
        return bool(self.ended) and self.ended != ENDED and not self.is_success()


def by_kernel(who: Identity) -> Seen:
    """Judge a process by the kernel of this host (rules 2, 5)."""
    if not who.is_of_this_machine():
        return Seen()
    state = who.state()
    if state:
        return Seen(there=True, state=state)
    return Seen(ended=who.how_it_ended(), there=False, exited_with_0=who.exited_with_0())


def judge(at: Message | None, gone: Message | None) -> Seen:
    """Judge a rank by its messages, and its process, if it is on this machine."""
    vitals, witness = read(at, Vitals), read(gone, Gone)
    if vitals is None:
        return Seen()
    if witness is not None and witness.is_of(vitals):
        return Seen(vitals, vitals.ended or witness.how, witness, False, exited_with_0=witness.clean)
    seen = by_kernel(vitals.who)
    return seen._replace(vitals=vitals, ended=vitals.ended or seen.ended)


def see(roster: Roster, ranks: Sequence[int]) -> dict[int, Seen]:
    """Read the messages of ranks, and judge each of them."""
    messages = get_ours(roster.base(), [key for rank in ranks for key in (at_key(rank), gone_key(rank))])
    pairs = zip(messages[::2], messages[1::2], strict=True)
    return {rank: judge(*pair) for rank, pair in zip(ranks, pairs, strict=True)}


def ended_since(seen: Seen) -> str:
    """Return how a rank has ended, by a new check if it is on this machine; "" if it may be alive."""
    return seen.ended or (by_kernel(seen.vitals.who).ended if seen.vitals is not None else "")


def end_told(seen: Seen) -> Gone | None:
    """Return the end that the rank itself, or another neighbour, has told."""
    vitals = seen.vitals
    if vitals is not None and vitals.ended:
        return Gone(vitals.who.token, vitals.ended, clean=True, beat=vitals.beat)
    return seen.gone


class Signs:
    """The signs of life of a watched process, and for how long there were none (rules 6 and 7)."""

    def __init__(self, who: Identity, now: float) -> None:
        self.who = who
        self.silent = 0.0
        """Seconds for which nothing has answered, over a path that it has answered before, and the message
        store has not heard it."""
        self.beat = -1
        self.is_quiet = False
        """Whether it did not renew its message between the last two looks."""
        self.is_there = False
        """Whether its process was alive at the last look, by the kernel."""
        self._looked, self._limit, self._is_far = now, 0.0, False
        self._heard_by: dict[int, int] = {}
        """Other neighbours that said at the limit that they hear it, and their `Vitals.beat` then."""

    def look(
        self, path: Path | None, vitals: Vitals | None, lost_after: float, pace: float, now: float
    ) -> str:
        """Return how its process has ended, or "".

        path: what the connection to it shows; None without one. vitals: its present message, if the store has
            answered. pace: seconds between two of its messages.
        """
        if vitals is not None:
            self.is_quiet, self.beat = vitals.beat == self.beat, vitals.beat
        self._is_far = path is not None
        if path is None:
            seen = by_kernel(self.who)
            self.is_there = bool(seen.there)
            return seen.ended
        turn, self._looked = min(now - self._looked, max(LONGEST_TURN, 2 * pace)), now
        self.is_there = path is Path.OPEN
        if path in (Path.OPEN, Path.UNKNOWN) or (vitals is not None and not self.is_quiet):
            self.rest(now)
        elif vitals is not None:
            self.silent += turn
        self._limit = MISSED * pace if path is Path.ENDED else max(lost_after, MISSED * pace)
        if not self.silent or self.silent < self._limit:
            return ""
        if path is Path.ENDED:
            return ENDED
        if path is Path.REFUSED:
            return f"its port refuses connections, and nothing was heard of it for {self.silent:.0f} s"
        return f"its host has not answered for {self.silent:.0f} s"

    def rest(self, now: float) -> None:
        """Count its silence from now on."""
        self.silent, self._heard_by, self._looked = 0.0, {}, now

    def confirm(self, how: str, latest: Vitals | None, others: dict[int, Seen], pace: float) -> Gone | None:
        """Return its end for all ranks, or None if there is a sign of life after all.

        how: from `look`. latest: its message, read once more. others: its other neighbours.
        """
        if self._is_far and (latest is None or latest.beat != self.beat or self._is_heard(others, pace)):
            return None
        beat = self.beat if latest is None else latest.beat
        return Gone(self.who.token, how, by_kernel(self.who).exited_with_0, beat)

    def _is_heard(self, others: dict[int, Seen], pace: float) -> bool:
        """Return whether one of the others may hear its process now. What they say counts for as long as they
        renew it."""
        says = {
            rank: one.vitals.beat
            for rank, one in others.items()
            if one.vitals is not None and not one.ended and self.who.rank in one.vitals.hears
        }
        if any(beat > self._heard_by.get(rank, beat) for rank, beat in says.items()):
            self.silent, self._heard_by = 0.0, {}
            return True
        self._heard_by = says | self._heard_by
        return bool(says) and self.silent < self._limit + MISSED * pace


def cut_off(seen: dict[int, Seen], reported: Collection[int]) -> set[int]:
    """Return which of these ranks are on a host that does not answer, by reports of neighbours about ranks of
    that host."""
    hosts = {one.vitals.who.machine for rank, one in seen.items() if one.vitals and rank in reported} - {""}
    return {
        rank
        for rank, one in seen.items()
        if not one.ended and (rank in reported or (one.vitals and one.vitals.who.machine in hosts))
    }


def host_of_store(host: Vitals, error: RosterLost, silent: float, lost_after: float, is_heard: bool) -> Seen:
    """Judge the process that hosts the message store, after an error of the store (rule 9).

    silent: seconds since when the store has not answered. is_heard: whether a connection to that process is
        open.
    """
    seen = by_kernel(host.who)._replace(vitals=host)
    if seen.there is None and not is_heard and (error.details.get("ended") or silent >= lost_after):
        seen = seen._replace(ended=ENDED)
    # A firewall refuses, too, but closes no connection in order.
    return seen if error.details.get("refused") and not seen.exited_with_0 else seen._replace(ended="")


def store_silence(host: Vitals | None, error: RosterLost, silent: float) -> str:
    """Describe a message store that does not answer.

    host: the message of the rank whose process hosts the store; None if that is not known. error: the
    store's. silent: seconds since when it has not answered.
    """
    refuses = ", and refuses connections" if error.details.get("refused") else ""
    said = f"the message store has not answered for {silent:.0f} s{refuses}."
    if host is None:
        return said
    seen = by_kernel(host.who)
    state = seen.ended or seen.held()
    where = f"It is in the process of rank {host.who.rank} (pid {host.who.pid} on host {host.who.host})"
    return f"{said} {where}{f': {state}' if state else ''}."


class Stalls:
    """For how long nothing has changed at a rank, since it was first looked at (rules 7 and 10).

    limit: `stall_timeout`; None: no rank is ever given up.
    """

    def __init__(self, limit: float | None, clock: Clock = REAL_CLOCK) -> None:
        self._limit = None if limit is None else check_seconds("stall_timeout", limit)
        self._clock = clock
        self._marks: dict[int, tuple[object, float]] = {}
        """The mark of each rank, and since when."""

    def forgive(self, away: float) -> None:
        """Exclude the seconds by which a look came later than planned, if this process did not run."""
        if away > AWAY:
            self._marks = {rank: (mark, since + away) for rank, (mark, since) in self._marks.items()}

    def note(self, rank: int, mark: object) -> float | None:
        """Record a rank's mark, of which every change is progress. Return for how many seconds it has not
        changed, if these have reached the limit."""
        # Compared for inequality, because a rank counts bytes from 0 again in its next call.
        if rank not in self._marks or self._marks[rank][0] != mark:
            self._marks[rank] = mark, self._clock.now()
        return self._quiet_for(rank) if self.is_near(rank, 0.0) else None

    def is_near(self, rank: int, seconds: float) -> bool:
        """Return whether a rank reaches the limit within so many seconds, or within half of it."""
        limit = self._limit
        return limit is not None and self._quiet_for(rank) >= limit - min(seconds, limit / 2)

    def _quiet_for(self, rank: int) -> float:
        return self._clock.now() - self._marks[rank][1]


def describe(rank: int, seen: Seen, wall: float, note: str = "", key: str = "") -> RankInfo:
    """Describe a rank for an error at the time `wall` by its message about the operation `key`, or else about
    its last operation."""
    vitals = seen.vitals
    if vitals is None:
        return RankInfo(rank, note=note)
    # If the rank is not in `key`, quote the operation that it began last.
    doing = vitals.operations.get(key) or next(reversed(vitals.operations.values()), None)
    operation = doing or vitals.last
    phase = f"{operation.get('title', '')}: {operation.get('phase', '')}" if operation else "idle"
    return RankInfo(
        rank,
        vitals.who.host,
        vitals.who.pid,
        phase if doing or not operation else f"idle since {phase}",
        round(max(0.0, wall - vitals.wall), 2),
        "; ".join(part for part in (note, str((doing or {}).get("doing", ""))) if part),
    )
