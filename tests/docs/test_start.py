"""docs/start.md, followed by a stranger: the script is saved, and the commands are given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.docs.pages import blocks, text
from tests.docs.shell import run_commands


@pytest.mark.wide
def test_the_first_job_of_several_ranks(tmp_path: Path) -> None:
    here = [block for block in blocks(text("docs/start.md")) if "test_start" in block.elsewhere]
    script, commands = here
    assert (script.language, commands.language) == ("python", "sh")
    (tmp_path / "train.py").write_text(script.code)
    printed = run_commands(commands.code, tmp_path)
    assert "from step 0 on, ranks: 2" in printed
    assert "from step 10 on, ranks: 1" in printed
    assert sorted(os.listdir(tmp_path / "sharded"))[-3:] == [
        "step-00000010",
        "step-00000015",
        "step-00000020",
    ]
