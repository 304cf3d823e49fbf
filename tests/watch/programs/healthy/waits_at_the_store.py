"""Ranks meet at keys of the message store instead of a barrier: rank 0 sets the last key after its migration."""

import os
import sqlite3
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def migrate(path: Path) -> int:
    """Fill the index of samples."""
    with sqlite3.connect(path) as database:
        database.execute("create table samples (id integer primary key, name text, length integer)")
        ends, number = time.monotonic() + 9, 0
        while time.monotonic() < ends:
            database.executemany(
                "insert into samples (name, length) values (?, ?)",
                ((f"sample-{number + i}", (number + i) % 977) for i in range(200)),
            )
            database.execute("select count(*) from samples where length < 100").fetchone()
            number += 200
    return number


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    store = dist.PrefixStore("index", dist.distributed_c10d._get_default_store())
    path = Path(os.environ["RUN_FOLDER"], "samples.db")
    if dist.get_rank() == 0:
        Path(os.environ["READY"]).touch()
        store.set("count", str(migrate(path)))
    else:
        store.wait(["count"], timedelta(seconds=50))
    count = torch.tensor(int(store.get("count")))
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    dist.destroy_process_group()


main()
