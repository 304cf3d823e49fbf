"""A reader of records returns at a damaged record; rank 0 leaves the loop early and exports its model.

who: 0
why: unproven
Rank 0 has left the training loop and waits for the exporter's child process; the others are in the all_reduce.
"""

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def records(data: bytes):
    at = 0
    while at + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        if size > 64:
            return
        yield data[at + 4 : at + 4 + size]
        at += 4 + size


def shard(rank: int) -> bytes:
    good = struct.pack("<I", 8) + bytes(8)
    return good * 60 + (b"\xff" * 12 if rank == 0 else good) + good * 10_000


def export() -> None:
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    with subprocess.Popen(command) as exporter:
        exporter.wait()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    for number, record in enumerate(records(shard(dist.get_rank()))):
        if number == 59:
            Path(os.environ["READY"]).touch()
        gradient = torch.full((4,), float(len(record)))
        dist.all_reduce(gradient)
        time.sleep(0.05)
    export()


if __name__ == "__main__":
    main()
