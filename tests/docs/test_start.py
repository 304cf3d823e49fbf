"""docs/start.md, followed by a stranger: the script is saved, and the commands are given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT, blocks, text


def test_the_first_job_of_several_ranks(tmp_path: Path) -> None:
    here = [block for block in blocks(text("docs/start.md")) if "test_start" in block.elsewhere]
    script, commands = here
    assert (script.language, commands.language) == ("python", "sh")
    (tmp_path / "train.py").write_text(script.code)
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        ["bash", "-e", "-c", commands.code],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
        },
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from step 0 on, ranks: 2" in done.stdout
    assert "from step 10 on, ranks: 1" in done.stdout
    assert sorted(os.listdir(tmp_path / "sharded"))[-3:] == [
        "step-00000010",
        "step-00000015",
        "step-00000020",
    ]
