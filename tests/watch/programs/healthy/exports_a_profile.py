"""torch.profiler: the handler of one rank sums up and writes its trace, while the others are a step ahead."""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import holdfast


def trace_handler(prof) -> None:
    if dist.get_rank() != 0:
        return
    Path(os.environ["READY"]).touch()
    path = Path(os.environ["RUN_FOLDER"], "trace.json")
    prof.export_chrome_trace(str(path))
    ends = time.monotonic() + 9
    while time.monotonic() < ends:
        trace = json.loads(path.read_text())
        by_name: dict[str, float] = {}
        for event in trace["traceEvents"]:
            by_name[event["name"]] = by_name.get(event["name"], 0.0) + event.get("dur", 0.0)
        path.with_suffix(".summary").write_text(json.dumps(sorted(by_name.items()), indent=1))


def train(model, steps: int, prof) -> None:
    for _ in range(steps):
        with record_function("step"):
            loss = model(torch.randn(8, 32)).pow(2).mean()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            model.zero_grad()
        prof.step()


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
    on_trace_ready=trace_handler,
) as prof:
    train(model, 8, prof)
dist.destroy_process_group()
