"""Taking a state apart into named leaves, and putting loaded values back."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import holdfast
from holdfast import PerRank, Shard
from holdfast._core.layout.box import Box
from holdfast._core.layout.patterns import matches
from holdfast._core.layout.tensor import OBJECT
from holdfast._core.state.flatten import build_shard_table, flatten, select
from holdfast.errors import BadInput, MissingTensors, ShapeMismatch


def names(state: Any, rank: int = 0) -> list[str]:
    return [leaf.name for leaf in flatten(state, rank).leaves]


class Counter:
    """A stateful value."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.loaded: list[Any] = []

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.loaded.append(state)


def test_paths_are_joined_by_dots() -> None:
    t = torch.zeros(1)
    state = {
        "model": OrderedDict([("a.b", t), ("c", {"d": t, 3: t, None: t, True: t, (1, 2): t})]),
        "list": [t, {"x": t}, 5],
        "step": 3,
        "plain": [1, 2, {"y": 3}],
        "empty": {},
        "none": None,
    }
    assert names(state) == [
        "model.a.b", "model.c.d", "model.c.3", "model.c.None", "model.c.True", "model.c.(1, 2)",
        "list.0", "list.1.x", "list.2", "step", "plain", "empty", "none",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": 1, "a": {"b": 2}},
        {"a": {1: torch.zeros(1), "1": torch.zeros(1)}},
        {"a": [torch.zeros(1)], "a.0": 3},
        {"a": PerRank(1), "a@0": 2},
        {"a": Shard(torch.zeros(2), (4,), (0,)), "": {"a": torch.zeros(4)}},
    ],
)
def test_two_values_under_one_name_are_refused(state: Any) -> None:
    with pytest.raises(BadInput, match="Two values of the state have the name 'a"):
        flatten(state, 0)


def holds_itself(kind: str) -> dict[str, Any]:
    state: dict[str, Any] = {"x": torch.zeros(1), "a": {"b": [1, {}]}}
    if kind == "dict":
        state["a"]["b"][1]["c"] = state["a"]
    elif kind == "state":
        state["a"]["c"] = state
    else:
        state["a"]["b"].append(state["a"]["b"])
    return state


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("dict", "'a.b.1.c' is the same object as 'a'"),
        ("list", "'a.b.2' is the same object as 'a.b'"),
        ("state", "'a.c' is the same object as the state itself"),
    ],
)
def test_a_state_that_contains_itself_is_refused(kind: str, said: str) -> None:
    with pytest.raises(BadInput, match=f"The state contains itself: {said}."):
        flatten(holds_itself(kind), 0)


def test_one_object_at_two_places_is_no_circle() -> None:
    shared = {"x": 1}
    for _ in range(40):  # two ways to each, so 2**40 paths
        shared = {"one": shared, "other": shared}
    deep: Any = {"shared": shared}
    for _ in range(3000):
        deep = {"d": deep}
    with pytest.raises(RecursionError):
        flatten(deep, 0)


def test_an_empty_key_is_named_alike_whatever_is_beside_it(tmp_path: Path) -> None:
    def state(value: float, *beside: Any) -> dict[str, Any]:
        return {"m": {"": torch.full((2,), value), **{f"x{at}": one for at, one in enumerate(beside)}}}

    holdfast.save(state(3.0), tmp_path / "it")
    into = state(0.0, [], PerRank(1))
    report = holdfast.load(into, tmp_path / "it", strict=False)
    assert report.missing
    assert torch.equal(into["m"][""], torch.full((2,), 3.0))


@pytest.mark.parametrize("state", [[1], 3, None, "x", torch.zeros(1)])
def test_a_state_must_be_a_dict(state: Any) -> None:
    with pytest.raises(BadInput, match="must be a dict"):
        flatten(state, 0)


def test_keys_that_are_no_names_are_refused() -> None:
    with pytest.raises(BadInput, match="under 'a' has the key"):
        flatten({"a": {object(): 1}}, 0)
    with pytest.raises(BadInput, match="not valid Unicode"):
        build_shard_table(flatten({"\ud800": torch.zeros(1)}, 0).leaves, 0, (0,))


def test_stateful_values_are_asked_and_told() -> None:
    inner = Counter({"x": torch.zeros(2), "n": 1})
    outer = Counter({"inner": inner, "m": 2})
    flat = flatten({"c": outer}, 0)
    assert [leaf.name for leaf in flat.leaves] == ["c.inner.x", "c.inner.n", "c.m"]
    for _, finish in flat.after:
        finish()
    assert inner.loaded == [inner.state]
    assert outer.loaded == [outer.state]
    assert names(Counter({"w": 1})) == ["w"]
    assert names({"class": Counter}) == ["class"]


@pytest.mark.parametrize("value", [7, "seven", [1, 2], (1, 2), None, {"a": 1}])
def test_a_state_dict_of_any_kind_comes_back(value: Any, tmp_path: Path) -> None:
    holdfast.save({"c": Counter(value)}, tmp_path)
    other = Counter({"a": 0} if isinstance(value, dict) else 0)
    holdfast.load({"c": other}, tmp_path)
    assert other.loaded == [value]


def test_modules_and_optimizers_come_back(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.LayerNorm(5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "step": seed}

    old, new = make(1), make(2)
    holdfast.save(old, tmp_path)
    report = holdfast.load(new, tmp_path)
    assert report.missing == ()
    assert new["step"] == 1
    for name, value in old["model"].state_dict().items():
        assert torch.equal(new["model"].state_dict()[name], value)
    for at, slots in old["optimizer"].state_dict()["state"].items():
        for name, value in slots.items():
            assert torch.equal(new["optimizer"].state_dict()["state"][at][name], value)
    assert new["optimizer"].param_groups[0]["lr"] == pytest.approx(0.1)


def test_tensors_are_filled_where_they_lie_and_objects_replaced(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    state = {"w": weight, "list": [torch.ones(2), "text", {"k": 1}], "deep": {"a": {"b": [1, (2, 3)]}}}
    holdfast.save(state, tmp_path)
    target = torch.nn.Parameter(torch.zeros(2, 3))
    inner: dict[str, Any] = {"b": None}
    loaded = {"w": target, "list": [torch.zeros(2), "", {"k": 0}], "deep": {"a": inner}}
    holdfast.load(loaded, tmp_path)
    assert loaded["w"] is target
    assert target.requires_grad
    assert torch.equal(target, weight)
    assert torch.equal(loaded["list"][0], torch.ones(2))
    assert loaded["list"][1:] == ["text", {"k": 1}]
    assert inner == {"b": [1, (2, 3)]}


class Pair(NamedTuple):
    weight: torch.Tensor
    about: Any


@dataclass
class Both:
    weight: torch.Tensor
    about: Any


def test_tensors_in_tuples_and_dataclasses_are_filled_and_the_rest_is_replaced(tmp_path: Path) -> None:
    def state(number: float) -> dict[str, Any]:
        one = torch.full((2,), number)
        return {
            "t": (one, (number, {"n": [one, number]})),
            "p": Pair(one, number),
            "d": Both(one, [Pair(one, number)]),
        }

    holdfast.save(state(2.0), tmp_path)
    found = state(1.0)
    filled, both = found["t"][0], found["d"]
    holdfast.load(found, tmp_path)
    assert found["t"][0] is filled
    assert found["d"] is both
    assert type(found["p"]) is type(found["d"].about[0]) is Pair
    assert found["t"][1][0] == found["t"][1][1]["n"][1] == found["p"].about == both.about[0].about == 2.0
    for tensor in (filled, found["t"][1][1]["n"][0], found["p"].weight, both.weight, both.about[0].weight):
        assert torch.equal(tensor, torch.full((2,), 2.0))
    tensors = (torch.zeros(2), torch.zeros(3))
    holdfast.save({"t": (torch.ones(2), torch.ones(3))}, tmp_path / "only")
    whole = {"t": tensors}
    holdfast.load(whole, tmp_path / "only")
    assert whole["t"] is tensors, "a tuple of tensors is filled"
    assert torch.equal(tensors[0], torch.ones(2))


def test_a_generator_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    holdfast.save({"rng": generator, "more": [torch.Generator().manual_seed(4)]}, tmp_path)
    found = {"rng": torch.Generator(), "more": [torch.Generator()]}
    mine = found["rng"]
    holdfast.load(found, tmp_path)
    assert found["rng"] is mine
    assert torch.equal(torch.rand(5, generator=mine), torch.rand(5, generator=generator))
    assert found["more"][0].initial_seed() == 4


@pytest.mark.parametrize(
    "name",
    ["a/b", "../x", "/etc/passwd", "层.注意力", "e\u0301 é", 'q"uo\'te', "new\nline", "\\", "\0", " ",
     "\U0001f600", "__metadata__", "__holdfast__", "a@0", "a@0,0", "x" * 5000],
)  # fmt: skip
def test_any_text_is_a_name(name: str, tmp_path: Path) -> None:
    state = {name: torch.arange(8.0).reshape(2, 4), name + ".object": [name]}
    holdfast.save(state, tmp_path, job=holdfast.Job(options=holdfast.Options(columns=("*",))))
    loaded = {name: torch.zeros(2, 4), name + ".object": None}
    holdfast.load(loaded, tmp_path)
    assert torch.equal(loaded[name], state[name])
    assert loaded[name + ".object"] == [name]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "index.safetensors"]


def test_names_that_look_like_chunks_do_not_meet(tmp_path: Path) -> None:
    """`w@0,0` may be the header's name of a chunk of `w`, or a tensor of the user's."""
    state = {
        "w": [Shard(torch.ones(2, 2), (4, 2), (0, 0)), Shard(torch.full((2, 2), 2.0), (4, 2), (2, 0))],
        "w@0,0": torch.full((1,), 3.0),
        "w@2,0": torch.full((1,), 4.0),
        "w@2,0'": torch.full((1,), 5.0),
    }
    holdfast.save(state, tmp_path)
    loaded = {
        "w": torch.zeros(4, 2),
        "w@0,0": torch.zeros(1),
        "w@2,0": torch.zeros(1),
        "w@2,0'": torch.zeros(1),
    }
    holdfast.load(loaded, tmp_path)
    assert loaded["w"][:, 0].tolist() == [1, 1, 2, 2]
    assert [float(loaded[name]) for name in ("w@0,0", "w@2,0", "w@2,0'")] == [3, 4, 5]


def test_per_rank_values_have_the_rank_in_their_name(tmp_path: Path) -> None:
    state = {"rng": PerRank({"cpu": torch.ones(2), "py": (1, 2)}), "pos": PerRank(7)}
    assert names(state, 5) == ["rng@5.cpu", "rng@5.py", "pos@5"]
    holdfast.save(state, tmp_path)
    loaded = {"rng": PerRank({"cpu": torch.zeros(2), "py": None}), "pos": PerRank(0)}
    holdfast.load(loaded, tmp_path)
    assert loaded["pos"].value == 7
    assert loaded["rng"].value["py"] == (1, 2)
    assert torch.equal(loaded["rng"].value["cpu"], torch.ones(2))


def test_per_rank_values_may_be_optional(tmp_path: Path) -> None:
    holdfast.save({"a": 1}, tmp_path)
    loaded = {"a": 0, "b": PerRank(5, optional=True)}
    holdfast.load(loaded, tmp_path)
    assert (loaded["a"], loaded["b"].value) == (1, 5)
    with pytest.raises(MissingTensors, match="'b@0'"):
        holdfast.load({"a": 0, "b": PerRank(5)}, tmp_path)
    report = holdfast.load({"a": 0, "b": PerRank(5)}, tmp_path, strict=False)
    assert report.missing == ("b@0",)


def test_shapes_dtypes_and_kinds_must_fit(tmp_path: Path) -> None:
    holdfast.save({"a": torch.zeros(2, 3), "o": [1]}, tmp_path)
    for value, words in (
        (torch.zeros(3, 2), r"holds float32\[2, 3\], the state wants float32\[3, 2\]"),
        (torch.zeros(6), r"wants float32\[6\]"),
        (torch.zeros(2, 3, dtype=torch.float64), r"wants float64\[2, 3\]"),
        (5, "wants an object"),
    ):
        with pytest.raises(ShapeMismatch, match=words):
            holdfast.load({"a": value}, tmp_path)
    with pytest.raises(ShapeMismatch, match="an object of"):
        holdfast.load({"o": torch.zeros(3, dtype=torch.uint8)}, tmp_path)


def test_select_takes_patterns_and_subtrees() -> None:
    leaves = flatten({"model": {"a": 1, "b": {"c": 2}}, "models": 3, "opt": {"a": 4}}, 0).leaves

    def chosen(include: Any = None, exclude: Any = None) -> list[str]:
        return [leaf.name for leaf in select(leaves, include, exclude)]

    assert chosen(["model"]) == ["model.a", "model.b.c"]
    assert chosen(["*.a"]) == ["model.a", "opt.a"]
    assert chosen(["model", "opt"], ["*.a"]) == ["model.b.c"]
    assert chosen(None, ["model"]) == ["models", "opt.a"]
    with pytest.raises(
        BadInput, match=r"include: no name in the state matches 'nothing'; the first is 'model.a'"
    ):
        chosen(["nothing"])
    with pytest.raises(BadInput, match="exclude takes a list of patterns, not the text 'opt'"):
        chosen(None, "opt")
    assert matches("a.b", "a")
    assert not matches("ab", "a")
    assert not matches("A", "a")


def test_hold_gives_rows_with_boxes_replicas_and_owners() -> None:
    state = {
        "plain": torch.zeros(4),
        "shards": [
            Shard(torch.zeros(1, 3), (2, 3), (0, 0), (1, 4)),
            Shard(torch.zeros(1, 3), (2, 3), (1, 0)),
        ],
        "mine": PerRank(torch.zeros(2)),
        "object": ["a", 1],
    }
    table, owner = build_shard_table(flatten(state, 3).leaves, 3, (0, 3))
    assert [spec.name for spec in table.specs] == ["plain", "shards", "shards", "mine@3", "object"]
    assert owner == [0, 1, 2, 3, 4]
    assert table.replicas == [None, (1, 4), (0, 1), (0, 1), None]
    assert table.unsharded == [True, False, False, True, True]
    assert table.boxes[2] == Box((1, 0), (1, 3))
    assert table.specs[4].kind == OBJECT
    alone, _ = build_shard_table(flatten(state, 3).leaves, 3, (3,))
    assert alone.replicas[0] == (0, 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Shard([1], (1,), (0,)), "takes a tensor, not list"),  # type: ignore[arg-type]
        (
            lambda: Shard(torch.zeros(2), (4, 2), (0, 0)),
            "the tensor has 1 dimensions, global_shape 2 and offset 2",
        ),
        (lambda: Shard(torch.zeros(2), (4,), (0, 0)), "offset 2"),
        (lambda: Shard(torch.zeros(2), (4,), (0,), (2, 2)), r"replica=\(2, 2\)"),
        (lambda: Shard(torch.zeros(2), (4,), (0,), (-1, 2)), "0 <= index < count"),
        (lambda: Shard(torch.zeros(2), 4, 0), "global_shape=4, offset=0 and .* must be tuples of numbers"),  # type: ignore[arg-type]
        (lambda: Shard(torch.zeros(2), (4,), (0,), 1), "replica=1 must be tuples"),  # type: ignore[arg-type]
        (lambda: Shard(torch.zeros(2), (4,), (None,), position="x"), "position='x' a number"),  # type: ignore[arg-type]
    ],
)
def test_shards_that_make_no_sense_are_refused(make: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        make()


def test_shards_outside_their_tensor_are_refused_with_the_rank() -> None:
    leaves = flatten({"a": Shard(torch.zeros(3), (4,), (2,))}, 2).leaves
    with pytest.raises(BadInput, match=r"Rank 2 holds offset \(2,\) and shape \(3,\) of 'a'") as caught:
        build_shard_table(leaves, 2, (2,))
    assert caught.value.rank == 2


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.empty(2, device="meta"), "'a' is on the meta device"),
    ],
)
def test_tensors_that_are_not_stored_are_refused(value: torch.Tensor, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        build_shard_table(flatten({"a": value}, 1).leaves, 1, (1,))
    assert caught.value.rank == 1


def test_gaps_among_shards_are_found_at_save(tmp_path: Path) -> None:
    part = Shard(torch.zeros(2, 2), (4, 2), (0, 0))
    with pytest.raises(holdfast.errors.CoverageError, match=r"'w'.*not covered: from index \[2, 0\]"):
        holdfast.save({"w": part}, tmp_path)
    with pytest.raises(holdfast.errors.CoverageError, match=r"'w'.*covered twice from index \[1, 0\]"):
        holdfast.save({"w": [part, Shard(torch.zeros(3, 2), (4, 2), (1, 0))]}, tmp_path)
    assert holdfast.latest(tmp_path) is None
    assert not list(tmp_path.rglob("*.safetensors"))


def test_names_that_vanish_are_an_error_unless_expected(tmp_path: Path) -> None:
    holdfast.save({"a": 1, "weights": torch.zeros(2)}, tmp_path)
    with pytest.raises(holdfast.errors.Vanished, match="'weights'"):
        holdfast.save({"a": 1, "weight": torch.zeros(2)}, tmp_path)
    holdfast.save({"a": 1}, tmp_path, expected=None)
    loaded = {"a": 0}
    holdfast.load(loaded, tmp_path)
    assert loaded == {"a": 1}


def test_a_tensor_dict_is_filled_in_place(tmp_path: Path) -> None:
    """It has no truth value, its length is its batch size, and what its items() give is wrapped."""
    tensordict = pytest.importorskip("tensordict", reason="the Makefile installs it")

    def made(value: float, text: str) -> Any:
        inner = {"b": torch.full((2,), value), "none": {}}
        fields = {"a": torch.full((2, 3), value), "inner": inner, "text": text}
        return tensordict.TensorDict(fields, batch_size=[2])

    state = {"d": made(1.0, "x"), "list": [made(2.0, "y")], "empty": tensordict.TensorDict({}, [3])}
    assert [name for name in names(state) if name.startswith("d.")] == [
        "d.a",
        "d.inner.b",
        "d.inner.none",
        "d.text",
    ]
    holdfast.save(state, tmp_path / "c")
    into = {"d": made(0.0, ""), "list": [made(0.0, "")], "empty": tensordict.TensorDict({}, [3])}
    memory = into["d"]["a"]
    holdfast.load(into, tmp_path / "c")
    assert (into["d"] == state["d"]).all()
    assert (into["list"][0] == state["list"][0]).all()
    assert into["d"]["text"] == "x"
    assert into["d"]["a"] is memory
    assert into["empty"].batch_size == (3,)


def test_a_mapping_that_makes_its_tensors_anew_is_refused() -> None:
    """What a load wrote into them would be lost."""
    tensordict = pytest.importorskip("tensordict", reason="the Makefile installs it")
    parts = [tensordict.TensorDict({"a": torch.zeros(3)}, []) for _ in range(2)]
    with pytest.raises(BadInput, match="'lazy' is a LazyStackedTensorDict that makes its tensors anew"):
        flatten({"lazy": tensordict.LazyStackedTensorDict.lazy_stack(parts)}, 0)
    assert names({"parts": parts}) == ["parts.0.a", "parts.1.a"]
