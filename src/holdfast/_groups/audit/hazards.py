"""Rules that find hazards in a process's groups and environment, each with a remedy. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from holdfast._groups.lifecycle.plan import shown


class GroupFacts(msgspec.Struct, frozen=True):
    """One process group as this rank sees it."""

    name: str
    """torch's name of the group."""
    description: str
    ranks: tuple[int, ...]
    backend: str
    timeout: float | None
    """Seconds; None where torch does not expose it."""
    is_open: bool | None
    """Whether it has a communicator; None where that can't be known."""
    is_warm: bool
    """Whether Holdfast has warmed it up."""

    @property
    def named_by_digest(self) -> bool:
        """Whether its name is a digest, as `use_local_synchronization` makes it."""
        # torch names such a group by a SHA-1, which has 40 hex digits, and other groups by counting.
        return len(self.name) == 40 and not self.name.isdigit()


class ProcessFacts(msgspec.Struct, frozen=True):
    """Input of an audit: the process groups and environment of a process."""

    pid: int
    rank: int | None
    world_size: int | None
    torch: str
    is_eager: bool
    """Whether the default group is bound to a device (`init_process_group(device_id=...)`)."""
    groups: tuple[GroupFacts, ...]
    variables: dict[str, str]
    """The environment variables that begin with TORCH, NCCL or GLOO."""
    installed: tuple[str, ...] = ()
    """A sentence for each framework in which `holdfast.install` has replaced something."""


class Hazard(msgspec.Struct, frozen=True):
    """A known cause of hangs, and its remedy."""

    kind: str
    what: str
    remedy: str


NAMES = ("TORCH", "NCCL", "GLOO")
TORCH_TIMEOUTS = (600.0, 1800.0)
"""Seconds that NCCL and gloo groups get if none are given."""
_OFF = ("0", "false", "no", "off")
_SWITCHES = (
    (
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        "no flight recorder",
        "a hang leaves no trace.",
        " (2000 entries)",
    ),
    (
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
        "errors ignored",
        "a collective that fails or times out is not ended, and the process hangs.",
        " (3: end the process)",
    ),
    (
        ("TORCH_NCCL_ENABLE_MONITORING",),
        "no monitor",
        "nobody ends a process whose watchdog is stuck.",
        "",
    ),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "no dump", "a timeout writes no flight record.", ""),
)
"""Environment variables that disable something, the resulting hazard, and the default."""


def hazards(facts: ProcessFacts) -> list[Hazard]:
    """List all hazards of one process, the worst first."""
    checks = (_never_warmed_up, _named_by_digest, _other_timeouts, _groups_of_one, _leaked)
    return [*(hazard for check in checks for hazard in check(facts)), *of_variables(facts.variables)]


def _shared(facts: ProcessFacts) -> list[GroupFacts]:
    """Return the groups of more than one rank."""
    return [group for group in facts.groups if len(group.ranks) > 1]


def _never_warmed_up(facts: ProcessFacts) -> Iterator[Hazard]:
    shared = _shared(facts)
    # NCCL groups open at their first collective, and only they report whether they are open (`is_open`).
    cold = [group for group in shared if not group.is_warm and not group.is_open and "nccl" in group.backend]
    if cold:
        yield Hazard(
            "never warmed up",
            f"{len(cold)} of {len(shared)} groups have no communicator yet: {_listed(cold)}. The first "
            f"collective of each makes one, takes memory, and waits for all its ranks without a bound.",
            "Call holdfast.warm_up() right after the groups are made, while memory is free.",
        )


def _named_by_digest(facts: ProcessFacts) -> Iterator[Hazard]:
    digests = [group for group in facts.groups if group.named_by_digest]
    if digests and facts.is_eager:
        yield Hazard(
            "eager and local",
            f"The default group is bound to a device, and {len(digests)} groups were made with "
            f"use_local_synchronization: making a group is a collective of the whole world then, which only "
            f"its members enter.",
            "Leave out device_id= in init_process_group, or use_local_synchronization in new_group.",
        )
    elif digests:
        yield Hazard(
            "named by history",
            f"{len(digests)} groups were made with use_local_synchronization: {_listed(digests)}. Their "
            f"names depend on how many groups this rank has; ranks with other numbers never meet.",
            "Make groups with holdfast.open_groups, or without use_local_synchronization.",
        )


def _other_timeouts(facts: ProcessFacts) -> Iterator[Hazard]:
    # The default group comes first (`torch_private.known_groups`).
    given = facts.groups[0].timeout if facts.groups else None
    later = _shared(facts)[1:]
    other = [group for group in later if group.timeout in TORCH_TIMEOUTS and group.timeout != given]
    if other and given is not None:
        yield Hazard(
            "no timeout given",
            f"{len(other)} groups have torch's own timeout, {other[0].timeout:g} s, and the default group "
            f"{given:g} s: {_listed(other)}. Without timeout= a new group does not get the default group's.",
            "Give new_group (in Megatron: --distributed-timeout-minutes) the timeout that you mean.",
        )


def _groups_of_one(facts: ProcessFacts) -> Iterator[Hazard]:
    alone = [group for group in facts.groups if len(group.ranks) == 1 and (facts.world_size or 1) > 1]
    if alone:
        opened = sum(bool(group.is_open) for group in alone)
        yield Hazard(
            "groups of one",
            f"{len(alone)} groups have this rank alone ({opened} with a communicator): {_listed(alone)}. A "
            f"communicator of one takes as much GPU memory as any other.",
            "Don't make them, or issue no collective in them; holdfast.open_groups leaves them out.",
        )


def _leaked(facts: ProcessFacts) -> Iterator[Hazard]:
    numbers = Counter((group.description, group.ranks) for group in _shared(facts))
    # Groups may have the same ranks on purpose. Only the same description as well shows a leak.
    named = [key for key, count in numbers.items() if count > 1 and key[0]]
    if named:
        yield Hazard(
            "leaked",
            f"{len(named)} groups are there more than once, with the same description and ranks, as "
            f"{named[0][0]} ({shown(named[0][1])}). Megatron's destroy_model_parallel forgets groups and "
            f"destroys only gloo's.",
            "Destroy groups (torch.distributed.destroy_process_group(group)) before they are made again.",
        )


def of_variables(variables: Mapping[str, str]) -> list[Hazard]:
    """List the hazards that the environment variables alone show."""
    findings = []
    for names, kind, what, default in _SWITCHES:
        off = [name for name in names if variables.get(name, "").strip().lower() in _OFF]
        if off:
            findings.append(Hazard(kind, f"{off[0]} is 0: {what}", f"Leave {off[0]} out{default}."))
    if variables.get("NCCL_DEBUG", "").upper() == "TRACE":
        what = "NCCL_DEBUG is TRACE: every call is logged, and ranks fall behind."
        findings.append(Hazard("slow log", what, "Use WARN or INFO."))
    return findings


def _listed(groups: Sequence[GroupFacts], most: int = 4) -> str:
    names = ", ".join(
        f"{group.description or group.name} ({shown(group.ranks, 4)})" for group in groups[:most]
    )
    return names + (f" and {len(groups) - most} more" if len(groups) > most else "")
