"""What a load leaves, in the state and in the checkpoint, is told; one that fills no tensor fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import DefaultLoadPlanner

import holdfast
import holdfast.dcp as dcp
from holdfast._core.io.renamed import mapping_that_fits
from holdfast.errors import HoldfastError, LoadFailed, MissingTensors
from tests.support.threads import on_ranks

ALONE = holdfast.Job(no_dist=True)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """The lines of the log so far."""
    with caplog.at_level(logging.WARNING, "holdfast"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "holdfast"]


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))


def job_of(roster: Any) -> holdfast.Job:
    return holdfast.Job(roster=roster, timeout=30, stall_timeout=10)


@pytest.mark.parametrize("way", ["load", "restore", "dcp"])
@pytest.mark.parametrize("with_step", [False, True])
def test_a_load_that_fills_no_tensor_fails_and_names_the_renaming(
    way: str, with_step: bool, tmp_path: Path
) -> None:
    saved = {"model": torch.compile(model()), "step": 7}
    fresh = model()
    before = [parameter.clone() for parameter in fresh.parameters()]
    state: dict[str, Any] = {"model": fresh, **({"step": 0} if with_step else {})}
    with holdfast.Checkpoints(tmp_path, job=ALONE) as run:
        run.save(1, saved)
        run.close()
        ways = {
            "restore": lambda: run.restore(state, strict=False),
            "load": lambda: holdfast.load(state, tmp_path / "step-00000001", strict=False, job=ALONE),
            "dcp": lambda: dcp.load(
                {**state, "model": fresh.state_dict()},
                checkpoint_id=tmp_path / "step-00000001",
                planner=DefaultLoadPlanner(allow_partial_load=True),
                no_dist=True,
            ),
        }
        with pytest.raises(MissingTensors, match=r"fills no tensor at all.*'model\.0\.weight'") as error:
            ways[way]()
    assert "rename={'model._orig_mod': 'model'}) fits 4 of these 4 names" in error.value.hint
    assert all(torch.equal(one, other) for one, other in zip(before, fresh.parameters(), strict=True))
    assert state.get("step", 0) == 0
    rename = {"model._orig_mod": "model"}
    holdfast.load(state, tmp_path / "step-00000001", rename=rename, job=ALONE)
    assert all(
        torch.equal(one, other)
        for one, other in zip(saved["model"].parameters(), fresh.parameters(), strict=True)
    )


def test_a_strict_load_names_the_renaming_too(tmp_path: Path) -> None:
    holdfast.save({"module": model().state_dict()}, tmp_path / "it", job=ALONE)
    with pytest.raises(MissingTensors) as error:
        holdfast.load({"model": model()}, tmp_path / "it", job=ALONE)
    assert "rename={'module': 'model'}) fits 4 of these 4 names" in error.value.hint
    assert error.value.message.count("nearest: ") == 3
    assert error.value.message.endswith("; and more.")
    with pytest.raises(MissingTensors) as error:
        holdfast.load(model().state_dict(), tmp_path / "it", job=ALONE)
    assert "rename={'module': ''}) fits 4 of these 4 names" in error.value.hint
    with pytest.raises(MissingTensors) as error:
        holdfast.load({"other": torch.ones(1)}, tmp_path / "it", job=ALONE)
    assert "rename" not in error.value.hint
    assert "strict=False" in error.value.hint


def test_what_is_left_on_both_sides_is_one_line(tmp_path: Path, told: Any) -> None:
    state = {"a": torch.ones(2), "b": torch.ones(3), "optimizer": {"x": torch.ones(1)}, "step": 3}
    holdfast.save(state, tmp_path / "it", job=ALONE)
    assert holdfast.load(state, tmp_path / "it", job=ALONE).unasked == ()
    assert told() == []
    mine = {"a": torch.zeros(2), "b": torch.zeros(4), "more": torch.zeros(1)}
    report = holdfast.load(mine, tmp_path / "it", strict=False, on_shape="skip", job=ALONE)
    assert (report.missing, report.skipped) == (("more",), ("b",))
    assert report.unasked == ("optimizer.x", "step")
    (line,) = told()
    assert "2 of the 4 names in" in line
    assert "were not loaded, because no rank asks for them: 'optimizer.x'; 'step'." in line
    assert line.endswith("kept its value: 'more'; 'b'.")


def test_long_names_are_shortened_in_that_line(tmp_path: Path, told: Any) -> None:
    long = "x" * 900
    state = {
        "a": torch.ones(2),
        **{f"{long}.{number}.w": torch.ones(3) for number in range(2)},
        long: torch.ones(1),
    }
    holdfast.save(state, tmp_path / "it", job=ALONE)
    mine = {"a": torch.zeros(2), f"{long}.0.w": torch.zeros(4), "y" * 900: torch.zeros(1)}
    report = holdfast.load(mine, tmp_path / "it", strict=False, on_shape="skip", job=ALONE)
    assert (report.missing, report.skipped) == (("y" * 900,), (f"{long}.0.w",))
    assert set(report.unasked) == {f"{long}.1.w", long}
    (line,) = told()
    assert "y" * 100 in line
    assert f"…{'x' * 50}" in line
    assert len(line) < 2500
    with pytest.raises(MissingTensors, match="does not hold 1 of the names in the state: 'yyy"):
        holdfast.load(mine, tmp_path / "it", on_shape="skip", job=ALONE)


def test_shapes_that_may_all_differ_are_no_other_names(tmp_path: Path, told: Any) -> None:
    holdfast.save({"head": torch.ones(3)}, tmp_path / "it", job=ALONE)
    report = holdfast.load({"head": torch.zeros(5)}, tmp_path / "it", on_shape="skip", job=ALONE)
    assert (report.skipped, report.unasked) == (("head",), ())
    (line,) = told()
    assert line.endswith("kept its value: 'head'.")


def test_what_is_skipped_in_a_published_folder_was_asked_for(tmp_path: Path, told: Any) -> None:
    save_file(
        {"head": torch.ones(3), "w": torch.ones(2), "more": torch.ones(1)}, tmp_path / "model.safetensors"
    )
    mine = {"head": torch.zeros(5), "w": torch.zeros(2)}
    report = holdfast.load(mine, tmp_path, on_shape="skip", job=ALONE)
    assert (report.skipped, report.unasked) == (("head",), ("more",))
    (line,) = told()
    assert "1 of the 3 names in" in line
    assert line.endswith(
        "asks for them: 'more'. " + f"What {tmp_path} does not hold, or in another shape, "
        "kept its value: 'head'."
    )


def test_states_of_a_skipped_parameter_are_skipped_and_not_unasked(tmp_path: Path, told: Any) -> None:
    def state(width: int) -> dict[str, Any]:
        net = torch.nn.ModuleDict({"head": torch.nn.Linear(2, width), "w": torch.nn.Linear(2, 2)})
        optimizer = torch.optim.AdamW(net.parameters())
        if width == 3:
            sum(parameter.sum() for parameter in net.parameters()).backward()
            optimizer.step()
        weights, states = holdfast.get_state_dict(net, optimizer)
        return {"m": weights, "o": states}

    holdfast.save({**state(3), "o.state.head": {"other": 1}}, tmp_path / "it", job=ALONE)
    report = holdfast.load(state(5), tmp_path / "it", on_shape="skip", job=ALONE)
    assert report.skipped == ("m.head.weight", "m.head.bias", "o.state.head.weight", "o.state.head.bias")
    assert report.unasked == ("o.state.head.other",)


def test_what_patterns_leave_is_left_on_purpose(tmp_path: Path, told: Any) -> None:
    state = {"model": {"a": torch.ones(2), "b": torch.ones(3)}, "step": 3}
    holdfast.save(state, tmp_path / "it", job=ALONE)
    whole, mine = (
        {"model": {"a": torch.zeros(2), "b": torch.zeros(3)}, "step": 0},
        {"model": {"a": torch.zeros(2)}},
    )
    assert holdfast.load(mine, tmp_path / "it", include=["model.a"], job=ALONE).unasked == ()
    assert holdfast.load(whole, tmp_path / "it", exclude=["step", "*.b"], job=ALONE).unasked == ()
    assert told() == []
    assert holdfast.load(mine, tmp_path / "it", include=["model"], job=ALONE).unasked == ("model.b",)


def test_what_some_rank_asks_for_or_fills_counts(tmp_path: Path, told: Any) -> None:
    names = [f"n{number:02d}" for number in range(12)]
    holdfast.save({name: torch.ones(1) for name in names}, tmp_path / "it", job=ALONE)

    def load(roster: Any) -> Any:
        mine = {name: torch.zeros(1) for name in names[roster.rank : 11 : 3]}
        if roster.rank == 1:  # fills none of its own, which other ranks do
            mine = {"other": torch.zeros(1)}
        report = holdfast.load(mine, tmp_path / "it", strict=False, job=job_of(roster))
        return report.unasked, report.missing

    left = ("n01", "n04", "n07", "n10", "n11")
    assert on_ranks(3, load) == [(left, ()), (left, ("other",)), (left, ())]
    (line,) = told()
    assert "5 of the 12 names" in line
    assert line.endswith("kept its value: 'other'.")


def positions(roster: Any, **given: Any) -> dict[str, Any]:
    return {"w": torch.ones(4), "data": holdfast.PerRank({"read": 100 + roster.rank}, **given)}


def test_values_of_ranks_that_are_gone_are_not_dropped(tmp_path: Path, told: Any) -> None:
    on_ranks(4, lambda roster: holdfast.save(positions(roster), tmp_path / "it", job=job_of(roster)))

    def load(roster: Any, strict: bool = True, **given: Any) -> Any:
        state = positions(roster, **given)
        state["data"].value = {"read": 0}
        try:
            holdfast.load(state, tmp_path / "it", strict=strict, job=job_of(roster))
        except HoldfastError as error:
            return error
        return state["data"].value["read"]

    assert on_ranks(4, load) == [100, 101, 102, 103]
    for error in on_ranks(2, load):
        assert isinstance(error, LoadFailed)
        assert "2 values of ranks that are not in this load, and would lose them: 'data@2.read'" in str(error)
        assert "PerRank(value, optional=True)" in error.hint
    assert told() == []
    assert on_ranks(2, lambda roster: load(roster, optional=True)) == [100, 101]
    assert told() == []  # it was said that they may go
    assert on_ranks(2, lambda roster: load(roster, strict=False)) == [100, 101]
    (line,) = told()
    assert "no rank asks for them: 'data@2.read'; 'data@3.read'" in line


def test_a_rank_that_is_new_is_told_of_optional(tmp_path: Path) -> None:
    on_ranks(2, lambda roster: holdfast.save(positions(roster), tmp_path / "it", job=job_of(roster)))

    def load(roster: Any) -> Any:
        holdfast.load(positions(roster), tmp_path / "it", job=job_of(roster))

    with pytest.raises(MissingTensors) as error:
        on_ranks(4, load)
    assert "PerRank(value, optional=True) keeps the present one" in error.value.hint


def test_no_renaming_is_named_that_would_fill_a_new_layer_from_another(tmp_path: Path) -> None:
    """Its elements are asked for under their own name, or are of another shape, or it is one of many."""
    holdfast.save({"a.w": torch.ones(2), "b.w": torch.ones(2)}, tmp_path / "it", job=ALONE)
    for state in (
        {"a.w": torch.ones(2), "b.w": torch.ones(2), "c.w": torch.ones(2)},
        {"a.w": torch.ones(2), "c.w": torch.ones(3)},
        {"a.w": torch.ones(2), **{f"c{number}.w": torch.ones(2) for number in range(3)}},
    ):
        with pytest.raises(MissingTensors) as error:
            holdfast.load(state, tmp_path / "it", job=ALONE)
        assert "rename" not in error.value.hint
        assert "strict=False" in error.value.hint


def test_a_checkpoint_without_any_tensor_is_described_as_it_is(tmp_path: Path) -> None:
    holdfast.save({"step": 3}, tmp_path / "it", job=ALONE)
    with pytest.raises(MissingTensors, match=r"it holds 1 name, and none") as error:
        holdfast.load({"w": torch.ones(2), "step": 0}, tmp_path / "it", strict=False, job=ALONE)
    assert "it holds 'step'" in error.value.hint


@pytest.mark.parametrize(
    ("wanted", "names", "mapping", "fits"),
    [
        (["a.w"], ["b.w"], {"b": "a"}, 1),
        (["a.x.w", "a.y.w"], ["b.x.w", "b.y.w", "c.x.w"], {"b": "a"}, 2),
        (["x.w"], ["model.x.w"], {"model": ""}, 1),
        (["model.x.w"], ["x.w", "y"], {"": "model"}, 1),
        (["a.w"], ["a.v"], {}, 0),
        (["a.w", "b.w", "c.w"], ["x.w"], {}, 0),
        (["a.w"], [], {}, 0),
        ([], ["a.w"], {}, 0),
        (["m.0.w", "m.1.w"], ["m.layers.0.w", "m.layers.1.w"], {"m.layers": "m"}, 2),
    ],
)
def test_the_renaming_that_fits(
    wanted: list[str], names: list[str], mapping: dict[str, str], fits: int
) -> None:
    assert mapping_that_fits(wanted, names) == (mapping, fits)


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize(
    ("saved", "fresh", "said"),
    [
        (17, {"read": 0}, "stored object 'data@0' has no 'read' in it"),
        (17, [0, {"read": torch.zeros(1)}], "stored object 'data@0' has no '0' in it"),
        ({"read": 17, "row": 3}, {"read": {"rows": 0}, "row": 0}, "'data@0.read' has no 'rows' in it"),
        (torch.ones(2), {"read": torch.zeros(2)}, "'data@0.read' .*other names, such as 'data@0'"),
        ({"read": torch.ones(2)}, torch.zeros(2), "'data@0' .*other names, such as 'data@0.read'"),
    ],
)
def test_a_value_of_this_rank_that_was_no_dict_is_not_left_for_one_that_is(
    saved: Any, fresh: Any, said: str, optional: bool, tmp_path: Path
) -> None:
    path = tmp_path / "it"
    holdfast.save({"w": torch.ones(2), "data": holdfast.PerRank(saved, optional)}, path, job=ALONE)
    state = {"w": torch.zeros(2), "data": holdfast.PerRank(fresh, optional)}
    with pytest.raises(MissingTensors, match=f"(?s){said}"):
        holdfast.load(state, path, job=ALONE)
    report = holdfast.load(state, path, strict=False, job=ALONE)
    assert report.missing, "the present value stays, and the report says so"


def test_a_new_name_in_an_optional_value_of_this_rank_is_left_as_it_is(tmp_path: Path) -> None:
    saved = {"w": torch.ones(2), "data": holdfast.PerRank({"read": 17}, optional=True)}
    holdfast.save(saved, tmp_path / "it", job=ALONE)
    state = {"w": torch.zeros(2), "data": holdfast.PerRank({"read": 0, "new": {"x": 4}}, optional=True)}
    holdfast.load(state, tmp_path / "it", job=ALONE)
    assert state["data"].value == {"read": 17, "new": {"x": 4}}
    needed = {"w": torch.zeros(2), "data": holdfast.PerRank({"read": 0, "new": 4})}
    with pytest.raises(MissingTensors, match=r"(?s)'data@0.new' .*other names, such as 'data@0.read'"):
        holdfast.load(needed, tmp_path / "it", job=ALONE)


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("fresh", [None, {}, [], {"row": 0}, {"read": {}}])
def test_a_value_of_this_rank_is_never_left_for_its_other_names(
    fresh: Any, optional: bool, tmp_path: Path
) -> None:
    """`optional` is for a rank that is new. One that has saved would begin anew with its present value."""
    saved = holdfast.PerRank({"read": {"rows": 17}} if fresh == {"read": {}} else {"read": 17}, optional)
    holdfast.save({"w": torch.ones(2), "data": saved}, tmp_path / "it", job=ALONE)
    state = {"w": torch.zeros(2), "data": holdfast.PerRank(fresh, optional)}
    with pytest.raises(MissingTensors, match=r"'data@0") as error:
        holdfast.load(state, tmp_path / "it", job=ALONE)
    assert "no value of this rank" not in error.value.hint
    if isinstance(fresh, dict) and fresh.get("row") is None:
        assert "as holdfast.load(path, include=['data@0" in error.value.hint
    else:
        assert "other names, such as 'data@0.read'" in error.value.hint


def test_an_optional_value_of_a_rank_may_have_got_a_new_part(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "data": holdfast.PerRank({"read": 17}, optional=True)}
    holdfast.save(state, tmp_path / "it", job=ALONE)
    state["data"] = holdfast.PerRank({"read": 0, "epoch": 1}, optional=True)
    holdfast.load(state, tmp_path / "it", job=ALONE)
    assert state["data"].value == {"read": 17, "epoch": 1}
