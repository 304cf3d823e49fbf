"""Commands of a page, run in a shell in which `holdfast` is installed for the Python that runs the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT


def environment(**more: str) -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        **more,
    }


def run_commands(commands: str, folder: Path) -> str:
    """Run commands in a folder, until one fails; return what they print."""
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        env=environment(OMP_NUM_THREADS="1"),
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
