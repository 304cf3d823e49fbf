"""Rank 1 looks again and again for a file that a staging job writes; it will come, and the others wait."""

import glob
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

STAGE = "import sys, time; time.sleep(9.5); open(sys.argv[1], 'w').write('staged')"


def wait_for_file(pattern: str, every: float = 0.5, at_most: float = 50.0) -> str:
    begun = time.time()
    while True:
        found = sorted(glob.glob(pattern))
        if found:
            return found[0]
        if time.time() - begun > at_most:
            raise TimeoutError(f"{pattern} did not come within {at_most} s")
        time.sleep(every)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    target = Path(os.environ["RUN_FOLDER"], f"shard-{rank}.staged")
    if rank == 1:
        staging = subprocess.Popen([sys.executable, "-c", STAGE, str(target)], start_new_session=False)
        Path(os.environ["READY"]).touch()
    else:
        target.write_text("here already")
    text = Path(wait_for_file(str(target.with_name(f"shard-{rank}.*")))).read_text()
    lengths = torch.tensor([len(text)])
    everyone = [torch.zeros_like(lengths) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, lengths)
    assert all(length.item() for length in everyone)
    if rank == 1:
        staging.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
