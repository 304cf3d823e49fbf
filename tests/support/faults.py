"""What goes wrong in a simulated schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace


@dataclass
class Faults:
    """What goes wrong in one schedule; drawn from its seed."""

    absent: set[int] = field(default_factory=set)
    late: dict[int, float] = field(default_factory=dict)
    killed: dict[int, float] = field(default_factory=dict)
    stopped: dict[int, tuple[float, float]] = field(default_factory=dict)
    slow_write: dict[int, float] = field(default_factory=dict)
    """Seconds that writing takes on a rank, while bytes move."""
    stuck: dict[int, str] = field(default_factory=dict)
    """A rank whose action of that name never comes back."""
    write_fails: set[int] = field(default_factory=set)
    bad_coverage: bool = False
    publish: str = "ok"
    """`ok`, `refused`, `conflict`, or `unsynced`: visible, but storage could not confirm it."""
    store_lost: float | None = None
    client_lost: dict[int, float] = field(default_factory=dict)
    """A rank whose own connection to the message store breaks."""
    lag: float = 0.0
    """Seconds until a rank that looks sees an index that another made."""
    moved: bool = False
    """Whether the first rank that returns from a save moves the checkpoint."""
    fails_at: dict[tuple[int, int], str] = field(default_factory=dict)
    """Rank and call: in which action that call fails there."""
    late_call: dict[tuple[int, int], float] = field(default_factory=dict)
    """Rank and call: seconds that the rank takes until it makes the call."""
    host_gone: set[int] = field(default_factory=set)
    """Of `killed`: ranks that go with their hosts, so that nothing there answers any more."""
    refused: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Since when, and for how long, a firewall refuses all ports of a rank's host but the store's."""
    cut: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """The same of what one rank sends another, which is dropped."""
    away: dict[int, tuple[float, float]] = field(default_factory=dict)
    """The same of a host that is cut off from all others, and from the message store."""

    def silence_ends(self) -> float:
        """Return when the last fault that keeps a rank from being heard is over."""
        network = (*self.refused.values(), *self.cut.values(), *self.away.values())
        every = (*network, *self.stopped.values()) if network else ()
        return max((start + length for start, length in every), default=0.0)

    def only_failures(self) -> bool:
        """Is nothing wrong but that some calls fail on some ranks, and ranks are a moment late?"""
        return replace(self, fails_at={}, late_call={}, late={}, moved=False) == Faults() and not any(
            seconds > 1.0 for seconds in (*self.late.values(), *self.late_call.values())
        )

    def harmless_within(self, seconds: float, lost_after: float = 120.0) -> bool:
        """Is every rank only late, slow, stopped or cut off, for less than so many seconds in all, and heard or
        reached by somebody before `lost_after` seconds are over?"""
        same = {"late": {}, "stopped": {}, "slow_write": {}, "lag": 0.0, "late_call": {}, "moved": False}
        slow = replace(self, **same, refused={}, cut={}, away={}) == Faults()  # type: ignore[arg-type]
        pauses = [*self.late.values(), *self.late_call.values(), *self.slow_write.values()]
        pauses += [length for _, length in (*self.stopped.values(), *self.away.values())]
        silent = sum(length for _, length in (*self.stopped.values(), *self.away.values()))
        heard = silent < lost_after - 3.0 or not (self.refused or self.cut or self.away)
        return slow and heard and self.lag <= 1.0 and sum(pauses) < seconds


def draw_faults(rng: random.Random, ranks: int, calls: int = 1) -> Faults:
    """Mostly one or two faults, sometimes none, sometimes many; of several calls, some fail on some ranks."""
    faults = Faults(moved=rng.random() < 0.2)
    if calls > 1:
        for _ in range(rng.choice([1, 2, 3, 5])):
            where = (rng.randrange(ranks), rng.randrange(calls))
            if rng.random() < 0.7:
                faults.fails_at[where] = rng.choice(["row_digest", "row_digest", "write"])
            else:
                faults.late_call[where] = rng.choice([0.1, 0.5, 0.9, 3.0, 12.0, 40.0])
        if rng.random() < 0.6:
            return faults
    for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3, 5])):
        rank = rng.choice([0, rng.randrange(ranks)])
        kind = rng.randrange(13)
        when = rng.uniform(0.0, 8.0)
        if kind == 0:
            faults.absent.add(rank)
        elif kind == 1:
            faults.late[rank] = rng.choice([0.5, 3.0, 12.0])
        elif kind in (2, 3):
            faults.killed[rank] = when
        elif kind == 4:
            faults.stopped[rank] = (when, rng.choice([1.0, 4.0, 30.0]))
        elif kind == 5:
            faults.stuck[rank] = rng.choice(["write", "prepare", "publish", "row_digest"])
        elif kind == 6:
            faults.write_fails.add(rank)
        elif kind == 7:
            faults.bad_coverage = True
        elif kind == 8:
            faults.publish = rng.choice(["refused", "conflict", "unsynced"])
        elif kind == 9:
            faults.store_lost = when
        elif kind == 10:
            faults.client_lost[rank] = when
        elif kind == 11:
            faults.slow_write[rank] = rng.choice([5.0, 15.0, 40.0])
        else:
            faults.lag = rng.choice([0.05, 1.0, 10.0])
    return faults


def draw_network(rng: random.Random, ranks: int, faults: Faults, longest: float) -> None:
    """Add what goes wrong between hosts to other faults, which are often none. longest: seconds for which a host
    is away, at most."""
    for rank in faults.killed:
        if rng.random() < 0.5:
            faults.host_gone.add(rank)
    for _ in range(rng.choice([0, 1, 1, 2])):
        rank, other = rng.sample(range(ranks), 2)
        span = rng.uniform(0.0, 12.0), rng.choice([2.0, 15.0, 60.0])
        kind = rng.randrange(3)
        if kind == 0:
            faults.refused[rank] = span
        elif kind == 1:
            faults.cut[rank, other] = span
        elif span[1] < longest:
            faults.away[rank] = span
