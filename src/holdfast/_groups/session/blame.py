"""Describe the failure of the rank that fails first: which error, where, and, if a collective broke, which
ranks were not in that collective."""

from __future__ import annotations

import traceback
from contextlib import suppress

import torch.distributed as dist

from holdfast._core.base.stacks import calls_of_error
from holdfast._core.process.exits import ProgramFailed
from holdfast._core.roster.process import Identity
from holdfast._groups.ending.system_exit import ProgramExit, program_exit
from holdfast.errors import HoldfastError, RankFailed, RankInfo

AT_MOST = 64
"""Maximum number of ranks of a collective that are asked for their stacks."""
SHOWN = 8
"""Maximum number of ranks listed in a message."""


def in_words(error: BaseException | None, me: Identity, missing: tuple[RankInfo, ...]) -> HoldfastError:
    """Return this rank's failure as the error that all other ranks raise."""
    if isinstance(error, HoldfastError) and error.missing:
        return error
    return RankFailed(
        f"The session ended because rank {me.rank} (host {me.host}, pid {me.pid}) {_what(error)}"
        + (f"; {not_in_the_collective(missing)}." if missing else "."),
        rank=me.rank,
        hint="Its traceback is in that rank's output.",
        details={"not in the collective": [info.rank for info in missing]} if missing else None,
    )


def _what(error: BaseException | None) -> str:
    """Describe an exception and its location, as the end of a sentence."""
    if isinstance(error, SystemExit):
        exited = program_exit()  # has the call that exited, if this exception has ended the program already
        if exited is None or error.__traceback__ is not None:
            exited = ProgramExit(error.code, calls_of_error(error))
        return str(exited)
    if isinstance(error, ProgramFailed):
        return str(error)
    text = traceback.format_exception_only(error)[-1].strip() if error is not None else "nothing"
    where = calls_of_error(error)
    return f"{f'at {where} ' if where else ''}raised {text[:500]}"


def not_in_the_collective(missing: tuple[RankInfo, ...]) -> str:
    """Return the text about ranks that were not in the collective."""
    more = f"; and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    return f"not in that collective: {'; '.join(map(str, missing[:SHOWN]))}{more}"


def innermost_call(error: BaseException | None) -> str:
    """Return the innermost call of an exception's traceback; it is equal on all ranks in one collective."""
    return calls_of_error(error).rpartition(" > ")[2]


def ranks_of_collective(error: BaseException | None, world_size: int) -> list[int]:
    """Return the ranks of the group whose collective raised an exception, at most AT_MOST.

    These are the ranks of the world if no function of torch.distributed raised it.
    """
    group: dist.ProcessGroup | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__ if error is not None else None):
        # Functions of torch.distributed have their group in a parameter of that name.
        if frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
            group = frame.f_locals.get("group", group)
    if group is not None:
        with suppress(Exception):  # it was destroyed meanwhile
            return dist.get_process_group_ranks(group)[:AT_MOST]
    return list(range(min(world_size, AT_MOST)))
