"""A logger with a thread that sends, as wandb has: rank 0 is in its `finish`, which waits until all is sent."""

import json
import os
import queue
import socket
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Backend(threading.Thread):
    """What receives: slow at the end."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="backend")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()

    def run(self) -> None:
        connection, _ = self.listener.accept()
        with connection, connection.makefile("rw") as file:
            for line in file:
                time.sleep(9.0 if "summary" in json.loads(line) else 0.0)
                file.write("ok\n")
                file.flush()


class Run:
    def __init__(self, address: tuple[str, int]) -> None:
        self.records: queue.Queue[dict] = queue.Queue()
        self.connection = socket.create_connection(address)
        self.thread = threading.Thread(target=self.send_all, daemon=True, name="sender")
        self.thread.start()

    def log(self, **values: float) -> None:
        self.records.put(values)

    def send_all(self) -> None:
        with self.connection.makefile("rw") as file:
            while True:
                record = self.records.get()
                file.write(json.dumps(record) + "\n")
                file.flush()
                assert file.readline() == "ok\n"
                self.records.task_done()

    def finish(self) -> None:
        self.log(summary=1.0)
        self.records.join()
        self.connection.close()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    run = None
    if dist.get_rank() == 0:
        backend = Backend()
        backend.start()
        run = Run(backend.address)
    for step in range(20):
        loss = torch.rand(1)
        dist.all_reduce(loss)
        if run is not None:
            run.log(step=step, loss=loss.item())
    if run is not None:
        Path(os.environ["READY"]).touch()
        run.finish()
    dist.barrier()
    dist.destroy_process_group()


main()
