"""docs/report.md, followed by a stranger: a script is started, watched and reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT, blocks, text
from tests.support.browser import data_of

SCRIPT = """
import holdfast, torch, torch.distributed as dist
dist.init_process_group("gloo")
holdfast.save({"w": torch.ones(1000)}, "run/step-00000001", step=1)
dist.destroy_process_group()
"""


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(text("docs/report.md")) if "test_report" in block.elsewhere)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "run").mkdir()
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", block.code],
        env={**os.environ, "PATH": path, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run: 2 ranks, " in done.stdout
    assert "last save  save of step 1, " in done.stdout
    data = data_of((tmp_path / "report.html").read_text())
    assert [(call["title"], call["outcome"], call["ranks"]) for call in data["calls"] if call["bytes"]] == [
        ("save of step 1", "committed", 2)
    ]
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"] if event["ph"] == "X"} == {0, 1}
