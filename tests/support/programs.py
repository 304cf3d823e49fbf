"""The complete programs of the recipes, and what runs them: real ranks that have imported their frameworks."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.docs.pages import code, text
from tests.groups.session.launch import Ended, Forks

HEAD = "# train.py; run by tests/docs/test_programs.py"
STEPS, SAVED = 6, 4
"""The programs save step 4, and perhaps the last one."""


def program_of(page: str) -> str:
    [program] = [block for _, block in code(text(f"docs/recipes/{page}.md")) if block.startswith(HEAD)]
    return program


def changed(program: str, old: str, new: str) -> str:
    assert old in program, old
    return program.replace(old, new)


class Launcher:
    """Runs programs as torchrun does, `train.py RUN 6`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack, self._count = folder, ExitStack(), 0
        self._forks: dict[str, Forks] = {}

    def run(self, program: str, run: Path, preload: str = "", ranks: int = 2) -> Ended:
        if preload not in self._forks:
            modules = (f"tests.support.preloads.{preload}",) if preload else ()
            self._forks[preload] = self._stack.enter_context(Forks("tests.support.run_page", modules))
        self._count += 1
        file = self._folder / f"train{self._count}.py"
        file.write_text(program)
        args = [str(file), str(run), str(STEPS)]
        terminal = self._folder / f"terminal{self._count}"
        return self._forks[preload].run(args, list(range(ranks)), ranks, terminal, 90.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def losses(ended: Ended, failed: bool = False) -> dict[int, float]:
    """What a program has printed for each step that it took."""
    assert any(ended.codes) == failed, ended.said
    found = re.findall(r"^(\d+) (\d\S+)$", ended.said, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}
