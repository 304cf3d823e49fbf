"""docs/protocol.md is up to date with the tables and with the messages that ranks send."""

from __future__ import annotations

import importlib.util
import re
from functools import reduce
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.phases import TRANSITIONS
from holdfast._core.protocol.task import CollectiveTask
from holdfast._core.roster.memory import Board, MemoryRoster
from tests.docs.pages import ROOT, table, text
from tests.support.threads import on_ranks


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_blocks_are_up_to_date() -> None:
    for name in generator().blocks():
        assert generator().rewritten(name) == text(f"docs/{name}"), "run: python docs/generate.py"
    page = text("docs/protocol.md")
    assert generator().picture() == text("docs/rounds.svg"), "run: python docs/generate.py"
    for phase, ways in TRANSITIONS.items():
        for other in ways:
            assert f"    {phase} --> {other}: " in page


def test_labels_are_what_mermaid_takes() -> None:
    for line in generator().diagram(TRANSITIONS).split("\n")[3:-1]:
        assert re.fullmatch(r"    [\w\[\]*]+ --> [\w\[\]*]+(: [^:;`#]+)?", line), line


class Recording(MemoryRoster):
    """Keeps the keys that any rank writes."""

    keys: set[str]

    def put(self, key: str, message: Any) -> None:
        self.keys.add(key)
        super().put(key, message)

    def claim(self, key: str, message: Any) -> Any:
        self.keys.add(key)
        return super().claim(key, message)

    def count(self, key: str) -> int:
        self.keys.add(key)
        return super().count(key)


def test_the_table_of_messages_is_what_ranks_send(tmp_path: Path) -> None:
    keys: set[str] = set()

    def job(plain: MemoryRoster) -> None:
        roster = Recording(plain.rank, plain.world_size, plain.board)
        roster.keys = keys
        state = {"w": torch.ones(4), "step": 1}
        if roster.rank == 2:
            state["own"] = torch.zeros(1)  # fingerprints differ, so lists are asked for
        run = holdfast.Checkpoints(tmp_path, asynchronous=False, job=holdfast.Job(roster=roster))
        run.save(1, state)
        assert run.restore(state) == 1
        call = begin_call(holdfast.Job(roster=roster, timeout=60.0, stall_timeout=60.0))
        CollectiveTask("nothing", "memory:task", call).run()

    on_ranks(3, job)
    whose = (
        (r"\A(save|load|choice|groups)/[0-9a-f]{16}/0\.\d+/([0-9a-f]{12}/)?", "K/"),
        (r"\Alife/[0-9a-f]{16}/\d+/0\Z", "life/<participants>/<rank>/<life>"),
        (r"/\d+\Z", "/<rank>"),
    )
    seen = {reduce(lambda key, pair: re.sub(*pair, key), whose, key) for key in keys}
    assert seen == {row[0] for row in table(text("docs/protocol.md"), "messages")}


def test_nothing_stays_after_a_save(tmp_path: Path) -> None:
    board = Board()
    on_ranks(
        3,
        lambda roster: holdfast.save({"w": torch.ones(4)}, tmp_path / "s", job=holdfast.Job(roster=roster)),
        board,
    )
    assert {key.partition("/")[0] for key in (*board.messages, *board.counters)} == {"at", "life"}
