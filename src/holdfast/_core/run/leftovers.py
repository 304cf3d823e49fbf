"""Which attempts of saves into a run folder are known to have ended without a commit, where times of files
tell nothing."""

from __future__ import annotations

from collections.abc import Callable

from holdfast._core.run.owner import BEAT, is_gone
from holdfast._core.run.owner_file import read_owner
from holdfast._core.store.base import Store

SETTLED = 60
"""Renewals of the owner file (10 minutes) after which what an owner before had under way counts as void: no
request for its index is made for longer than 5 minutes (`store.object_client`)."""
_UNKNOWN = (
    "no owner of this run has noted that the save which wrote it has ended: it may have been made without "
    "Checkpoints, and still be under way"
)


class Leftovers:
    """What the owner file says of the attempts of saves."""

    def __init__(self, store: Store) -> None:
        owner, _ = read_owner(store)
        self._void: set[str] = set()
        self._others: dict[str, str] = {}
        if owner is None:
            return
        self._void.update(owner.void)
        under_way, doubtful = owner.under_way, owner.doubtful
        if is_gone(owner):  # then nobody commits it any more
            self._void.update(under_way)
        elif owner.ended:
            why = "whether it was committed could not be told, and the process that knows more may be alive"
            self._others.update(dict.fromkeys(under_way, why))
        else:
            self._others.update(dict.fromkeys(under_way, f"a save of {owner} may be under way"))
        if owner.beat >= SETTLED:
            self._void.update(doubtful)
        else:
            minutes = SETTLED * BEAT / 60
            why = (
                "the job that had the run before may still commit it; that is ruled out once another job has "
                f"had the run for {minutes:.0f} minutes"
            )
            self._others.update(dict.fromkeys(doubtful, why))

    def why_kept(self, attempt: str) -> str:
        """Return why what an attempt has left must stay; "" if it may be deleted."""
        if attempt in self._others:
            return self._others[attempt]
        return "" if attempt in self._void else _UNKNOWN


def why_kept(run: Store) -> Callable[[str], str]:
    """Return `Leftovers.why_kept` of a run folder, whose owner file is read now."""
    return Leftovers(run).why_kept
