"""One rank imports a plugin that builds its tables at import; the others have called it and are in the next collective."""

import importlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

PLUGIN = """
import time

def _table(size):
    return [[pow(base, exponent, 97) for exponent in range(size)] for base in range(size)]

TABLE = _table(8)
_ends = time.monotonic() + {seconds}
while time.monotonic() < _ends:
    TABLE = _table(60)

def apply(x):
    return x * TABLE[1][1]
"""


def load_plugin(folder: Path, rank: int):
    folder.mkdir()
    (folder / f"plugin_{rank}.py").write_text(PLUGIN.format(seconds=9 if rank == 3 else 0))
    sys.path.insert(0, str(folder))
    if rank == 3:
        Path(os.environ["READY"]).touch()
    return importlib.import_module(f"plugin_{rank}")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    x = torch.ones(4)
    dist.all_reduce(x)
    plugin = load_plugin(Path(os.environ["RUN_FOLDER"], f"plugins-{rank}"), rank)
    for _ in range(3):
        x = plugin.apply(x)
        dist.all_reduce(x)
    dist.destroy_process_group()


main()
