"""What the writer process executes when it starts: Holdfast's own code and the packages of the trainer,
whatever lies about."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import venv
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

import holdfast
from holdfast._core.background import writer_client
from holdfast._core.background.arena import Arena
from holdfast._core.background.writer_client import WriterClient, WriterDied
from holdfast._core.background.writer_messages import WriteJob
from holdfast._core.base.options import Options
from holdfast._core.roster.process import stat, waits_in
from tests.support.waiting import wait_until

ROOT = Path(holdfast.__file__).parents[1]
TRAINER = """
import os, sys
from pathlib import Path
from holdfast._core.background.arena import Arena
from holdfast._core.background.writer_client import WriterClient
from holdfast._core.background.writer_messages import WriteJob
from holdfast._core.base.options import Options

store, hostile, where = sys.argv[1:]
if where == "PYTHONPATH":
    os.environ["PYTHONPATH"] = hostile
elif where == "sys.path":
    sys.path.insert(0, hostile)
elif where == "a Path in sys.path":
    sys.path.insert(0, Path(hostile))
writer = WriterClient()
job = WriteJob(0, 0, 0, store, 0, [], [], [], [], [], [], [], '{"attempt": "a"}', Options())
(file,) = writer.write(Arena(), job, lambda total: None, lambda moved: None, lambda: None)
print(file.name)
writer.kill()
"""


def train(folder: Path, where: str, python: str = sys.executable, path: str | None = None) -> str:
    """What a trainer whose writer wrote a file says; raises if something of the hostile folder was
    executed."""
    hostile, scripts = folder / "hostile", folder / "scripts"
    hostile.mkdir()
    scripts.mkdir()
    for name in ("json", "msgspec", "numpy", "queue", "xxhash", "holdfast", "sitecustomize", "usercustomize"):
        mark = folder / "executed"
        (hostile / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name!r})\n")
    (scripts / "train.py").write_text(TRAINER)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(scripts / "train.py"), str(folder / "store"), str(hostile), where],
        cwd=hostile if where == "the working directory" else folder,
        env=variables if path is None else {**variables, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not (folder / "executed").exists(), (folder / "executed").read_text()
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "where", ["the working directory", "PYTHONPATH", "sys.path", "a Path in sys.path", "nowhere"]
)
def test_the_writer_executes_nothing_that_lies_about(where: str, tmp_path: Path) -> None:
    assert train(tmp_path, where, path=str(ROOT)) == "data/a-r00000.safetensors"


def test_the_writer_starts_from_a_virtual_environment_with_an_editable_install(tmp_path: Path) -> None:
    """Of which a hook of imports, not a folder on the path, knows where Holdfast lies."""
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    packages = {str(Path(package.__file__).parents[1]) for package in (np, msgspec, xxhash)}
    (site / "editable.pth").write_text("\n".join([*packages, "import editable_hook", ""]))
    (site / "editable_hook.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Hook:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        return PathFinder.find_spec(name, [{str(ROOT)!r}]) if name == 'holdfast' else None\n"
        "sys.meta_path.insert(0, Hook)\n"
    )
    python = str(tmp_path / "venv" / "bin" / "python")
    assert train(tmp_path, "the working directory", python) == "data/a-r00000.safetensors"


def test_the_writer_starts_no_threads_for_linear_algebra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host of many cores, numpy would start one a core in the writer of each rank."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    writer = WriterClient()
    job = WriteJob(0, 0, 0, str(tmp_path), 0, [], [], [], [], [], [], [], '{"attempt": "a"}', Options())
    try:
        writer.write(Arena(), job, lambda total: None, lambda moved: None, lambda: None)
        threads = os.listdir(f"/proc/{writer.pid}/task")
    finally:
        writer.kill()
    assert len(threads) == 2, "one that writes, and one that listens"


def test_a_writer_that_closes_its_connection_and_stays_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "stays.py"
    script.write_text("import os, sys, time\nos.close(int(sys.argv[1]))\ntime.sleep(60)\n")
    monkeypatch.setattr(writer_client, "START", script)
    monkeypatch.setattr(writer_client, "ENDS", 0.2)
    writer = WriterClient()
    job = WriteJob(0, 0, 0, str(tmp_path), 0, [], [], [], [], [], [], [], '{"attempt": "a"}', Options())
    with pytest.raises(WriterDied, match=r"has closed its connection, and not ended, before it had written"):
        writer.write(Arena(), job, lambda total: None, lambda moved: None, lambda: None)


def test_where_the_process_is_is_told(tmp_path: Path) -> None:
    writer = WriterClient()
    job = WriteJob(0, 0, 0, str(tmp_path), 0, [], [], [], [], [], [], [], '{"attempt": "a"}', Options())

    def becomes(state: str) -> None:
        wait_until(lambda: (now := stat(pid)) is not None and now.state == state)

    try:
        writer.write(Arena(), job, lambda total: None, lambda moved: None, lambda: None)
        pid = writer.pid
        assert pid is not None
        becomes("S")  # it waits for a job
        where = waits_in(pid)  # some kernels do not tell
        said = f" (in {where} of the kernel)" if where else ""
        assert writer.describe() == f"its writer process has pid {pid}{said}"
        os.kill(pid, signal.SIGSTOP)
        becomes("T")
        assert writer.describe().startswith(f"its writer process has pid {pid}, and is stopped by a signal")
        os.kill(pid, signal.SIGKILL)
        becomes("Z")
        assert writer.describe() == f"its writer process, with pid {pid}, has ended"
    finally:
        writer.kill()


def test_a_process_that_is_long_in_dying_is_reaped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Python warns that it is still running, in whatever code runs when it is forgotten."""
    client = WriterClient()
    client.start()
    process = client._process
    assert process is not None

    def wait(seconds: float) -> int:
        raise subprocess.TimeoutExpired("it", seconds)

    with monkeypatch.context() as patch:
        patch.setattr(process, "wait", wait)
        client.kill()
    assert process in writer_client._dying
    process.wait(30)
    client.kill()
    assert process not in writer_client._dying
