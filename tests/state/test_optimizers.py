"""Optimizers of every kind go on in a fresh process as if nothing had been: torch's own, and others with
other states."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import holdfast
import holdfast.dcp as holdfast_dcp
from holdfast._tools.checkpoints.inspect import describe
from holdfast._tools.cli import cli
from holdfast.errors import BadInput, LoadFailed, MissingTensors, ShapeMismatch
from tests.state.optimizers import equal_states, equal_weights, model_of, train

Optimizer = torch.optim.Optimizer
LAYOUTS = ("nested", "flat", "itself")


def matrices(parameters: Any) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.dim() == 2]


class Lists(Optimizer):
    """Shampoo's layout: lists and dicts of matrices, numbers for keys, a history that grows; and a count in
    the group."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state, grad = self.state[parameter], parameter.grad
                if not state:
                    state["sides"] = {
                        axis: {"at": torch.eye(size), "power": -1 / size}
                        for axis, size in enumerate(grad.shape)
                    }
                    state["history"] = []
                    state["moment"] = torch.zeros_like(parameter)
                    self.more(state, parameter)
                state["history"].append(grad.clone())
                for axis, side in state["sides"].items():
                    rows = grad.movedim(axis, 0).flatten(1) if grad.dim() > 1 else grad[:, None]
                    side["at"] += rows @ rows.T
                    grad = torch.tensordot(side["at"], grad, ([1], [axis])).movedim(0, axis) * side["power"]
                state["moment"].add_(grad)
                with torch.no_grad():
                    parameter.add_(state["moment"] + state["history"][0], alpha=1e-3 / group["step"])

    def more(self, state: dict[str, Any], parameter: torch.Tensor) -> None:
        """Nothing more."""


class Mixed(Lists):
    """A tuple, too, and a tensor that does not lie as its parameter does."""

    def more(self, state: dict[str, Any], parameter: torch.Tensor) -> None:
        state["pair"] = (state["moment"].clone() + 1, torch.ones(()))
        state["turned"] = torch.arange(6.0).view(2, 3).T


class Growing(Optimizer):
    """A state that is there from the start, and gets more values at the first step; one that belongs to no
    parameter."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                mask = torch.zeros_like(parameter, dtype=torch.bool)
                self.state[parameter] = {"mask": mask, "past": [], "first": None}

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["mask"] |= parameter.grad > 0
                state["moment"] = state.get("moment", 0) + parameter.grad
                state["past"].append(parameter.grad.sum())
                state["first"] = parameter.grad.sum() if state["first"] is None else state["first"]
                with torch.no_grad():
                    parameter.sub_(
                        state["moment"] * state["mask"] * sum(state["past"]) * state["first"], alpha=1e-3
                    )


class Counting(Growing):
    """One whose state has a value that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        self.state["total"] = self.state.get("total", 0) + 1  # type: ignore[index,call-overload]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                with torch.no_grad():
                    parameter.mul_(1 - 0.01 * self.state["total"])  # type: ignore[index]


KINDS: list[Any] = [
    pytest.param(kind, id=name)
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if kind is not Optimizer and issubclass(kind, Optimizer) and name != "SparseAdam"
]
KINDS += [
    pytest.param(partial(torch.optim.Adam, lr=torch.tensor(0.01)), id="Adam tensor lr"),
    pytest.param(partial(torch.optim.Adam, amsgrad=True), id="Adam amsgrad"),
    pytest.param(partial(torch.optim.AdamW, fused=True), id="AdamW fused"),
    pytest.param(partial(torch.optim.AdamW, foreach=True), id="AdamW foreach"),
    pytest.param(partial(torch.optim.SGD, momentum=0.9), id="SGD momentum"),
    pytest.param(Lists, id="nested"),
    pytest.param(Mixed, id="mixed"),
    pytest.param(Growing, id="growing"),
]
OTHERS = ("Lion", "Shampoo", "SOAP", "AdaFactor", "SPlus", "GaLore", "ScheduleFreeAdamW", "SaRA")


def made(kind: Any, model: nn.Module) -> Optimizer:
    parameters: Any = model.parameters()
    if kind is getattr(torch.optim, "Muon", torch):  # since torch 2.9
        parameters = matrices(parameters)
    how = {} if isinstance(kind, partial) and "lr" in kind.keywords else {"lr": 0.01}
    optimizer: Optimizer = kind(parameters, **how)
    return optimizer


def state_of(model: nn.Module, optimizer: Optimizer, layout: str) -> dict[str, Any]:
    if layout == "itself":
        return {"model": model, "optim": optimizer}
    found = holdfast.get_state_dict(model, optimizer, flatten_optimizer_state_dict=layout == "flat")
    return dict(zip(("model", "optim"), found, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_goes_on_where_it_was(kind: Any, layout: str, tmp_path: Path) -> None:
    """In a fresh process, by a load alone; then once more, over what it has by then."""
    model, other = model_of(1), model_of(2)
    optimizer, fresh = made(kind, model), made(kind, other)
    train(model, optimizer, range(3))
    holdfast.save(state_of(model, optimizer, layout), tmp_path / "3", job=holdfast.Job(no_dist=True))
    state = state_of(other, fresh, layout)
    holdfast.load(state, tmp_path / "3", job=holdfast.Job(no_dist=True))
    equal_weights(model, other)
    equal_states(model, optimizer, other, fresh)
    train(model, optimizer, range(3, 5))
    train(other, fresh, range(3, 5))
    equal_weights(model, other)
    equal_states(model, optimizer, other, fresh)
    holdfast.save(state_of(model, optimizer, layout), tmp_path / "5", job=holdfast.Job(no_dist=True))
    train(other, fresh, range(5, 7))
    holdfast.load(state, tmp_path / "5", job=holdfast.Job(no_dist=True))
    equal_weights(model, other)
    equal_states(model, optimizer, other, fresh)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_of_others_goes_on_where_it_was(name: str, layout: str, tmp_path: Path) -> None:
    """Of the package pytorch_optimizer: one moment, matrices in lists, values that come later, counts in the
    group."""
    zoo = pytest.importorskip("pytorch_optimizer", reason="the Makefile installs it")
    test_an_optimizer_goes_on_where_it_was(getattr(zoo, name), layout, tmp_path)


def test_sparse_gradients(tmp_path: Path) -> None:
    """SparseAdam: dense moments, of a table of which some rows have a gradient."""

    def pair(seed: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        table = nn.Embedding(5, 3, sparse=True)
        return table, torch.optim.SparseAdam(table.parameters(), lr=0.1)

    def learn(table: nn.Module, optimizer: Optimizer, word: int) -> None:
        table(torch.tensor([word, 1])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    (table, optimizer), (other, fresh) = pair(1), pair(2)
    learn(table, optimizer, 3)
    holdfast.save({"model": table, "optim": optimizer}, tmp_path, job=holdfast.Job(no_dist=True))
    holdfast.load({"model": other, "optim": fresh}, tmp_path, job=holdfast.Job(no_dist=True))
    for table_, optimizer_ in ((table, optimizer), (other, fresh)):
        learn(table_, optimizer_, 4)
    equal_weights(table, other)
    equal_states(table, optimizer, other, fresh)


def test_a_value_that_belongs_to_no_parameter(tmp_path: Path) -> None:
    """It has a place in the optimizer's own state, and none in torch's layout by names."""
    model, other = model_of(1), model_of(2)
    optimizer, fresh = made(Counting, model), made(Counting, other)
    train(model, optimizer, range(2))
    holdfast.save({"model": model, "optim": optimizer}, tmp_path, job=holdfast.Job(no_dist=True))
    holdfast.load({"model": other, "optim": fresh}, tmp_path, job=holdfast.Job(no_dist=True))
    assert fresh.state["total"] == 2  # type: ignore[index,comparison-overlap]
    for model_, optimizer_ in ((model, optimizer), (other, fresh)):
        train(model_, optimizer_, range(2, 4))
    equal_weights(model, other)
    with pytest.raises(BadInput, match="Counting keeps a state 'total' that belongs to no parameter"):
        holdfast.get_state_dict(model, optimizer)


class InFloat32(Optimizer):
    """Keeps float32 moments of bfloat16 parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["moment"] = state.get("moment", 0) + parameter.grad.float() / 3
                state["several"] = [state["moment"] * 2]
                parameter.data.sub_(state["moment"].to(parameter.dtype), alpha=group["lr"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moments_keep_their_dtype(layout: str, tmp_path: Path) -> None:
    """torch's own load_state_dict casts them to the parameter's."""
    model, other = (model_of(seed).to(torch.bfloat16) for seed in (1, 2))
    optimizer, fresh = (InFloat32(m.parameters(), 0.1) for m in (model, other))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    holdfast.save(state_of(model, optimizer, layout), tmp_path, job=holdfast.Job(no_dist=True))
    holdfast.load(state_of(other, fresh, layout), tmp_path, job=holdfast.Job(no_dist=True))
    equal_states(model, optimizer, other, fresh)
    assert fresh.state[other[0].weight]["several"][0].dtype == torch.float32


class Later(Optimizer):
    """A plain state from the start, with another value from the first step on."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"first": torch.zeros_like(parameter)}

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["moment"] = state.get("moment", 0) + parameter.grad
                state["first"] += parameter.grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_made_lies_as_its_parameter_does(layout: str, tmp_path: Path) -> None:
    """A DTensor's is a DTensor, whether the state was empty or had something in it already."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def pair(kind: Any) -> tuple[nn.Module, Optimizer]:
            model = model_of(1)
            for module in (model[0], model[2]):
                weight = distribute_tensor(module.weight.detach(), mesh, [Shard(0)])
                module.weight = nn.Parameter(weight)
            optimizer: Optimizer = kind(model.parameters(), lr=0.1)
            return model, optimizer

        for kind in (Later, torch.optim.AdamW):
            (model, optimizer), (other, fresh) = pair(kind), pair(kind)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            path = tmp_path / kind.__name__
            holdfast.save(state_of(model, optimizer, layout), path)
            holdfast.load(state_of(other, fresh, layout), path)
            for a, b in zip(model.parameters(), other.parameters(), strict=True):
                for key, value in optimizer.state[a].items():
                    made = fresh.state[b][key]
                    assert type(made) is type(value), key
                    assert getattr(made, "placements", None) == getattr(value, "placements", None)
                    local, wanted = (getattr(v, "_local_tensor", v) for v in (made, value))
                    assert torch.equal(local, wanted)
    finally:
        dist.destroy_process_group()


def test_a_nested_state_of_another_length_replaces_the_present_one(tmp_path: Path) -> None:
    """A history that was longer, or shorter, than the present one; none of it is left over, and none is
    missing."""
    model = model_of(1)
    optimizer = made(Lists, model)
    train(model, optimizer, range(3))
    holdfast.save(state_of(model, optimizer, "nested"), tmp_path, job=holdfast.Job(no_dist=True))
    for steps in (1, 5):
        other = model_of(2)
        fresh = made(Lists, other)
        train(other, fresh, range(steps))
        kept = fresh.state[other[0].weight]["sides"][0]["at"]
        holdfast.load(state_of(other, fresh, "nested"), tmp_path, job=holdfast.Job(no_dist=True))
        equal_states(model, optimizer, other, fresh)
        assert fresh.state[other[0].weight]["sides"][0]["at"] is kept  # what fits is filled where it lies


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Growing])
def test_lists_that_fill_up_are_no_names_that_vanish(kind: Callable[..., Optimizer], tmp_path: Path) -> None:
    """An empty history is saved before the first step of a run, a full one later."""
    model = model_of(1)
    optimizer = made(kind, model)
    state = {"itself": optimizer, "by name": holdfast.get_state_dict(model, optimizer)[1]}
    for number in range(3):
        holdfast.save(state, tmp_path, job=holdfast.Job(no_dist=True))
        other = model_of(2)
        fresh = made(kind, other)
        holdfast.load({"itself": fresh}, tmp_path, job=holdfast.Job(no_dist=True))
        equal_states(model, optimizer, other, fresh)
        train(model, optimizer, [number])


def test_a_nested_state_that_is_gone_is_told(tmp_path: Path) -> None:
    model = model_of(1)
    optimizer = made(Lists, model)
    train(model, optimizer, range(1))
    state = state_of(model, optimizer, "nested")
    holdfast.save(state, tmp_path, job=holdfast.Job(no_dist=True), exclude=["optim.state.0.weight"])
    with pytest.raises(
        MissingTensors, match=r"nothing of 'optim.state.0.weight', a state that the optimizer has"
    ):
        holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True))
    report = holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True), strict=False)
    assert report.missing == ("optim.state.0.weight",)


@pytest.mark.parametrize(
    "kind",
    [
        Lists,
        pytest.param(
            torch.optim.LBFGS,
            marks=pytest.mark.skipif(torch.__version__ < "2.8", reason="torch can't fill it"),
        ),
        torch.optim.Adafactor,
    ],
)
def test_torch_dcp_loads_what_is_exported(kind: Callable[..., Optimizer], tmp_path: Path) -> None:
    """Nested states, too: what says how they are built is one more name, which nobody else asks for."""
    model, other = model_of(1), model_of(2)
    optimizer, fresh = made(kind, model), made(kind, other)
    train(model, optimizer, range(2))
    train(other, fresh, range(2))
    holdfast.save(state_of(model, optimizer, "nested"), tmp_path / "ours", job=holdfast.Job(no_dist=True))
    cli.main(
        ["export", "torch_dist", str(tmp_path / "ours"), str(tmp_path / "theirs")], standalone_mode=False
    )
    state = {"model": other.state_dict(), "optim": theirs.get_optimizer_state_dict(other, fresh)}
    groups = state["optim"].pop("param_groups")  # one object for us, several for DCP
    dcp.load(state, checkpoint_id=str(tmp_path / "theirs"))
    options = theirs.StateDictOptions(strict=False)  # LBFGS has a state for its first parameter only
    theirs.set_optimizer_state_dict(other, fresh, {**state["optim"], "param_groups": groups}, options=options)
    equal_weights(model, other)
    if kind is Lists:  # DCP puts values that are no tensors under keys that are text
        for found in fresh.state.values():
            found["sides"] = {
                axis: {**found["sides"][axis], **found["sides"][str(axis)]}
                for axis in range(len(found["sides"]) // 2)
            }
    equal_states(model, optimizer, other, fresh)


@pytest.mark.parametrize("kind", [Lists, torch.optim.LBFGS, torch.optim.Adamax])
@pytest.mark.parametrize("by_name", [True, False])
def test_what_torch_dcp_saved_is_loaded(
    kind: Callable[..., Optimizer], by_name: bool, tmp_path: Path
) -> None:
    """It does not say which container is which: numbers from 0 on are taken for a list's, as LBFGS has
    them."""
    model, other = model_of(1), model_of(2)
    optimizer, fresh = made(kind, model), made(kind, other)
    train(model, optimizer, range(3))
    state: dict[str, Any] = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    if by_name:
        state["optim"] = theirs.get_optimizer_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=str(tmp_path))
    holdfast.load(
        state_of(other, fresh, "nested" if by_name else "itself"), tmp_path, job=holdfast.Job(no_dist=True)
    )
    equal_weights(model, other)
    if kind is Lists:
        for parameter in fresh.state:
            sides = fresh.state[parameter]["sides"]
            fresh.state[parameter]["sides"] = dict(enumerate(sides))
    equal_states(model, optimizer, other, fresh)


# -- states that are tensor subclasses ----------------------------------------------------------------


@pytest.fixture
def eight_bit() -> Any:
    """torchao's optimizers with 8-bit states, not compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip("torchao.optim", reason="the Makefile installs it")
    with torch.compiler.set_stance("force_eager"):
        yield found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["AdamW8bit", "Adam4bit", "AdamWFp8"])
def test_states_of_eight_bits(eight_bit: Any, name: str, layout: str, tmp_path: Path) -> None:
    def pair(seed: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 64))  # below 4096 elements they keep float32
        return model, getattr(eight_bit, name)(model.parameters(), lr=0.01)

    (model, optimizer), (other, fresh) = pair(1), pair(2)
    train(model, optimizer, range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holdfast.save(state_of(model, optimizer, layout), tmp_path, job=holdfast.Job(no_dist=True))
        state = state_of(other, fresh, layout)
        holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True))
    names = {f.name for f in describe(tmp_path).shown}  # type: ignore[union-attr]
    assert any(name.endswith("exp_avg.codes") for name in names)
    equal_states(model, optimizer, other, fresh)
    for model_, optimizer_ in ((model, optimizer), (other, fresh)):
        train(model_, optimizer_, range(2, 4))
    equal_weights(model, other)
    equal_states(model, optimizer, other, fresh)
    codes = fresh.state[other[0].weight]["exp_avg"]
    holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True))  # over what is there, in place
    train(model, optimizer, range(0))
    assert fresh.state[other[0].weight]["exp_avg"] is codes or layout == "itself"


def one_step(model: torch.nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stepped", [False, True])
def test_casts_follow_the_parameter_and_leave_counters_alone(
    layout: str, stepped: bool, tmp_path: Path
) -> None:
    model, other = model_of(1), model_of(2).to(torch.bfloat16)
    optimizer, fresh = (torch.optim.AdamW(m.parameters(), 0.1) for m in (model, other))
    one_step(model, optimizer)
    for state in optimizer.state.values():
        state["step"].fill_(1001)
    if stepped:
        one_step(other, fresh)
    holdfast.save(state_of(model, optimizer, layout), tmp_path, job=holdfast.Job(no_dist=True))
    holdfast.load(state_of(other, fresh, layout), tmp_path, cast=True, job=holdfast.Job(no_dist=True))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        was, now = optimizer.state[one], fresh.state[two]
        assert (now["step"].dtype, now["step"].item()) == (torch.float32, 1001)
        for key in ("exp_avg", "exp_avg_sq"):
            assert now[key].dtype == torch.bfloat16
            assert torch.equal(now[key], was[key].bfloat16())
    one_step(other, fresh)
    values = holdfast.load(tmp_path, cast=torch.bfloat16)
    [*states] = (value for name, value in leaves_below(values) if name == "step")
    assert states
    assert all((value.dtype, value.item()) == (torch.float32, 1001) for value in states)


def leaves_below(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves_below(part, str(key).rpartition(".")[2])
    elif isinstance(value, torch.Tensor):
        yield name, value


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cast_that_is_not_of_the_parameter_changes_no_moment(layout: str, tmp_path: Path) -> None:
    model, other = (model_of(seed).to(torch.bfloat16) for seed in (1, 2))
    optimizer, fresh = (InFloat32(m.parameters(), 0.1) for m in (model, other))
    one_step(model, optimizer)
    holdfast.save(state_of(model, optimizer, layout), tmp_path, job=holdfast.Job(no_dist=True))
    holdfast.load(state_of(other, fresh, layout), tmp_path, cast=True, job=holdfast.Job(no_dist=True))
    equal_states(model, optimizer, other, fresh)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "rates", [(0.01, 0.05), (0.01, torch.tensor(0.05)), (torch.tensor(0.01), 0.05)], ids=str
)
def test_a_learning_rate_may_become_a_tensor_or_a_number(
    layout: str, rates: tuple[Any, Any], tmp_path: Path
) -> None:
    """As with torch.load: the next step is that of the run that was saved."""
    model, other = model_of(1), model_of(2)
    optimizer, fresh = (
        torch.optim.AdamW(m.parameters(), lr=rate) for m, rate in zip((model, other), rates, strict=True)
    )
    one_step(model, optimizer)
    holdfast.save(state_of(model, optimizer, layout), tmp_path, job=holdfast.Job(no_dist=True))
    holdfast.load(state_of(other, fresh, layout), tmp_path, job=holdfast.Job(no_dist=True))
    assert type(fresh.param_groups[0]["lr"]) is type(rates[0])
    one_step(model, optimizer)
    one_step(other, fresh)
    equal_weights(model, other)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("saves", [dcp, holdfast_dcp], ids=["torch", "holdfast"])
@pytest.mark.parametrize("rates", [(0.01, torch.tensor(0.05)), (torch.tensor(0.01), 0.05)], ids=str)
def test_a_learning_rate_of_another_kind_by_the_functions_of_dcp(
    flat: bool, saves: Any, rates: tuple[Any, Any], tmp_path: Path
) -> None:
    model, other = model_of(1), model_of(2)
    optimizer, fresh = (
        torch.optim.AdamW(m.parameters(), lr=rate) for m, rate in zip((model, other), rates, strict=True)
    )
    one_step(model, optimizer)
    options = theirs.StateDictOptions(flatten_optimizer_state_dict=flat)
    names = ("model", "optimizer")
    state = dict(zip(names, theirs.get_state_dict(model, optimizer, options=options), strict=True))
    saves.save(state, checkpoint_id=tmp_path)
    state = dict(zip(names, theirs.get_state_dict(other, fresh, options=options), strict=True))
    holdfast_dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    theirs.set_state_dict(
        other,
        fresh,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    one_step(model, optimizer)
    one_step(other, fresh)
    equal_weights(model, other)


def test_only_numbers_and_tensors_without_dimensions_are_exchanged(tmp_path: Path) -> None:
    alone = holdfast.Job(no_dist=True)
    holdfast.save({"a": "text", "b": torch.ones(1), "c": [{"x": 1}]}, tmp_path, job=alone)
    for name, value in (("a", torch.ones(())), ("a", torch.ones(4)), ("b", 1.0)):
        with pytest.raises(ShapeMismatch, match="can't be exchanged"):
            holdfast.load({name: value}, tmp_path, job=alone)
    with pytest.raises(MissingTensors, match=r"The stored object 'c' has no '0\.y' in it"):
        holdfast.load({"c": [{"y": torch.ones(())}]}, tmp_path, job=alone)
    state = {"c": [{"x": torch.ones(())}]}
    holdfast.load(state, tmp_path, job=alone)
    assert state == {"c": [{"x": 1}]}
    state = {"c": [{"x": torch.ones(()), "y": torch.tensor(7.0)}]}
    report = holdfast.load(state, tmp_path, strict=False, job=alone)
    assert state == {"c": [{"x": 1, "y": torch.tensor(7.0)}]}
    assert (report.tensors, report.missing) == (1, ("c.0.y",))


class Schedule:
    """Its state is a copy, which only `load_state_dict` takes back."""

    def __init__(self, rate: float | torch.Tensor) -> None:
        self.rates = [rate]

    def state_dict(self) -> dict[str, Any]:
        return {"rates": [*self.rates]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates = state["rates"]


@pytest.mark.parametrize("patterns", [{}, {"include": ["s"]}, {"include": ["s.*"]}, {"exclude": ["w"]}])
def test_an_object_takes_its_state_back_if_only_parts_of_a_stored_value_are_loaded(
    patterns: dict[str, Any], tmp_path: Path
) -> None:
    alone = holdfast.Job(no_dist=True)
    holdfast.save({"w": torch.ones(1), "s": Schedule(0.5)}, tmp_path, job=alone)
    fresh = Schedule(torch.tensor(0.0))
    report = holdfast.load({"w": torch.zeros(1), "s": fresh}, tmp_path, job=alone, **patterns)
    assert fresh.rates == [0.5]
    assert report.tensors == (1 if patterns else 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "kinds", [("AdamW", "SGD"), ("SGD", "Adam"), ("Adam", "RMSprop"), ("AdamW", "NAdam")]
)
def test_a_fresh_optimizer_of_another_kind_is_not_filled(
    kinds: tuple[str, str], layout: str, tmp_path: Path
) -> None:
    """It has no states yet, which would be missed."""
    model, other = model_of(), model_of()
    saved = getattr(torch.optim, kinds[0])(model.parameters(), lr=0.01)
    fresh = getattr(torch.optim, kinds[1])(other.parameters(), lr=0.5)
    one_step(model, saved)
    before = dict(fresh.param_groups[0])
    holdfast.save({"o": state_of(model, saved, layout)}, tmp_path)
    with pytest.raises((BadInput, LoadFailed, MissingTensors)) as told:
        holdfast.load({"o": state_of(other, fresh, layout)}, tmp_path)
    if layout != "flat":
        assert f"The checkpoint's optimizer was another one than {kinds[1]}: it was saved with" in str(
            told.value
        )
    assert fresh.param_groups[0] == before
    assert not any(fresh.state.values())


def of_named(model: nn.Module, backwards: bool = False, prefix: str = "") -> Optimizer:
    named = [(f"{prefix}{name}", parameter) for name, parameter in model.named_parameters()]
    try:
        return torch.optim.Adam(named[::-1] if backwards else named, lr=0.01)
    except TypeError:
        pytest.skip("this torch takes no named parameters")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_in_another_order_get_their_own_states_or_an_error(layout: str, tmp_path: Path) -> None:
    """As those of a set, whose order is another one in each process."""
    model, other = model_of(1), model_of(2)
    saved, fresh = of_named(model), of_named(other, backwards=True)
    train(model, saved, range(2))
    holdfast.save(state_of(model, saved, layout), tmp_path, job=holdfast.Job(no_dist=True))
    state = state_of(other, fresh, layout)
    if layout == "itself":
        with pytest.raises(
            LoadFailed, match=r"in another order than the checkpoint: '.*' is number \d+ there"
        ):
            holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True))
        assert not any(fresh.state.values())
        return
    holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True))
    for there, here in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(saved.state[there]["exp_avg"], fresh.state[here]["exp_avg"])


@pytest.mark.parametrize("by", ["a hook", "other names"])
def test_a_hook_may_put_parameters_in_order_and_other_names_are_no_other_order(
    by: str, tmp_path: Path
) -> None:
    model, other = model_of(1), model_of(2)
    saved, fresh = (
        of_named(model),
        of_named(other, backwards=by == "a hook", prefix="" if by == "a hook" else "m."),
    )
    train(model, saved, range(2))

    def by_names(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        numbers = {name: number for number, name in enumerate(state["param_groups"][0]["param_names"])}
        names = optimizer.param_groups[0]["param_names"]
        return {**state, "state": {at: state["state"][numbers[name]] for at, name in enumerate(names)}}

    if by == "a hook":
        fresh.register_load_state_dict_pre_hook(by_names)
    holdfast.save({"optim": saved}, tmp_path, job=holdfast.Job(no_dist=True))
    holdfast.load({"optim": fresh}, tmp_path, job=holdfast.Job(no_dist=True))
    for there, here in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(saved.state[there]["exp_avg"], fresh.state[here]["exp_avg"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_settings_of_schedulers_users_and_other_versions_are_no_other_optimizer(
    layout: str, tmp_path: Path
) -> None:
    """Of the checkpoint's group a version of torch has no `amsgrad`, and a scheduler and a user have added more."""
    model, other = model_of(), model_of()
    saved = torch.optim.Adam(model.parameters(), lr=0.01)
    one_step(model, saved)
    for group in saved.param_groups:
        del group["amsgrad"]
        group |= {"initial_lr": 0.01, "max_lr": 0.1, "max_momentum": 0.9, "layer": 3}
    holdfast.save({"o": state_of(model, saved, layout)}, tmp_path)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    for group in fresh.param_groups:
        group["pace"] = 2
        if layout == "flat":
            del group["amsgrad"], group["pace"]
    holdfast.load({"o": state_of(other, fresh, layout)}, tmp_path)
    assert fresh.param_groups[0]["lr"] == 0.01
    assert fresh.param_groups[0]["layer"] == 3
