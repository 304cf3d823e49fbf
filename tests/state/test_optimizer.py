"""Models and optimizers as states by names: no step, any optimizer, what is not there, and what can't be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import holdfast
from holdfast._tools.checkpoints.inspect import describe
from holdfast.errors import BadInput, MissingTensors, ShapeMismatch
from tests.state.optimizers import equal_states, equal_weights, model_of
from tests.support.threads import on_ranks

Optimizer = torch.optim.Optimizer


def step(model: nn.Module, optimizer: Optimizer, times: int = 2) -> None:
    for number in range(times):
        model(torch.full((5, 3), 0.1 * number + 0.1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: Any, optimizer: Any, **how: Any) -> dict[str, Any]:
    model_state, optim_state = holdfast.get_state_dict(model, optimizer, **how)
    return {"model": model_state, "optim": optim_state}


def save(path: Path, model: Any, optimizer: Any, **how: Any) -> None:
    holdfast.save(state_of(model, optimizer, **how), path, job=holdfast.Job(no_dist=True), expected=None)


def load(path: Path, model: Any, optimizer: Any, **how: Any) -> None:
    state = state_of(model, optimizer, **how)
    holdfast.load(state, path, job=holdfast.Job(no_dist=True))
    holdfast.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )


@pytest.mark.parametrize("flat", [False, True])
def test_set_state_dict_runs_no_step(flat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = model_of(1), model_of(2)
    optimizer, fresh = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, other))
    step(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", lambda *_: pytest.fail("a step was run"))
        save(tmp_path, model, optimizer, flatten_optimizer_state_dict=flat)
        load(tmp_path, other, fresh, flatten_optimizer_state_dict=flat)
    equal_weights(model, other)
    equal_states(model, optimizer, other, fresh)
    step(model, optimizer, 3)
    step(other, fresh, 3)
    equal_weights(model, other)


def test_what_no_rank_has_is_not_made(tmp_path: Path) -> None:
    model, other = model_of(1), model_of(2)
    model[2].requires_grad_(False)
    optimizer, fresh = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, other))
    step(model, optimizer)
    save(tmp_path, model, optimizer)
    names = {found.name for found in describe(tmp_path).shown}  # type: ignore[union-attr]
    assert "optim.state.0.weight.exp_avg" in names
    assert not [name for name in names if name.startswith("optim.state.2")]
    load(tmp_path, other, fresh)
    assert set(fresh.state) == {other[0].weight, other[0].bias}
    step(other, fresh)
    with pytest.raises(
        MissingTensors, match=r"'optim.state.2.weight"
    ):  # what it has now the checkpoint does not know
        load(tmp_path, other, fresh)


def test_zeros_are_saved_if_asked(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    del optimizer.state[model[2].weight]
    save(tmp_path, model, optimizer, missing="zeros")
    found = {found.name: found for found in describe(tmp_path).shown}  # type: ignore[union-attr]
    assert found["optim.state.2.weight.exp_avg"].shape == (2, 4)
    assert "optim.state.2.weight.step" not in found  # whoever has the state knows how many steps it took
    optimizer.state.clear()  # no rank knows what is to be zero
    save(tmp_path / "none", model, optimizer, missing="zeros")
    names = {found.name for found in describe(tmp_path / "none").shown}  # type: ignore[union-attr]
    assert not [name for name in names if name.startswith("optim.state")]
    with pytest.raises(BadInput, match="give 'skip' or 'zeros'"):
        holdfast.get_state_dict(model, optimizer, missing="maybe")


def test_moments_of_any_dtype_are_bit_exact(tmp_path: Path) -> None:
    """A parameter in bfloat16, its moments in float8 and float32, and a master copy in float64."""
    model = nn.Linear(5, 3, bias=False).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    value = torch.linspace(-2, 2, 15).view(3, 5)
    kinds = {"exp_avg": torch.float8_e4m3fn, "exp_avg_sq": torch.float32, "master": torch.float64}
    optimizer.state[model.weight] = {key: value.to(kind) for key, kind in kinds.items()}
    save(tmp_path, model, optimizer)
    wanted = dict(optimizer.state[model.weight])
    for key, kind in kinds.items():
        optimizer.state[model.weight][key] = torch.zeros(3, 5, dtype=kind)
    load(tmp_path, model, optimizer)
    for key, tensor in wanted.items():
        found = optimizer.state[model.weight][key]
        assert found.dtype == tensor.dtype
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_the_names_of_wrappers_are_taken_out() -> None:
    plain = model_of()
    names = set(plain.state_dict())
    wrapped = model_of()
    wrapped[0] = checkpoint_wrapper(wrapped[0])
    wrapped[2] = torch.compile(wrapped[2])
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    found = state_of(torch.compile(wrapped), optimizer)
    assert set(found["model"]) == names
    assert set(found["optim"]["state"]) == names
    assert found["optim"]["param_groups"][0]["params"] == ["0.weight", "0.bias", "2.weight"]


def test_two_values_of_one_name_are_refused() -> None:
    model = model_of()
    model[0] = checkpoint_wrapper(model[0])
    model[0]._parameters["weight"] = nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(
        BadInput, match=r"Two parameters of the model have the name '0.weight' once the names of wrappers"
    ):
        holdfast.get_state_dict(model)
    with pytest.raises(BadInput, match=r"have the name '0.weight'"):
        holdfast.get_state_dict([model_of(1), model_of(2)])


def test_parts_of_a_model_and_several_optimizers(tmp_path: Path) -> None:
    parts = [nn.ModuleDict({"first": nn.Linear(2, 2)}), nn.ModuleDict({"second": nn.Linear(2, 2)})]
    optimizers = [
        torch.optim.SGD(part.parameters(), lr=0.1 * (at + 1), momentum=0.9) for at, part in enumerate(parts)
    ]
    for part, optimizer in zip(parts, optimizers, strict=True):
        for parameter in part.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    save(tmp_path, parts, optimizers, flatten_optimizer_state_dict=True)
    one = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    joint = torch.optim.SGD(
        [{"params": one["first"].parameters(), "lr": 9.0}, {"params": one["second"].parameters(), "lr": 9.0}],
        momentum=0.9,
    )
    load(tmp_path, one, joint, flatten_optimizer_state_dict=True)
    assert [group["lr"] for group in joint.param_groups] == [0.1, 0.2]
    assert torch.equal(joint.state[one["second"].weight]["momentum_buffer"], torch.ones(2, 2))
    together = torch.optim.SGD(one.parameters(), lr=9.0, momentum=0.9)
    with pytest.raises(BadInput, match=r"'first.weight' and 'second.weight' are in one parameter group here"):
        load(tmp_path, one, together, flatten_optimizer_state_dict=True)


def test_tied_parameters_have_one_state(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 3)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.head(model.embedding(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    found = state_of(model, optimizer)
    assert set(found["model"]) == {"embedding.weight", "head.weight"}
    assert set(found["optim"]["state"]) == {"embedding.weight"}
    save(tmp_path, model, optimizer)
    other = Tied()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    load(tmp_path, other, fresh)
    assert other.head.weight is other.embedding.weight
    assert torch.equal(other.head.weight, model.head.weight)
    assert torch.equal(
        fresh.state[other.head.weight]["exp_avg"], optimizer.state[model.head.weight]["exp_avg"]
    )


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(BadInput, match=r"a parameter of shape \(4, 3\) that is not in the model"):
        holdfast.get_state_dict(model_of(1), torch.optim.AdamW(model_of(2).parameters()))


def test_a_part_of_a_state_is_refused(tmp_path: Path) -> None:
    """It is told by the states of parameters like it, and not by the names of an optimizer's values."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    del optimizer.state[model[0].weight]["exp_avg_sq"]
    save(tmp_path, model, optimizer)
    other = model_of()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    told = (
        r"^load of .*: all was read.*a part of the optimizer's state of '0.weight': 'exp_avg_sq' is not there"
    )
    with pytest.raises(MissingTensors, match=told) as caught:
        load(tmp_path, other, fresh)
    assert not fresh.state
    assert "Other ranks" not in str(caught.value)  # there are none

    def of_two(roster: Any) -> None:
        model = model_of()
        state = state_of(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        with pytest.raises(MissingTensors, match=rf"{told}.*Other ranks don't know of this\.$") as caught:
            holdfast.load(state, tmp_path, job=holdfast.Job(roster=roster))
        assert f"on rank {roster.rank} " in str(caught.value)

    on_ranks(2, of_two)


def test_names_that_differ_are_refused() -> None:
    model, optimizer = model_of(), torch.optim.SGD(model_of().parameters())
    del optimizer
    state = holdfast.get_state_dict(model)[0]
    with pytest.raises(BadInput, match=r"model_state_dict has '9.weight', and the model does not"):
        holdfast.set_state_dict(
            model, model_state_dict={**state, "9.weight": torch.zeros(1)}, optim_state_dict={}
        )
    del state["0.bias"]
    with pytest.raises(MissingTensors, match=r"The model has '0.bias', and model_state_dict does not"):
        holdfast.set_state_dict(model, model_state_dict=state, optim_state_dict={})
    holdfast.set_state_dict(model, model_state_dict=state, optim_state_dict={}, strict=False)
    with pytest.raises(BadInput, match="the key 'what'"):
        holdfast.set_state_dict(model, model_state_dict=state, optim_state_dict={"what": 1}, strict=False)


def test_torchs_options_are_heeded_or_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    model = model_of()
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    options = StateDictOptions(ignore_frozen_params=True, flatten_optimizer_state_dict=True)
    found = state_of(model, optimizer, options=options)
    assert set(found["model"]) == {"0.weight", "0.bias"}
    assert found["optim"]["param_groups.0.weight.lr"] == 0.1
    holdfast.set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"], options=options
    )
    for name in ("full_state_dict", "cpu_offload"):
        with pytest.raises(BadInput, match=f"takes no {name}: each rank gives and takes its own part"):
            holdfast.get_state_dict(model, optimizer, options=StateDictOptions(**{name: True}))


def test_fsdp1_is_refused() -> None:
    class FullyShardedDataParallel(nn.Module):
        """Told by the name of its class, as the real one is."""

    model = nn.Sequential(FullyShardedDataParallel())
    with pytest.raises(BadInput, match="'0' is wrapped by FSDP1"):
        holdfast.get_state_dict(model)


def trained(seed: int = 1, make: Any = torch.optim.AdamW) -> tuple[nn.Sequential, Optimizer]:
    model = model_of(seed)
    optimizer = make(model.parameters())
    step(model, optimizer)
    return model, optimizer


def test_states_of_other_names_are_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, *trained())
    other = nn.ModuleDict({"other": nn.Linear(2, 2)})
    fresh = torch.optim.AdamW(other.parameters())
    state = {"optim": holdfast.get_state_dict(other, fresh)[1]}
    with pytest.raises(
        MissingTensors, match=r"has nothing of 'optim.state.other.weight', .* it has 'optim.state.0.bias"
    ):
        holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True))


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    model, optimizer = trained()
    with pytest.raises(BadInput, match=r"The parameter '0.weight' is in two groups, or in two optimizers"):
        holdfast.get_state_dict(model, [optimizer, torch.optim.SGD(model.parameters())])


def test_one_parameter_of_two_optimizers_is_refused() -> None:
    model = nn.Linear(2, 2, bias=False)
    both = [torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.parameters())]
    with pytest.raises(BadInput, match="'weight' is in two groups"):
        holdfast.get_state_dict(model, both)


def test_optimizers_of_two_kinds(tmp_path: Path) -> None:
    """Each has the numbers that it has: a state of the one does not want those of the other."""

    def pair(model: nn.Sequential) -> list[Optimizer]:
        return [
            torch.optim.NAdam(model[0].parameters()),
            torch.optim.SGD(model[2].parameters(), momentum=0.9),
        ]

    model, other = model_of(1), model_of(2)
    optimizers, fresh = pair(model), pair(other)
    for optimizer in optimizers:
        step(model, optimizer)
    save(tmp_path, model, optimizers)
    load(tmp_path, other, fresh)
    assert set(fresh[1].state[other[2].weight]) == {"momentum_buffer"}
    assert set(fresh[0].state[other[0].weight]) == set(optimizers[0].state[model[0].weight])


def test_lists_are_put_together_where_no_number_is_left_out(tmp_path: Path) -> None:
    for number, (there, expected) in enumerate(
        [
            (
                {"0": {"lr": 1, "t": torch.ones(1)}, "1": {"lr": 2}},
                [{"lr": 1, "t": torch.ones(1)}, {"lr": 2}],
            ),
            ({"0": {"b": {"c": [1]}}, "1": "z"}, [{"b": {"c": [1]}}, "z"]),
            ({"0": "x", "1": "y"}, None),
            ({"0": {"a": 1}, "2": {"a": 3}}, None),
            ({"foo": {"a": 1}}, None),
        ]
    ):
        path = tmp_path / str(number)
        holdfast.save({"a": there}, path, job=holdfast.Job(no_dist=True))
        state: dict[str, Any] = {"a": [1, 2]}
        if expected is not None:
            holdfast.load(state, path, job=holdfast.Job(no_dist=True))
            assert state == {"a": expected}
        else:
            with pytest.raises(MissingTensors, match="does not hold 1 of the names in the state: 'a'"):
                holdfast.load(state, path, job=holdfast.Job(no_dist=True))
            assert state == {"a": [1, 2]}


def test_patterns_reach_what_is_not_there_yet(tmp_path: Path) -> None:
    save(tmp_path, *trained())
    for how in ({"exclude": ["*.exp_avg_sq", "*.step"]}, {"include": ["*.exp_avg"]}):
        other = model_of(2)
        state = state_of(other, torch.optim.AdamW(other.parameters()))
        holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True), **how)
        assert set(state["optim"]["state"]["0.weight"]) == {"exp_avg"}
    model, optimizer = trained()
    del optimizer.state[model[2].weight]
    state = state_of(model, optimizer, missing="zeros")
    holdfast.save(state, tmp_path / "some", job=holdfast.Job(no_dist=True), exclude=["*.exp_avg_sq"])
    names = {found.name for found in describe(tmp_path / "some").shown}  # type: ignore[union-attr]
    assert "optim.state.2.weight.exp_avg" in names
    assert not [name for name in names if name.endswith("exp_avg_sq")]


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    save(tmp_path, *trained())
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(4, 2, bias=False))
    state = {"optim": holdfast.get_state_dict(other, torch.optim.AdamW(other.parameters()))[1]}
    with pytest.raises(
        ShapeMismatch,
        match=r"an optimizer state 'exp_avg' of shape \(4, 3\) for a parameter of shape \(5, 3\)",
    ):
        holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True))


def test_wrappers_below_wrappers(tmp_path: Path) -> None:
    model = model_of()
    block = nn.ModuleDict({"inner": torch.compile(nn.Linear(2, 2))})
    model.append(checkpoint_wrapper(block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = state_of(model, optimizer)
    assert set(found["model"]) == set(found["optim"]["state"])
    assert "3.inner.weight" in found["model"]


def test_zeros_of_an_optimizer_that_needs_more_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained(make=torch.optim.NAdam)
    del optimizer.state[model[2].weight]
    save(tmp_path, model, optimizer, missing="zeros")
    other = model_of(2)
    with pytest.raises(
        MissingTensors, match=r"a part of the optimizer's state of '2.weight': 'mu_product' is not there"
    ):
        load(tmp_path, other, torch.optim.NAdam(other.parameters()))


def test_nothing_is_changed_before_all_is_checked(tmp_path: Path) -> None:
    model, optimizer = trained()
    found = state_of(model, optimizer)
    flat = holdfast.get_state_dict(model, optimizer, flatten_optimizer_state_dict=True)[1]
    flat["param_groups.0.bias.lr"] = 7.0
    other = model_of(2)
    before = [parameter.clone() for parameter in other.parameters()]
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    with pytest.raises(BadInput, match="were saved with different hyperparameters"):
        holdfast.set_state_dict(other, fresh, model_state_dict=found["model"], optim_state_dict=flat)
    with pytest.raises(BadInput, match="model_state_dict has 'more', and the model does not"):
        holdfast.set_state_dict(
            other,
            fresh,
            model_state_dict={**found["model"], "more": torch.ones(1)},
            optim_state_dict=found["optim"],
        )
    assert not fresh.state
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


@pytest.mark.parametrize("layout", ["nested", "flat", "itself"])
def test_the_state_of_a_frozen_parameter_comes_back(layout: str, tmp_path: Path) -> None:
    def state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        how = {"flatten_optimizer_state_dict": layout == "flat"}
        return {"optim": optimizer if layout == "itself" else state_of(model, optimizer, **how)["optim"]}

    model, other = model_of(), model_of()
    optimizer, fresh = (torch.optim.Adam(one.parameters()) for one in (model, other))
    step(model, optimizer)
    for one in (model, other):
        one[0].requires_grad_(False)
    checkpoints = holdfast.Checkpoints(tmp_path, asynchronous=False, job=holdfast.Job(no_dist=True))
    checkpoints.save(1, state(model, optimizer))
    loaded = state(other, fresh)
    report = checkpoints.restore_report(loaded)
    assert report is not None
    assert report.missing == ()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], fresh.state[theirs]["exp_avg"])
    checkpoints.save(2, loaded)  # no name has vanished


def test_a_frozen_parameter_that_never_had_a_state_is_not_missed(tmp_path: Path) -> None:
    model = model_of()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    holdfast.save({"optim": optimizer}, tmp_path, job=holdfast.Job(no_dist=True))
    fresh = torch.optim.Adam(model.parameters())
    assert holdfast.load({"optim": fresh}, tmp_path, job=holdfast.Job(no_dist=True)).missing == ()
    assert len(fresh.state) == len(optimizer.state) == 1
