"""One rank builds an extension: it waits for compilers that it has started, and the others for its barrier."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

SOURCE = """
#include <math.h>
double kernel_{n}(const double *x, int size) {{
    double total = 0;
    {lines}
    return total;
}}
"""
LINE = "for (int i = {k}; i < size; i++) total += sin(x[i] * {k}.0) * exp(-x[i]) / ({k} + i);"


class Builder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compiler = shutil.which("cc") or shutil.which("gcc")

    def command(self, source: Path) -> list[str]:
        if self.compiler is None:  # a machine without one
            return [sys.executable, "-m", "compileall", "-qf", os.path.dirname(torch.__file__)]
        return [self.compiler, "-O3", "-c", str(source), "-o", str(source.with_suffix(".o"))]

    def build_one(self, number: int) -> None:
        source = self.folder / f"kernel_{number}.c"
        source.write_text(
            SOURCE.format(n=number, lines="\n    ".join(LINE.format(k=k) for k in range(1, 400)))
        )
        process = subprocess.Popen(self.command(source), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(output.decode())

    def build(self) -> None:
        number, ends = 0, time.monotonic() + 8.5
        while time.monotonic() < ends:
            self.build_one(number)
            number += 1


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
dist.barrier()
if dist.get_rank() == 0:
    Path(os.environ["READY"]).touch()
    Builder(Path(os.environ["RUN_FOLDER"])).build()
dist.barrier()
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
