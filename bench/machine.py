"""Where figures were measured: written into every result, so that no page has to guess it."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """What the figures of one run depend on, besides the code."""

    cpu: str
    cores: int
    """Those that the benchmark may use."""
    memory_gib: float
    gpu: str
    """Empty where there is none."""
    kernel: str
    python: str
    torch: str
    numpy: str
    folders: dict[str, str]
    """File system type of each kind of folder that `harness.scratch` gives; empty where it was not recorded."""

    def __str__(self) -> str:
        folders = ", ".join(f"`{kind}` is on {system}" for kind, system in self.folders.items())
        return (
            f"{self.cores} cores ({self.cpu}), {self.memory_gib:.0f} GiB memory, {self.gpu or 'no GPU'}, "
            f"Linux {self.kernel}, Python {self.python}, torch {self.torch}, NumPy {self.numpy}"
            + (f"; {folders}" if folders else "")
        )


def this_machine(folders: dict[str, Path]) -> Machine:
    """Describe the machine that this process runs on, and the file systems of these folders."""
    import numpy
    import torch

    return Machine(
        cpu=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        kernel=platform.release(),
        python=platform.python_version(),
        torch=torch.__version__,
        numpy=numpy.__version__,
        folders={kind: file_system(folder) for kind, folder in folders.items()},
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def file_system(folder: Path) -> str:
    """Return the type of the file system that a folder is on, such as `ext4` or `tmpfs`."""
    real, best, found = folder.resolve(), -1, "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mounted = Path(before.split()[4].replace("\\040", " "))
        if (
            real.is_relative_to(mounted) and len(mounted.parts) >= best
        ):  # of two on one place, the later is seen
            best, found = len(mounted.parts), after.split()[0]
    return found


def commit() -> str:
    """Return the commit of the holdfast that is imported, with a plus if files differ from it; "" outside of git."""
    import holdfast

    folder = Path(str(holdfast.__file__)).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""

    name = git("rev-parse", "--short=10", "HEAD")
    return name + ("+" if name and git("status", "--porcelain", "--", str(folder)) else "")
