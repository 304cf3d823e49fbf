"""Nobody waits long: FSDP2 with gathers, scatters and a clipped norm in each step, all the time."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import holdfast


class Decoder(torch.nn.Module):
    def __init__(self, depth: int = 2, width: int = 32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = torch.nn.Linear(width, 100)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
model = Decoder()
policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step, begun, goes_on = 0, time.monotonic(), torch.ones(1)
while goes_on.item():
    step += 1
    if step == 5:
        Path(os.environ["READY"]).touch()
    ids = torch.randint(0, 100, (4, 24))
    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    goes_on.fill_(time.monotonic() - begun < 12)
    dist.broadcast(goes_on, src=0)
dist.destroy_process_group()
