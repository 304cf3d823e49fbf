"""One rank's storage fails at first: it tries again with growing pauses in `except`, while the others reduce."""

import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

log = logging.getLogger("train")


class Throttled(OSError):
    pass


class Bucket:
    """Object storage that answers `slow down` at first."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals

    def get(self, key: str) -> bytes:
        if self.refusals:
            self.refusals -= 1
            raise Throttled(f"503 Slow Down: {key}")
        return key.encode() * 8


def fetch(bucket: Bucket, key: str, tries: int = 10) -> bytes:
    for attempt in range(tries):
        try:
            return bucket.get(key)
        except Throttled as error:
            pause = min(0.4 * 1.6**attempt, 3.0)
            log.warning("try %d: %s, again in %.1f s", attempt, error, pause)
            time.sleep(pause)
    raise TimeoutError(key)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    for shard in range(4):
        troubled = rank == 2 and shard == 2
        if troubled:
            Path(os.environ["READY"]).touch()
        data = fetch(Bucket(6 if troubled else 0), f"shard-{shard:05}-{rank}.bin")
        batch = torch.frombuffer(bytearray(data), dtype=torch.uint8).float()
        mean = batch.mean().reshape(1)
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        log.info("shard %d: %.3f", shard, mean.item() / dist.get_world_size())
    dist.destroy_process_group()


main()
