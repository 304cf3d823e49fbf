"""Who takes part in a call, over which roster, and under which name they meet."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from holdfast.errors import BadInput
from holdfast.format.digest import digest, hex_digest
from holdfast.options import read_environment
from holdfast.roster.base import Roster
from holdfast.roster.memory import MemoryRoster

_torch_rosters: dict[int, tuple[Any, Roster]] = {}


def find_roster(roster: Roster | None, no_dist: bool) -> Roster:
    """The roster given, or torch.distributed's, or a world of one."""
    if roster is not None:
        return roster
    if not no_dist and _torch_is_up():
        from holdfast.roster.torch_store import TorchRoster
        from holdfast.torch_private import default_store

        store = default_store()
        known = _torch_rosters.get(id(store))
        if known is None or known[0] is not store:
            _torch_rosters.clear()  # the process group was started anew
            known = _torch_rosters[id(store)] = (store, TorchRoster(store))
        return known[1]
    if not no_dist and read_environment().world_size > 1:
        raise BadInput(
            f"WORLD_SIZE is {read_environment().world_size}, but torch.distributed is not initialised, so ranks can't find "
            "each other.",
            hint="Call torch.distributed.init_process_group first, or pass no_dist=True if this process saves alone.",
        )
    return MemoryRoster()


def _torch_is_up() -> bool:
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized())


def find_participants(
    roster: Roster, participants: Iterable[int] | None, process_group: Any
) -> tuple[int, ...]:
    """The ranks that take part, ascending; this rank must be one of them."""
    if participants is not None and process_group is not None:
        raise BadInput("Give participants= or process_group=, not both.")
    if process_group is not None:
        from torch.distributed import get_process_group_ranks

        participants = get_process_group_ranks(process_group)
    if participants is None:
        return tuple(range(roster.world_size))
    ranks = tuple(sorted(participants))
    if not ranks or len(set(ranks)) != len(ranks) or ranks[0] < 0 or ranks[-1] >= roster.world_size:
        raise BadInput(f"participants={ranks} must be different ranks of a world of {roster.world_size}.")
    if roster.rank not in ranks:
        listed = ", ".join(map(str, ranks[:16])) + ("…" if len(ranks) > 16 else "")
        raise BadInput(
            f"Rank {roster.rank} called, but the participants are {listed}; nothing was done on this rank and the others are not affected.",
            rank=roster.rank,
            hint="Call only on participants, or add this rank to participants= on every rank.",
        )
    return ranks


_attempts: WeakKeyDictionary[Roster, dict[str, int]] = WeakKeyDictionary()
_rounds: WeakKeyDictionary[Roster, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def rounds(roster: Roster) -> Counter[tuple[int, ...]]:
    """How many calls these participants have brought to a good end together, by participants: a clock
    that all of them share, as none succeeds unless all took part."""
    return _rounds.setdefault(roster, Counter())


def meeting_key(
    kind: str, place: str, signature: object, participants: tuple[int, ...], roster: Roster
) -> tuple[str, str]:
    """The key under which the ranks of one call meet, and a name of this attempt that no other has.

    Made of what they call (`signature`: step, patterns) and a count of such calls. A rank that comes
    to an abandoned attempt is late, and gets its error, unless all ranks have done something together
    since (`rounds`) or the others are in the next attempt: then it had missed that call, and joins.
    """
    name = secrets.token_hex(6)
    local = "://" not in place and not place.startswith("memory:")
    text = f"{kind}|{os.path.abspath(place) if local else place}|{signature}|{participants}"
    base = f"{kind}/{hex_digest(digest(text.encode()))}"
    if len(participants) == 1:
        return f"{base}/solo-{name}", name
    counters = _attempts.setdefault(roster, {})
    number, round_now = counters.get(base, 0), rounds(roster)[participants]
    while True:
        over, later = roster.get([f"{base}/{number}/outcome", f"{base}/{number + 1}/open"])
        # What was agreed had this rank in it; what was abandoned may have been waiting for this very call.
        if over is None:
            break
        if later is None and over["state"] != "agreed" and over["round"] >= round_now:
            break
        number += 1
    counters[base] = number + 1
    opened = roster.claim(f"{base}/{number}/open", {"rank": roster.rank, "attempt": name})
    return f"{base}/{number}", str(opened["attempt"])


def the_place(path: str | os.PathLike[str] | None, checkpoint_id: str | os.PathLike[str] | None) -> str:
    """The one folder that a call names."""
    if (path is None) == (checkpoint_id is None):
        raise BadInput("Give the folder once: as path, or as checkpoint_id=.")
    return os.fspath(path if path is not None else checkpoint_id)  # type: ignore[arg-type]
