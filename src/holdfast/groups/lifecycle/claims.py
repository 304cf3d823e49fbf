"""What each rank says of the groups that it has, and whether that fits together. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.errors import BadInput
from holdfast.format.digest import digest, hex_digest
from holdfast.groups.lifecycle.plan import from_runs, runs, shown
from holdfast.values import Message


def claim(name: str, ranks: Sequence[int], description: str, rank: int) -> list[object]:
    """A group as a rank tells it: name, digest of its ranks, description, the ranks themselves (its lowest
    rank only), and their number."""
    # One rank lists the members, the others send a digest of them: a group of 10,000 ranks is listed once.
    told = runs(ranks) if rank == min(ranks) else None
    return [name, hex_digest(digest(np.array(ranks, np.int64).tobytes())), description, told, len(ranks)]


def label(name: str, description: str, ranks: Sequence[int]) -> str:
    """A group as messages name it."""
    return f"group {description or name} ({shown(ranks)}; torch's name {name})"


def listed(ranks: Sequence[int]) -> str:
    return shown(ranks) if len(ranks) != 1 else f"rank {ranks[0]}"


def agreed(said: dict[int, Message]) -> dict[str, tuple[str, list[int]]]:
    """Every group with its ranks, if all of these have it, and take it for the same."""
    everyone: dict[str, tuple[str, list[int]]] = {}
    digests: dict[str, tuple[int, str]] = {}
    holders: dict[str, set[int]] = {}
    for rank, message in sorted(said.items()):
        for name, known, description, found, _ in message["groups"]:
            # The first rank that told of a name stands for all, so each other one is compared once.
            first, other = digests.setdefault(name, (rank, known))
            holders.setdefault(name, set()).add(rank)
            if other != known:
                raise _unequal(said, name, first, rank)
            if found is not None:
                everyone[name] = (description, from_runs(found))
    for name, here in holders.items():
        # These ranks have made the group, but it is not among those given to `warm_up` there.
        unlisted = [rank for rank in sorted(said) if rank not in here and name in said[rank]["has"]]
        if unlisted:
            description, ranks = everyone.get(name, ("", []))
            members = f" ({shown(ranks)})" if ranks else ""
            raise BadInput(
                f"The group {description or name}{members} is to be warmed up on rank {min(here)} and not on "
                f"{listed(unlisted)}; nothing was warmed up.",
                rank=unlisted[0],
                hint="Give the same groups on all ranks that are in them.",
            )
        # Only the lowest rank sends the members, and it has not told of this group.
        if name not in everyone:
            raise _lacking(name, min(here), "its lowest rank")
        absent = [rank for rank in everyone[name][1] if rank not in here]
        if absent:
            raise _lacking(name, min(here), listed(absent))
    return everyone


def _unequal(said: dict[int, Message], name: str, first: int, rank: int) -> BadInput:
    sizes = {at: next(entry[4] for entry in said[at]["groups"] if entry[0] == name) for at in (first, rank)}
    return BadInput(
        f"The process group that torch names {name!r} has other ranks on rank {first} ({sizes[first]} of "
        f"them) than on rank "
        f"{rank} ({sizes[rank]}); nothing was warmed up.",
        rank=rank,
        hint="Ranks must make the same groups in the same order, also those that they are not in; "
        "`holdfast.audit()` lists them.",
    )


def _lacking(name: str, holder: int, absent: str) -> BadInput:
    return BadInput(
        f"Rank {holder} has a process group that torch names {name!r}, and {absent} of it has none of that "
        f"name; nothing was "
        "warmed up. Its first collective would wait for ever.",
        rank=holder,
        hint="Ranks made different numbers of groups before this one: names are counts, and with "
        "use_local_synchronization "
        "they depend on what each rank made. `holdfast.audit()` lists them.",
    )
