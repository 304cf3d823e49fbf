"""docs/report.md, followed by a stranger: a script is started, watched and reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.pages import blocks, text
from tests.docs.shell import run_commands
from tests.support.browser import data_of

SCRIPT = """
import holdfast, torch, torch.distributed as dist
dist.init_process_group("gloo")
holdfast.save({"w": torch.ones(1000)}, "run/step-00000001", step=1)
dist.destroy_process_group()
"""


@pytest.mark.wide
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(text("docs/report.md")) if "test_report" in block.elsewhere)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "run").mkdir()
    printed = run_commands(block.code, tmp_path)
    assert "run: 2 ranks, " in printed
    assert "last save  step 1, " in printed
    data = data_of((tmp_path / "report.html").read_text())
    assert [(call["title"], call["outcome"], call["ranks"]) for call in data["calls"] if call["bytes"]] == [
        ("save of step 1", "committed", 2)
    ]
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"] if event["ph"] == "X"} == {0, 1}
