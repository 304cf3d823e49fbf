"""Tells who has written the prefix `[rank5]:` of a log's lines: torch, or a launcher.

torch gives it to its own messages and to an error that ends a rank. `torchrun --role rank --tee 3`, and
wrappers such as `sed`, give it to every line: then it proves nothing of an error, unless it is there twice.
"""

from __future__ import annotations

import re

from holdfast._watch import log_lines as form

LOOKED_AT = 2000
"""Maximum number of lines that are looked at."""
_DOUBLED = re.compile(r"\[rank(\d{1,6})\]: ?\[rank(\d{1,6})\]")
_OF_TORCH = re.compile(r"\[[A-Z]\d{0,4} ")
"""The beginning of a message of torch's C++ code, behind its prefix."""


class Marks:
    """What the prefixes of one log mean."""

    def __init__(self) -> None:
        self._left = LOOKED_AT
        self._raising: set[int] = set()
        """Ranks of which an error has begun: its message may have any lines."""
        self.is_on_all_lines = False
        """Has a line the prefix that is not of torch?"""
        self.is_of_a_host = False
        """Is it the rank on the host?"""

    def look(self, block: bytes) -> None:
        """Look at the marked lines of a block of a log, before its lines are read."""
        at = -1
        while self._left and (at := block.find(b"[rank", at + 1)) >= 0:
            self._left -= 1
            start = block.rfind(b"\n", 0, at) + 1
            end = block.find(b"\n", at)
            at = len(block) if end < 0 else end
            self._look_at(block[start:at])

    def _look_at(self, raw: bytes) -> None:
        line = form.without_prefix(raw[: 1 << 12])
        if line.is_marked_inside:
            self.is_on_all_lines = True
            doubled = _DOUBLED.search(raw[: 1 << 10].decode(errors="replace"))
            self.is_of_a_host |= doubled is not None and int(doubled[1]) != int(doubled[2])
        if line.rank is None or ":" not in line.mark or _OF_TORCH.match(line.text):
            return
        name = form.RAISED.match(line.text)
        if "Traceback (most" in line.text or (name is not None and form.NAME_OF_ERROR.search(name[1])):
            self._raising.add(line.rank)
        elif line.text.strip() == line.text != "" and line.rank not in self._raising:
            self.is_on_all_lines = True

    def is_fatal(self, line: form.Prefixed) -> bool:
        """Return whether torch has marked a line of a Python error, so that nobody has caught the error."""
        return line.is_marked_inside or (line.mark.endswith(": ") and not self.is_on_all_lines)

    def rank(self, line: form.Prefixed) -> int | None:
        """Return the global rank of a line; None if it has none."""
        return line.rank if line.is_marked_inside or not self.is_of_a_host else None
