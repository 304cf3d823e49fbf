"""The groups that each rank reports, and the check that all reports are consistent. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast._core.base.values import Message
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.layout.ranks import from_progressions, progressions
from holdfast._groups.lifecycle.plan import shown
from holdfast.errors import BadInput


def claim(name: str, ranks: Sequence[int], description: str, rank: int) -> list[object]:
    """Return a rank's report about a group: name, digest of its ranks, description, ranks, rank count.

    Only the lowest rank of the group reports the ranks, as progressions; the others report None.
    """
    # One rank lists the members and the others send a digest, so a group of 10,000 ranks is listed once.
    members = progressions(ranks) if rank == min(ranks) else None
    return [
        name,
        hex_digest(digest(np.array(ranks, np.int64).tobytes())),
        description,
        members,
        len(ranks),
    ]


def label(name: str, description: str, ranks: Sequence[int]) -> str:
    """Format a group for messages."""
    return f"group {description or name} ({shown(ranks)}; torch's name {name})"


def listed(ranks: Sequence[int]) -> str:
    """Format ranks for messages."""
    return shown(ranks) if len(ranks) != 1 else f"rank {ranks[0]}"


def agreed(claims: dict[int, Message]) -> dict[str, tuple[str, list[int]]]:
    """Return description and ranks of every group, by name.

    Raises BadInput unless every member of a group has claimed it, with the same ranks.
    """
    everyone: dict[str, tuple[str, list[int]]] = {}
    digests: dict[str, tuple[int, str]] = {}
    holders: dict[str, set[int]] = {}
    for rank, message in sorted(claims.items()):
        for name, known, description, members, _ in message["groups"]:
            # It is enough to compare every claim with the first one of that name.
            first, other = digests.setdefault(name, (rank, known))
            holders.setdefault(name, set()).add(rank)
            if other != known:
                raise _unequal(claims, name, first, rank)
            if members is not None:
                everyone[name] = (description, from_progressions(members))
    for name, here in holders.items():
        # These ranks have made the group, but did not give it to `warm_up`.
        unlisted = [rank for rank in sorted(claims) if rank not in here and name in claims[rank]["has"]]
        if unlisted:
            description, ranks = everyone.get(name, ("", []))
            members = f" ({shown(ranks)})" if ranks else ""
            raise BadInput(
                f"The group {description or name}{members} is to be warmed up on rank {min(here)} and not on "
                f"{listed(unlisted)}; nothing was warmed up.",
                rank=unlisted[0],
                hint="Give the same groups on all ranks that are in them.",
            )
        # Only the lowest rank sends the members, and it has not claimed this group.
        if name not in everyone:
            raise _lacking(name, min(here), "its lowest rank")
        absent = [rank for rank in everyone[name][1] if rank not in here]
        if absent:
            raise _lacking(name, min(here), listed(absent))
    return everyone


def _unequal(claims: dict[int, Message], name: str, first: int, rank: int) -> BadInput:
    sizes = {
        holder: next(entry[4] for entry in claims[holder]["groups"] if entry[0] == name)
        for holder in (first, rank)
    }
    return BadInput(
        f"The process group that torch names {name!r} has other ranks on rank {first} ({sizes[first]} of "
        f"them) than on rank {rank} ({sizes[rank]}); nothing was warmed up.",
        rank=rank,
        hint="Ranks must make the same groups in the same order, also those that they are not in; "
        "`holdfast.audit()` lists them.",
    )


def _lacking(name: str, holder: int, absent: str) -> BadInput:
    return BadInput(
        f"Rank {holder} has a process group that torch names {name!r}, and {absent} of it has none of that "
        "name; nothing was warmed up. Its first collective would wait for ever.",
        rank=holder,
        hint="Ranks made different numbers of groups before this one: names are counts, and with "
        "use_local_synchronization they depend on what each rank made. `holdfast.audit()` lists them.",
    )
