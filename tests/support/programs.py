"""The complete programs of the recipes, and what runs them: real ranks that have imported their frameworks."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.docs.pages import code, text
from tests.groups.session.launch import Ended, Forks

HEAD = "; run by tests/docs/test_programs.py"
STEPS, SAVED = 6, 4
"""The programs save step 4, and perhaps the last one."""


def programs_of(page: str) -> dict[str, str]:
    """The programs of a page, by the name of the file in their first line."""
    found = [block for _, block in code(text(f"docs/recipes/{page}.md")) if HEAD in block.split("\n")[0]]
    return {block[2 : block.index(HEAD)]: block for block in found}


def changed(program: str, old: str, new: str) -> str:
    assert old in program, old
    return program.replace(old, new)


class Launcher:
    """Runs programs as torchrun does, `train.py RUN 6`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._forks = Forks("tests.support.run_page", ("tests.support.preloads.trainers",))

    def run(self, program: str, run: Path, ranks: int = 2) -> Ended:
        self._count += 1
        file = self._folder / f"train{self._count}.py"
        file.write_text(program)
        args = [str(file), str(run), str(STEPS)]
        terminal = self._folder / f"terminal{self._count}"
        return self._forks.run(args, list(range(ranks)), ranks, terminal, 150.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forks.__exit__()


def losses(ended: Ended, failed: bool = False) -> dict[int, float]:
    """What a program has printed for each step that it took."""
    assert any(ended.codes) == failed, ended.said
    assert "Exception ignored" not in ended.said
    found = re.findall(r"^(\d+) (\d\S+)$", ended.said, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}
