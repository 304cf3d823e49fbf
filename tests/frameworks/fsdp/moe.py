"""A mixture of experts under FSDP2 with an expert-parallel mesh, as torchtitan builds it, on gloo; importable
by spawned processes.

Experts are stacked in one parameter a matrix, cut over the expert-parallel mesh first and by `fully_shard`
then, so that they are DTensors on a (fsdp, ep) mesh with strided placements. Ranks of one expert-parallel
group see the same tokens, each adds what its own experts say, and the sum is taken over the group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

import holdfast
from holdfast.errors import BadInput
from tests.support.collectives import counted

EXPERTS, ROUTED, HIDDEN, WIDE, VOCABULARY, LAYERS = 8, 5, 10, 14, 11, 2
"""Tokens go to the first ROUTED experts only. Sizes don't divide by the number of ranks."""


class Layout(NamedTuple):
    world: int
    ep: int = 1
    replicas: int = 1
    """More than one: HSDP."""


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDE, HIDDEN) * 0.3)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDE) * 0.3)
        self.mesh: DeviceMesh | None = None

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x: tokens x HIDDEN; weight: tokens x EXPERTS, what each expert counts."""
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        first = 0 if self.mesh is None else self.mesh.get_local_rank() * len(w1)
        out = torch.zeros_like(x)
        for at in range(len(w1)):
            out = out + weight[:, first + at, None] * (torch.relu(x @ w1[at].T) @ w2[at].T)
        if self.mesh is None:
            return out
        summed: torch.Tensor = DTensor.from_local(out, self.mesh, [Partial()]).full_tensor()
        return summed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        logits = self.router(y)
        logits = torch.cat([logits[:, :ROUTED], torch.full_like(logits[:, ROUTED:], -1e9)], dim=1)
        return x + self.experts(y, torch.softmax(logits, dim=1))


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.frozen = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.unused = nn.Parameter(torch.ones(7))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(layout: Layout, seed: int, **adam: Any) -> tuple[MoE, torch.optim.AdamW, DeviceMesh | None]:
    """The model, sharded as the layout says, and its optimizer: two parameter groups."""
    torch.manual_seed(seed)
    model, mesh = MoE(), None
    if layout.world > 1:
        data = layout.world // layout.replicas
        names = ("replica", "fsdp") if layout.replicas > 1 else ("fsdp",)
        shape = (layout.replicas, data) if layout.replicas > 1 else (data,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        pair = init_device_mesh("cpu", (layout.world // layout.ep, layout.ep), mesh_dim_names=("efsdp", "ep"))
        for layer in model.layers:
            experts = layer.experts
            if layout.ep > 1:
                experts.mesh, mine = pair["ep"], EXPERTS // layout.ep
                for name in ("w1", "w2"):
                    whole = getattr(experts, name).detach()
                    first = pair.get_local_rank("ep") * mine
                    local = whole[first : first + mine].clone()
                    cut = DTensor.from_local(local, experts.mesh, [Shard(0)], run_check=False)
                    setattr(experts, name, nn.Parameter(cut))
                fully_shard(experts, mesh=pair["efsdp"])
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in trained if "norm" not in name and "bias" not in name]
    rest = [p for name, p in trained if "norm" in name or "bias" in name]
    how = {"lr": 1e-2, **adam}
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], **how
    )
    return model, optimizer, mesh


def train(model: MoE, optimizer: torch.optim.Optimizer, steps: range, group: int) -> list[float]:
    """Losses of this rank; ranks of one expert-parallel group (`group`) see the same tokens."""
    losses = []
    for step in steps:
        tokens = torch.randint(
            0, VOCABULARY, (12,), generator=torch.Generator().manual_seed(1000 * step + group)
        )
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.seen += len(tokens)
        losses.append(float(loss.detach()))
    return losses


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def everything(model: MoE, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All values as whole tensors (collective), by names."""
    model_state, optim_state = holdfast.get_state_dict(model, optimizer)
    found = {f"model.{name}": whole(value) for name, value in model_state.items()}
    for name, state in optim_state["state"].items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                found[f"optim.{name}.{key}"] = whole(value)
    return found


def train_and_save(rank: int, path: str, layout: Layout, steps: int) -> list[float]:
    """Train, save, train on; the losses after the save. Rank 0 leaves what all values were beside the
    checkpoint."""
    model, optimizer, _ = build(layout, 1)
    train(model, optimizer, range(steps), rank // layout.ep)
    values = everything(model, optimizer)
    if rank == 0:
        torch.save(values, path + ".values")

    def save() -> None:
        model_state, optim_state = holdfast.get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optim_state}
        holdfast.save(state, path, step=steps, job=holdfast.Job(timeout=60, stall_timeout=20))

    assert counted(save) == []
    return train(model, optimizer, range(steps, steps + 3), rank // layout.ep)


def resume(rank: int, path: str, layout: Layout, steps: int) -> list[float]:
    """Load into a fresh model and optimizer on some layout; every value as it was; then train on."""
    model, optimizer, _ = build(layout, 2)

    def load() -> None:
        model_state, optim_state = holdfast.get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optim_state}
        holdfast.load(state, path, job=holdfast.Job(timeout=60, stall_timeout=20))
        holdfast.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )

    assert counted(load) == []
    wanted = torch.load(path + ".values", weights_only=True)
    found = everything(model, optimizer)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    return train(model, optimizer, range(steps, steps + 3), rank // layout.ep)


def train_and_save_itself(rank: int, path: str, layout: Layout, steps: int) -> list[float]:
    """As `train_and_save`, with the model and the optimizer in the state as they are, put there before the
    first step."""
    model, optimizer, _ = build(layout, 1)
    state = {"model": model, "optim": optimizer}
    train(model, optimizer, range(steps), rank // layout.ep)
    values = everything(model, optimizer)
    if rank == 0:
        torch.save(values, path + ".values")
    assert counted(lambda: holdfast.save(state, path, job=holdfast.Job(timeout=60, stall_timeout=20))) == []
    return train(model, optimizer, range(steps, steps + 3), rank // layout.ep)


def resume_by_a_load_alone(rank: int, path: str, layout: Layout, steps: int, itself: bool) -> list[float]:
    """As `resume`, by a load and nothing else: of the optimizer as it is, or of what get_state_dict gives for
    it."""
    model, optimizer, _ = build(layout, 2)
    state: dict[str, Any] = {"model": model, "optim": optimizer}
    if not itself:
        state = dict(zip(state, holdfast.get_state_dict(model, optimizer), strict=True))
    assert counted(lambda: holdfast.load(state, path, job=holdfast.Job(timeout=60, stall_timeout=20))) == []
    wanted = torch.load(path + ".values", weights_only=True)
    found = everything(model, optimizer)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    return train(model, optimizer, range(steps, steps + 3), rank // layout.ep)


class ByRows(torch.optim.Optimizer):
    """Keeps a mean square a row, sharded as its parameter's rows are. (torch's Adafactor does not work with
    DTensors.)"""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                grad, state = parameter.grad, self.state[parameter]
                state["rows"] = state.get("rows", 0) + grad.square().mean(1, keepdim=True)
                with torch.no_grad():
                    parameter.sub_(grad / (1 + state["rows"]), alpha=group["lr"])


def states_of_other_shapes(rank: int, path: str) -> str:
    """What is not shaped as its parameter can't be made, and is filled where it is there; returns the error
    of the former."""

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 7, bias=False), nn.Linear(7, 3, bias=False))
        fully_shard(model, mesh=init_device_mesh("cpu", (8,)))
        return model, ByRows(model.parameters())

    def learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    (model, optimizer), (other, fresh) = make(1), make(2)
    learn(model, optimizer)
    holdfast.save({"model": model, "optim": optimizer}, path, job=holdfast.Job(timeout=60, stall_timeout=20))
    state = {"model": other, "optim": fresh}
    try:
        holdfast.load(state, path, job=holdfast.Job(timeout=60, stall_timeout=20))
    except BadInput as error:
        words = str(error)
    learn(other, fresh)
    holdfast.load(state, path, job=holdfast.Job(timeout=60, stall_timeout=20))
    for _ in range(2):
        learn(model, optimizer)
        learn(other, fresh)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(a), whole(b))
        assert torch.equal(whole(optimizer.state[a]["rows"]), whole(fresh.state[b]["rows"]))
    return words


def without_functions(rank: int, path: str) -> None:
    """`model.state_dict()`, and the module itself, as they are, from one mesh to another."""
    model = build(Layout(8, ep=2), 1)[0]
    holdfast.save(
        {"dict": model.state_dict(), "module": model}, path, job=holdfast.Job(timeout=60, stall_timeout=20)
    )
    values = {name: whole(value) for name, value in model.state_dict().items()}
    for key in ("dict", "module"):
        other = build(Layout(8, ep=4, replicas=2), 2)[0]
        holdfast.load(
            {key: other.state_dict() if key == "dict" else other},
            path,
            job=holdfast.Job(timeout=60, stall_timeout=20),
        )
        found = {name: whole(value) for name, value in other.state_dict().items()}
        assert all(torch.equal(found[name], value) for name, value in values.items())


LOST = "layers.0.experts.w1"


def lose_a_state(rank: int, path: str, layout: Layout, missing: str, who: int) -> None:
    """Save while one rank has no optimizer state of one parameter, as if none of its experts had ever been
    routed to."""
    model, optimizer, _ = build(layout, 1)
    train(model, optimizer, range(2), rank // layout.ep)
    kept = everything(model, optimizer)[f"optim.{LOST}.exp_avg"]
    had = bool(
        optimizer.state[dict(model.named_parameters())[LOST]]["exp_avg"].to_local().any()
    )  # experts without tokens have zeros
    parameter = dict(model.named_parameters())[LOST]
    assert isinstance(parameter, DTensor)
    if rank == who:
        del optimizer.state[parameter]
    model_state, optim_state = holdfast.get_state_dict(model, optimizer, missing=missing)
    holdfast.save(
        {"model": model_state, "optim": optim_state}, path, job=holdfast.Job(timeout=60, stall_timeout=20)
    )
    other, fresh, _ = build(layout, 2)
    model_state, optim_state = holdfast.get_state_dict(other, fresh)
    state = {"model": model_state, "optim": optim_state}
    holdfast.load(state, path, job=holdfast.Job(timeout=60, stall_timeout=20))
    holdfast.set_state_dict(other, fresh, model_state_dict=state["model"], optim_state_dict=state["optim"])
    mine = fresh.state[dict(other.named_parameters())[LOST]]
    assert float(mine["step"]) == 2.0  # that of those who had it
    assert bool(mine["exp_avg"].to_local().any()) == (had and rank != who)
    assert everything(other, fresh)[f"optim.{LOST}.exp_avg"].ne(0).sum() < kept.ne(0).sum()


def save_after_an_evaluation(rank: int, path: str, layout: Layout) -> None:
    """A forward without a backward leaves whole parameters in the root, which its optimizer does not have."""
    model, optimizer, _ = build(layout, 1)
    train(model, optimizer, range(2), rank // layout.ep)
    kept = everything(model, optimizer)
    before = dict(zip(("model", "optim"), holdfast.get_state_dict(model, optimizer), strict=True))
    job = holdfast.Job(timeout=60, stall_timeout=20)

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.arange(4))
        assert not all(isinstance(parameter, DTensor) for parameter in model.parameters())

    evaluate()
    holdfast.save({"optim": before["optim"], "weights": before["model"]}, path, job=job)
    evaluate()
    holdfast.load({"optim": before["optim"], "weights": before["model"]}, path, job=job)
    evaluate()
    model_state, optim_state = holdfast.get_state_dict(model, optimizer)
    evaluate()
    holdfast.set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    after = everything(model, optimizer)
    assert kept.keys() == after.keys()
    assert [name for name, value in kept.items() if not torch.equal(value, after[name])] == []


def switch_from_torch(rank: int, path: str, layout: Layout) -> None:
    """What torch's functions and DCP saved, loaded by ours, nested and flat."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model, optimizer, _ = build(layout, 1)
    train(model, optimizer, range(2), rank // layout.ep)
    del optimizer.state[dict(model.named_parameters())[LOST]]  # torch leaves out what is nowhere
    values = everything(model, optimizer)
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model_state, optim_state = get_state_dict(model, optimizer, options=options)
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=f"{path}-{flat}")
        other, fresh, _ = build(layout, 2)
        model_state, optim_state = holdfast.get_state_dict(other, fresh, flatten_optimizer_state_dict=flat)
        state = {"model": model_state, "optim": optim_state}
        holdfast.load(state, f"{path}-{flat}", job=holdfast.Job(timeout=60, stall_timeout=20))
        holdfast.set_state_dict(
            other, fresh, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        found = everything(other, fresh)
        assert found.keys() == values.keys()
        assert all(torch.equal(found[name], value) for name, value in values.items())


def fingerprints_beside_a_bfloat16_folder(rank: int, path: str) -> Any:
    """Fingerprints of a float32 model under HSDP, with a tied output and a vocabulary of rows that are cut; rank 0
    writes it whole, rounded, as a folder of safetensors."""
    from safetensors.torch import save_file

    torch.manual_seed(5)
    model = nn.Sequential()
    for name, part in (
        ("embedding", nn.Embedding(24, HIDDEN)),
        ("up", nn.Linear(HIDDEN, 16)),
        ("norm", nn.LayerNorm(16)),
    ):
        model.add_module(name, part)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("replica", "fsdp")))
    state = dict(model.state_dict())
    assert isinstance(state["up.weight"], DTensor)
    assert state["up.weight"].to_local().shape == (4, HIDDEN)
    state["head.weight"] = state["embedding.weight"]
    found: list[Any] = []
    job = holdfast.Job(timeout=60, stall_timeout=30)
    assert counted(lambda: found.append(holdfast.fingerprint(state, job=job))) == []
    full = {name: whole(value).bfloat16() for name, value in state.items()}
    if rank == 0:
        save_file({name: value.clone() for name, value in full.items()}, path)
    return found[0]
