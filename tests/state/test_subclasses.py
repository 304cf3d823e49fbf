"""Tensor subclasses: those that are made of other tensors are stored as these; what has no memory is refused
by its name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

import holdfast
from holdfast._core.io.file_reader import ReadPlan
from holdfast._core.layout.box import Box
from holdfast._core.loading.filling import check_filled
from holdfast._core.plan.read import Overlaps
from holdfast._core.state.flatten import build_shard_table, flatten
from holdfast._core.state.memory import TensorMemory
from holdfast._core.state.optimizer_state import GivenState, check_whole
from holdfast._core.state.subclasses import has_memory, is_wrapper, same_memory
from holdfast._tools.checkpoints.inspect import describe
from holdfast.errors import BadInput, CorruptCheckpoint, LoadFailed, MissingTensors

torch.serialization.add_safe_globals([TwoTensor])
TWO_TENSOR = "torch.testing._internal.two_tensor.TwoTensor"


class Scaled(torch.Tensor):
    """An int8 weight with a scale a row, as torchao's Int8Tensor is: what is asked of it is answered with a
    dequantised copy."""

    q: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, q: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype, device=q.device)

    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        self.q, self.scale = q, scale

    def __tensor_flatten__(self) -> Any:
        return ["q", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["q"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].q, args[0].scale))
        plain = [arg.q * arg.scale[:, None] if isinstance(arg, cls) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


def scaled(seed: int) -> Scaled:
    torch.manual_seed(seed)
    return Scaled(torch.randint(-9, 9, (4, 6), dtype=torch.int8), torch.rand(4))


def test_a_quantized_weight_is_filled_where_it_lies(tmp_path: Path) -> None:
    """Its own memory gets the bytes, and not a copy that nobody sees."""
    weight, other = scaled(1), scaled(2)
    q = other.q
    holdfast.save({"w": weight}, tmp_path, job=holdfast.Job(no_dist=True))
    found = {f.name: (f.dtype, f.shape) for f in describe(tmp_path).shown}  # type: ignore[union-attr]
    assert found == {"w.q": ("int8", (4, 6)), "w.scale": ("float32", (4,))}
    holdfast.load({"w": other}, tmp_path, job=holdfast.Job(no_dist=True))
    assert other.q is q
    assert torch.equal(other.q, weight.q)
    assert torch.equal(other.scale, weight.scale)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_module_of_quantized_weights_comes_back(by_name: bool, tmp_path: Path) -> None:
    def make(seed: int) -> nn.Module:
        model = nn.Linear(6, 4)
        model.weight = nn.Parameter(scaled(seed), requires_grad=False)
        return model

    model, other = make(1), make(2)
    state, fresh = (holdfast.get_state_dict(m)[0] if by_name else m for m in (model, other))
    holdfast.save({"model": state}, tmp_path, job=holdfast.Job(no_dist=True))
    if not by_name:  # its own load_state_dict copies into itself, which this class does not know
        fresh = other.state_dict()
    holdfast.load({"model": fresh}, tmp_path, job=holdfast.Job(no_dist=True))
    assert torch.equal(other.weight.q, model.weight.q)
    assert torch.equal(other.bias, model.bias)
    holdfast.set_state_dict(other, model_state_dict=fresh, optim_state_dict={})  # it is in place


def test_wrappers_in_wrappers(tmp_path: Path) -> None:
    def make(value: float) -> Any:
        return TwoTensor(
            TwoTensor(torch.full((3,), value), torch.full((3,), value + 1)), torch.full((3,), value + 2)
        )

    holdfast.save({"w": make(1.0)}, tmp_path, job=holdfast.Job(no_dist=True))
    assert sorted(f.name for f in describe(tmp_path).shown) == ["w.a.a", "w.a.b", "w.b"]
    other = make(7.0)
    holdfast.load({"w": other}, tmp_path, job=holdfast.Job(no_dist=True))
    assert [float(t[0]) for t in (other.a.a, other.a.b, other.b)] == [1.0, 2.0, 3.0]


def test_another_kind_of_weight_is_told(tmp_path: Path) -> None:
    holdfast.save({"w": torch.zeros(4, 6)}, tmp_path, job=holdfast.Job(no_dist=True))
    with pytest.raises(MissingTensors, match=r"2 of the names in the state: 'w.q'; 'w.scale'"):
        holdfast.load({"w": scaled(1)}, tmp_path, job=holdfast.Job(no_dist=True))


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def masked() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (freed, r"'a' \(torch.Tensor, shape \(3,\)\) has no memory of its own, it was freed"),
        (fake, r"'a' \(.*FakeTensor, shape \(3,\)\) has no memory of its own"),
        (masked, r"'a' \(.*MaskedTensor, shape \(3,\)\) has no memory of its own, and does not say"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
            r"'a' is a quantized tensor \(quint8\).*int_repr\(\)",
        ),
        (lambda: nn.LazyLinear(3).weight, r"'a' is a parameter of a lazy module.*Run a forward pass first"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_has_no_dense_memory_is_refused(make: Any, words: str, tmp_path: Path) -> None:
    """Saving as well as loading, before anything is read or written."""
    holdfast.save({"a": torch.ones(3)}, tmp_path / "there", job=holdfast.Job(no_dist=True))
    for call in (
        lambda: holdfast.save({"a": make()}, tmp_path / "new", job=holdfast.Job(no_dist=True)),
        lambda: holdfast.load({"a": make()}, tmp_path / "there", job=holdfast.Job(no_dist=True)),
    ):
        with pytest.raises(BadInput, match=words):
            call()
    assert not list((tmp_path / "new").rglob("*.safetensors"))


@pytest.mark.parametrize(
    "make",
    [
        lambda size: torch.diag(torch.arange(float(size))).to_sparse(),
        lambda size: torch.eye(size).to_sparse_csr(),
        lambda size: torch.nested.nested_tensor([torch.ones(size), torch.full((3,), 2.0)]),
        lambda size: torch.nested.nested_tensor([torch.ones(size, 2), torch.ones(3, 2)], layout=torch.jagged),
    ],
    ids=["coo", "csr", "nested", "jagged"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse_and_nested_tensors_are_one_object_each(make: Any, tmp_path: Path) -> None:
    """A load replaces them, because their parts may have other sizes."""
    holdfast.save({"a": make(4), "in": [make(2)]}, tmp_path, job=holdfast.Job(no_dist=True))
    found = {"a": make(1), "in": [make(1)]}
    holdfast.load(found, tmp_path, job=holdfast.Job(no_dist=True))
    for one, other in ((found["a"], make(4)), (found["in"][0], make(2))):
        assert one.layout == other.layout
        parts = [x.unbind() if x.is_nested else [x.to_dense()] for x in (one, other)]
        assert len(parts[0]) == len(parts[1])
        assert all(map(torch.equal, *parts))


def test_no_memory_is_not_the_same_memory() -> None:
    """Wrappers answer 0 when they are asked where they lie."""
    one, other = scaled(1), scaled(2)
    assert one.data_ptr() == other.data_ptr() == 0
    assert is_wrapper(one)
    assert not has_memory(one)
    assert same_memory(one, one.detach())
    assert not same_memory(one, other)
    assert not same_memory(one, torch.zeros(4, 6))
    assert not same_memory(torch.empty(3, device="meta"), torch.empty(3, device="meta"))
    assert not same_memory(freed(), freed())
    whole = torch.arange(6.0)
    assert same_memory(whole.view(2, 3), whole.view(2, 3))
    assert not same_memory(whole.view(2, 3), whole.view(3, 2))


class Answering(torch.Tensor):
    """It has memory, and answers an index with a copy."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index).clone()


def test_a_load_that_does_not_reach_its_target_is_an_error(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(4, 6).T}, tmp_path, job=holdfast.Job(no_dist=True))
    target = torch.zeros(4, 6).T.as_subclass(Answering)
    with pytest.raises(LoadFailed, match="Answering can't be filled in place: indexing it gives a copy"):
        holdfast.load({"w": target}, tmp_path, job=holdfast.Job(no_dist=True))
    memory = TensorMemory(torch.zeros(4, 6).T.as_subclass(Answering))
    with pytest.raises(LoadFailed, match="can't be filled in place"):
        memory.scatter(Box((0, 0), (6, 4)), bytearray(96), (6, 4), Box((0, 0), (6, 4)))


@pytest.mark.parametrize("sizes", [[(3, 4)], [(2, 4), (3, 4)], []])
def test_a_plan_that_leaves_something_out_is_refused(sizes: list[tuple[int, int]]) -> None:
    """Nothing in a checkpoint makes such a plan; if ever there is one, it is not carried out."""
    import numpy as np

    table, _ = build_shard_table(
        flatten({"w": torch.zeros(4, 4), "empty": torch.zeros(0, 4)}, 0).leaves, 0, (0,)
    )
    count = len(sizes)

    def plan_of(found: list[tuple[int, int]]) -> ReadPlan:
        size = np.asarray(found, np.int64).reshape(-1, 2)
        zeros = np.zeros(len(found), np.int64)
        return ReadPlan(Overlaps(zeros, zeros, np.zeros_like(size), size), 0)

    with pytest.raises(
        LoadFailed, match=f"'w' would get {4 * sum(r for r, _ in sizes)} elements, and has 16"
    ):
        check_filled(table, plan_of(sizes))
    check_filled(table, plan_of([(1, 4), (3, 4)]))
    assert count == len(sizes)


class Quantizing(torch.optim.Optimizer):
    """Keeps its moment in two halves, as an optimizer with quantized states does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                self.state[parameter] = {"moment": TwoTensor(grad / 2, grad * 2), "step": 1}


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()


def test_a_wrapper_is_made_only_of_a_type_that_this_process_allows(tmp_path: Path) -> None:
    """Where there is one already, it is filled, and nothing is made."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, fresh = Quantizing(model.parameters()), Quantizing(other.parameters())
    stepped(optimizer, model)
    holdfast.save({"optim": optimizer}, tmp_path, job=holdfast.Job(no_dist=True))
    holdfast.load({"optim": fresh}, tmp_path, job=holdfast.Job(no_dist=True))
    moment = fresh.state[other.weight]["moment"]
    assert type(moment) is TwoTensor
    assert torch.equal(moment.b, torch.ones(2, 2))
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        again = Quantizing(other.parameters())
        with pytest.raises(
            LoadFailed, match=r"'optim.state.0.moment' was saved as a .*TwoTensor, .* not allow"
        ):
            holdfast.load({"optim": again}, tmp_path, job=holdfast.Job(no_dist=True))
        assert not again.state
        stepped(again, other)
        holdfast.load({"optim": again}, tmp_path, job=holdfast.Job(no_dist=True))
        assert torch.equal(again.state[other.weight]["moment"].b, torch.ones(2, 2))
    finally:
        torch.serialization.add_safe_globals(allowed)


@pytest.mark.parametrize(
    "structure",
    [
        ["dict"],
        ["dict", 5],
        ["heap", [0]],
        ["dict", [["moment", ["strides", [0, 0]]]]],
        ["dict", [["moment", ["tensor", TWO_TENSOR, [["a", 0]], None, [2], [1]]]]],
        "x",
    ],
)  # fmt: skip
def test_a_forged_description_of_a_state_is_refused(structure: Any, tmp_path: Path) -> None:
    state = {
        "optim": {
            "state": {0: {"moment": torch.ones(2, 2), "moment.a": torch.ones(2), "__structure__": structure}}
        }
    }
    holdfast.save(state, tmp_path, job=holdfast.Job(no_dist=True))
    model = nn.Linear(2, 2, bias=False)
    fresh = Quantizing(model.parameters())
    with pytest.raises(
        CorruptCheckpoint, match=r"says how 'optim.state.0' is built, and it can't be built so"
    ):
        holdfast.load({"optim": fresh}, tmp_path, job=holdfast.Job(no_dist=True), include=["optim.state"])
    assert not fresh.state


def test_a_state_is_whole_by_the_states_of_others_like_it() -> None:
    square, wide, vector = (nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2, 3), (2,)))

    def whole(*states: tuple[nn.Parameter, set[str]]) -> Any:
        named = [
            GivenState(str(at), parameter, dict.fromkeys(keys, torch.ones(())))
            for at, (parameter, keys) in enumerate(states)
        ]
        return [set(state) for state in check_whole(named)]

    factored, unfactored = {"step", "row", "column"}, {"step", "variance"}
    fine = [(square, factored), (wide, factored), (vector, unfactored), (vector, set[str]())]
    assert whole(*fine) == [keys for _, keys in fine]
    special = [
        (square, {"moment"}),
        (square, {"moment"}),
        (wide, {"exp_avg", "step"}),
    ]  # another rule for this one
    assert whole(*special) == [keys for _, keys in special]
    by_size = [(square, {"m"}), (square, {"m"}), (wide, {"m", "projection"})]
    assert whole(*by_size) == [keys for _, keys in by_size]
    with pytest.raises(
        MissingTensors, match="a part of the optimizer's state of '1': 'projection' is not there"
    ):
        whole((wide, {"m", "projection"}), (wide, {"m"}), (square, {"m"}))
    with pytest.raises(MissingTensors, match="of '2': 'b' is not there"):
        whole((square, {"a", "b"}), (square, {"a", "b"}), (wide, {"a"}))
    assert whole((square, {"a", "step"}), (square, {"a"})) == [{"a", "step"}, {"a", "step"}]
