"""What ranks of FSDP2 do with states of other dtypes, names and shapes; importable by spawned processes."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast

WORDS, WIDTH, CLASSES = 50, 6, 5


class Net(torch.nn.Module):
    """Cut over four ranks, the head has an empty shard, and the others are uneven."""

    def __init__(self, classes: int = CLASSES, tied: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS if tied else classes, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner(self.embed(words)))
        return out


def sharded(module: torch.nn.Module, replicas: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The module under FSDP2, or HSDP, and an optimizer that has taken a step."""
    size = dist.get_world_size() // replicas
    shape, names = ((replicas, size), ("replicate", "shard")) if replicas > 1 else ((size,), ("shard",))
    fully_shard(module, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    return module, optimizer


def trained(module: torch.nn.Module, replicas: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module, optimizer = sharded(module, replicas)
    module(torch.arange(WORDS)).float().square().mean().backward()
    optimizer.step()
    return module, optimizer


def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, gathered: the test's own collective."""
    return {name: value.full_tensor() for name, value in module.state_dict().items()}


def save(rank: int, folder: str, tied: bool, replicas: int = 1) -> None:
    torch.manual_seed(3)
    module, optimizer = trained(Net(tied=tied), replicas)
    holdfast.save({"model": module, "optim": optimizer, "lr": 0.5}, folder, job=holdfast.Job(timeout=60))


def load_cast_and_renamed(rank: int, folder: str) -> None:
    """Into bfloat16 and under other names; float64 for the optimizer's parameters."""
    stored = holdfast.open(folder)
    module, optimizer = sharded(Net().to(torch.bfloat16))
    state = {"net": {"inside": module}, "optim": optimizer, "lr": 0.0}
    report = holdfast.load(
        state, folder, cast=True, rename={"model": "net.inside"}, job=holdfast.Job(timeout=60)
    )
    assert (report.missing, state["lr"]) == ((), 0.5)
    for name, value in whole(module).items():
        assert value.dtype is torch.bfloat16
        assert torch.equal(value, stored[f"model.{name}"][...].bfloat16()), name
    moments = {
        name: optimizer.state[parameter]["exp_avg"].full_tensor()
        for name, parameter in module.named_parameters()
    }
    for number, (name, value) in enumerate(moments.items()):
        assert torch.equal(
            value.float(), stored[f"optim.state.{number}.exp_avg"][...].to(value.dtype).float()
        ), name


def load_with_another_head(rank: int, folder: str) -> None:
    """`on_shape="skip"` leaves the head and its optimizer state as they are, on every rank alike."""
    torch.manual_seed(4)
    stored = holdfast.open(folder)
    module, optimizer = sharded(Net(classes=9))
    before = whole(module)
    state = {"model": module, "optim": optimizer, "lr": 0.0}
    report = holdfast.load(state, folder, on_shape="skip", job=holdfast.Job(timeout=60))
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, report.skipped)
    assert all(set(skipped) >= {"model.head.weight", "model.head.bias"} for skipped in heard), heard
    for name, value in whole(module).items():
        wanted = before[name] if name.startswith("head") else stored[f"model.{name}"][...]
        assert torch.equal(value, wanted), name
    assert {name for name, one in module.named_parameters() if one in optimizer.state} == {
        "embed.weight",
        "inner.weight",
        "inner.bias",
    }
    module(torch.arange(WORDS)).square().mean().backward()
    optimizer.step()  # it makes the states that were left out


def load_tied(rank: int, folder: str, tied: bool) -> None:
    """A checkpoint with tied weights, into tied ones, and into some that are not."""
    stored = holdfast.open(folder)
    values = stored.read("model")
    assert values["embed.weight"] is values["head.weight"]
    module, _ = sharded(Net(classes=WORDS, tied=tied))
    holdfast.load(
        {"model": module}, folder, exclude=[] if tied else ["model.head.bias"], job=holdfast.Job(timeout=60)
    )
    found = whole(module)
    assert torch.equal(found["embed.weight"], values["embed.weight"])
    assert torch.equal(found["head.weight"], values["embed.weight"])


def published(rank: int, folder: str, kind: str) -> None:
    """A folder of transformers' into its own model, sharded, of another dtype, and with more words."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    want = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    job = holdfast.Job(timeout=60)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    module, _ = sharded(model)
    holdfast.load(module, folder, cast=True, job=job)
    for name, value in whole(module).items():
        assert torch.equal(value, want[name].bfloat16()), name
    config.vocab_size += 12
    module, _ = sharded(transformers.AutoModelForCausalLM.from_config(config))
    before = whole(module)
    report = holdfast.load(module, folder, on_shape="skip", job=job)
    assert set(report.skipped) == {"model.embed_tokens.weight", "lm_head.weight"}
    for name, value in whole(module).items():
        assert torch.equal(value, before[name] if name in report.skipped else want[name]), name


def consolidate(rank: int, folder: str) -> list[str]:
    """torch's writer consolidates shards into files of whole tensors, and its reader's folder is read here:
    what is warned of."""
    import holdfast.dcp as dcp

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    torch.manual_seed(3)
    module, _ = trained(Net())
    state = module.state_dict()
    numbers = {name: 1 + number % 2 for number, name in enumerate(state)}
    try:
        writer = dcp.HuggingFaceStorageWriter(
            folder, fqn_to_index_mapping=numbers, save_distributed=True, enable_consolidation=True
        )
        dcp.save(state, storage_writer=writer)
        dist.barrier()
        other, _ = sharded(Net())
        dcp.load(other.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(folder))
        for name, value in whole(other).items():
            assert torch.equal(value, state[name].full_tensor()), name
    finally:
        logging.getLogger("holdfast").removeHandler(handler)
    return said
