"""Rank 0 writes a checkpoint to storage that takes its data slowly, while the others wait for all to be done."""

import io
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class ShapedFile(io.RawIOBase):
    """A file on shared storage, limited to so many bytes a second."""

    def __init__(self, path: Path, rate: float) -> None:
        self.file = open(path, "wb", buffering=0)  # noqa: SIM115
        self.rate = rate

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        part = memoryview(data)[: 64 << 10]
        written = self.file.write(part)
        os.fsync(self.file.fileno())
        time.sleep(written / self.rate)
        return written

    def close(self) -> None:
        self.file.close()
        super().close()


def save_checkpoint(state: dict, path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    rate = len(buffer.getbuffer()) / 9
    with ShapedFile(path.with_suffix(".part"), rate) as raw, io.BufferedWriter(raw, 64 << 10) as file:
        file.write(buffer.getbuffer())
    path.with_suffix(".part").rename(path)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    model = torch.nn.Linear(512, 1024)
    for step in range(1, 9):
        flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()[:100]
        dist.all_reduce(flat)
        if step % 4 == 0:
            if dist.get_rank() == 0 and step == 4:
                Path(os.environ["READY"]).touch()
                save_checkpoint(
                    {"model": model.state_dict(), "step": step}, Path(os.environ["RUN_FOLDER"], "c.pt")
                )
            dist.barrier()
    dist.destroy_process_group()


main()
