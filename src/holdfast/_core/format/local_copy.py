"""What the index of a step in a local folder says of it: the key `local_copy` of `about`.

It lists what the ranks of one host hold; the copies of all hosts together are the step. No torch, no NumPy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from holdfast._core.layout.ranks import ranks_of
from holdfast._core.ready import ready
from holdfast.errors import BadInput

ABOUT = "local_copy"
SAVE = "save"
"""The key of `about` in the index of a run's step: the save that the step, and its local copies, are of."""

_SAVE = re.compile("([0-9a-f]+)[.]([0-9]{1,18})")


class Ancestry(msgspec.Struct, frozen=True):
    """What a job has restored, as its next saves tell it."""

    base: str = ""
    """The save of the newest durable step; "" if there was none."""
    base_step: int = -1
    """Its number; -1 if there was none."""
    parent: str = ""
    """The save that was restored, if that was only in local folders; else ""."""
    origin: str = ""
    """The save of the durable step that the state goes back to; "" if there is none. Another than `base` if a
    job was told to restore an older step, or the newest one was damaged."""
    origin_step: int = -1
    """Its number; -1 if there is none."""

    def of_copy(self, copy: LocalCopy) -> Ancestry:
        """Return the ancestry of a job that restores a copy which is newer than the newest durable step.

        self: that of a job that restores this durable step.
        """
        if self.origin in ("", copy.base, copy.origin):  # it knows of none committed in between
            return replace(self, parent=copy.save, origin=copy.origin, origin_step=copy.origin_step)
        return replace(self, parent=copy.save)

    def is_followed(self, step: int, newest: int) -> bool:
        """Return whether a save of this number is the newest step of the run once it is durable.

        newest: the number of the step that is the newest without it.
        """
        return newest <= step or 0 <= self.origin_step <= step


class LocalCopy(Ancestry, frozen=True, kw_only=True):
    """One host's copy of a step."""

    run: str
    """Where the run is, whose step it is."""
    folder: str
    """A random name of the local folder: a copy of the folder on another host is none of that host's."""
    save: str
    """The save, equal on all hosts: `<start>.<number>`, with a random name of the start of the job."""
    start: int
    """Number of the start. Each is higher than all those before it on any of its hosts."""
    step: int
    ranks: str
    """All participants of the save, in the format of `layout.ranks.ranks_text`."""
    held_by: str
    """Those of them that share the folder."""
    is_part: bool
    """Whether other hosts have parts of it."""

    @property
    def number(self) -> int:
        return number_of(self.save)[1]

    @property
    def held_for(self) -> str:
        """For messages of a load that asks for more; "" if it is complete."""
        return f"the ranks of one host (of ranks {self.ranks})" if self.is_part else ""


def number_of(save: str) -> tuple[str, int]:
    """Return the start and the number of a save; -1 if it was saved without local folders."""
    match = _SAVE.fullmatch(save)
    return (match[1], int(match[2])) if match else (save, -1)


def read_copy(about: Mapping[str, object]) -> LocalCopy | None:
    """Return what an index says of a local copy; None if it is of none, or if that is garbled."""
    try:
        copy = msgspec.convert(about[ABOUT], ready(LocalCopy))
        ranks_of(copy.ranks), ranks_of(copy.held_by)
    except (LookupError, msgspec.ValidationError, BadInput):
        return None
    return copy


def save_of(about: Mapping[str, object]) -> str:
    """Return the save that a step of a run is of, by its index."""
    found = about.get(SAVE) or about.get("attempt")
    return found if isinstance(found, str) else ""


def is_newer(copy: LocalCopy, durable: str, step: int) -> bool:
    """Return whether a local copy was saved after the newest durable step, by jobs that the run follows.

    durable: its save; "" if the run has no step. step: its number.

    It may be the base of the copy or, once the run has left that behind, the copy's origin.

    If not, the run has gone another way since: on other hosts, from an older step, or its steps were removed.
    Or the job has restored nothing, and saves below the newest step, which stays that.
    """
    if not copy.is_followed(copy.step, step):
        return False
    if durable == copy.base or (durable and durable == copy.origin):
        return True
    start, number = number_of(durable)
    before, base = number_of(copy.base)
    if number < 0 or (start == before and number < base):
        return False
    parent, most = number_of(copy.parent)
    return (start == parent and number <= most) or (start == number_of(copy.save)[0] and number < copy.number)
