"""Every rank waits for the same file of a data service that is down: nobody is in a collective.

who: none
why: unproven
All four ranks poll for one file at one line; no rank waits for another.
"""

import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def wait_for(path: Path, pause: float = 0.3) -> bytes:
    while True:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            time.sleep(pause)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    spool = Path(tempfile.mkdtemp())
    for number in range(1000):
        if number == 40:
            Path(os.environ["READY"]).touch()
        else:
            (spool / f"{number}.bin").write_bytes(bytes(8))
        data = wait_for(spool / f"{number}.bin")
        dist.all_reduce(torch.tensor(float(len(data))))
        time.sleep(0.05)


if __name__ == "__main__":
    main()
