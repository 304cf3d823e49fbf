"""Are these the same weights: across layouts, formats and dtypes, with fingerprints and without."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import save_file

import holdfast
from holdfast._core.io import stream
from holdfast._tools.cli import cli
from holdfast.errors import (
    BadInput,
    CorruptCheckpoint,
    CoverageError,
    HoldfastError,
    NotCommitted,
    RankFailed,
    ReplicaMismatch,
    StorageError,
)
from tests.store.faults import FOREVER, Faults
from tests.support.threads import on_ranks

ROUNDED = {"value": "0" * 32, "inexact": False, "lost": [], "has_nan": False}
PLAIN, MARKED = holdfast.Options(), holdfast.Options(fingerprint=True)


def weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "experts": torch.randn(6, 10, 14, generator=random).to(dtype),
        "head": torch.randn(33, 7, generator=random).to(dtype),
        "norm": torch.randn(19, generator=random).to(dtype),
        "scale": torch.randn((), generator=random).to(dtype),
        "none": torch.empty(0, 4, dtype=dtype),
    }


def spread(
    state: dict[str, torch.Tensor], folder: Path, ranks: int, options: holdfast.Options = PLAIN
) -> Path:
    """Saved by several ranks, each tensor cut along its longest axis, unevenly."""

    def job(roster: Any) -> None:
        mine: dict[str, object] = {}
        for name, tensor in state.items():
            if not tensor.dim() or not tensor.numel():
                mine[name] = tensor
                continue
            axis = int(np.argmax(tensor.shape))
            cuts = [
                0,
                *sorted((7 * rank + 3) % tensor.shape[axis] for rank in range(1, ranks)),
                tensor.shape[axis],
            ]
            low, high = cuts[roster.rank], cuts[roster.rank + 1]
            offset = tuple(low if at == axis else 0 for at in range(tensor.dim()))
            part = tensor.narrow(axis, low, high - low)
            mine[name] = holdfast.Shard(part, offset=offset, global_shape=tuple(tensor.shape))
        mine["optimizer"] = {"step": roster.rank, "w": torch.full((2,), float(ranks))}
        holdfast.save(
            mine, folder, job=holdfast.Job(roster=roster, options=options), exclude=["optimizer.step"]
        )

    on_ranks(ranks, job)
    return folder


def changed(state: dict[str, torch.Tensor], name: str, *place: int) -> dict[str, torch.Tensor]:
    other = {key: value.clone() for key, value in state.items()}
    other[name][place] += 1
    return other


@pytest.mark.parametrize("options", [MARKED, PLAIN], ids=["fingerprints", "read"])
@pytest.mark.parametrize("marked", ["a", "both"])
def test_layouts_do_not_matter(tmp_path: Path, options: holdfast.Options, marked: str) -> None:
    state = weights()
    a = spread(state, tmp_path / "a", 1, options=MARKED)
    b = spread(state, tmp_path / "b", 3, options=options)
    found = holdfast.same(a, b)
    assert found.same
    assert found.equal == len(state)
    size = sum(tensor.nbytes for tensor in state.values())
    assert found.bytes_read == (0 if options.fingerprint else size)  # of the one that has none


@pytest.mark.parametrize(
    "name", ["optim", "optimizer", "chained_0", "rng_state", "an_extra_state", "sparse", "array"]
)
def test_what_is_no_weight_is_passed_over_and_diff_sees_it(name: str, tmp_path: Path) -> None:
    for number, place in enumerate("ab"):
        other = torch.full((3,), float(number))
        objects = {"sparse": other.to_sparse(), "array": other.numpy()}
        state = {"w": torch.ones(3), name: objects.get(name, {"w": other})}
        holdfast.save(state, tmp_path / place, job=holdfast.Job(no_dist=True))
    found = holdfast.same(tmp_path / "a", tmp_path / "b")
    assert found.same
    assert found.objects == ((name,) if name in objects else ())
    assert (f"not compared: what is stored as an object ({name!r})" in str(found)) == (name in objects)
    assert not holdfast.same(tmp_path / "a", tmp_path / "b", exclude=[name]).objects
    places = str(tmp_path / "a"), str(tmp_path / "b")
    shown = CliRunner().invoke(cli, ["same", *places])
    assert (f"Not compared: 1 object, {name}; holdfast diff" in shown.output) == (name in objects)
    assert CliRunner().invoke(cli, ["diff", *places, "--json"]).exit_code == 1


@pytest.mark.parametrize("options", [MARKED, PLAIN], ids=["fingerprints", "read"])
@pytest.mark.parametrize(
    ("name", "place"), [("experts", (4, 9, 13)), ("head", (0, 0)), ("norm", (18,)), ("scale", ())]
)
def test_one_element_is_found(
    tmp_path: Path, name: str, place: tuple[int, ...], options: holdfast.Options
) -> None:
    state = weights()
    a = spread(state, tmp_path / "a", 2, options=options)
    b = spread(changed(state, name, *place), tmp_path / "b", 3, options=options)
    found = holdfast.same(a, b)
    assert not found.same
    assert [one.name for one in found.different] == [name]
    assert found.equal == len(state) - 1
    found = holdfast.same(a, b, where=True)
    assert (found.different[0].elements, found.different[0].first) == (1, place)
    said = CliRunner().invoke(cli, ["same", str(a), str(b), "--where"])
    assert said.exit_code == 1
    assert f"1 element, the first at {list(place)}" in said.output
    assert f"elements of {found.different[0].a}" in CliRunner().invoke(cli, ["same", str(a), str(b)]).output


def test_experts_that_changed_places_are_counted_from_the_first_of_them(tmp_path: Path) -> None:
    state = weights()
    other = dict(state, experts=state["experts"][[0, 3, 2, 1, 4, 5]])
    a, b = spread(state, tmp_path / "a", 2), spread(other, tmp_path / "b", 1)
    (found,) = holdfast.same(a, b, where=True).different
    assert found.elements == int((state["experts"] != other["experts"]).sum())
    assert found.first == (1, 0, 0)


def test_what_is_in_one_only_or_has_another_shape(tmp_path: Path) -> None:
    state = weights()
    other = {**state, "head": state["head"][:30], "more": state["norm"]}
    del other["norm"]
    a, b = spread(state, tmp_path / "a", 2, options=MARKED), spread(other, tmp_path / "b", 2, options=MARKED)
    found = holdfast.same(a, b)
    assert (found.only_a, found.only_b) == (("norm",), ("more",))
    (head,) = found.different
    assert (head.a, head.b) == ("bfloat16[33, 7]", "bfloat16[30, 7]")
    assert not found.same
    assert holdfast.same(a, b, exclude=["head", "norm", "more"]).same
    assert holdfast.same(a, b, include=["experts"]).equal == 1


def test_a_prefix_that_one_place_has_is_left_out_and_told(tmp_path: Path) -> None:
    state, alone = weights(), holdfast.Job(no_dist=True, options=MARKED)
    for name, value in {
        "plain": state,
        "under": {"model": state},
        "other": {"model": changed(state, "norm", 3)},
        "twice": {"model": state, "average": state},
        "beside": {"model": state, "norms": state["norm"]},
    }.items():
        holdfast.save(value, tmp_path / name, job=alone)
    live = holdfast.fingerprint({"all": {"model": state}}, job=alone)
    for a, b in ((tmp_path / "plain", tmp_path / "under"), (live, tmp_path / "plain")):
        for places in ((a, b), (b, a)):
            found = holdfast.same(*places)
            assert found.same
            assert found.equal == found.by_fingerprints == len(state)
            assert {found.prefix_a, found.prefix_b} in ({"", "model."}, {"", "all.model."})
            assert f"without {found.prefix_a or found.prefix_b!r}" in str(found)
    (one,) = holdfast.same(tmp_path / "other", tmp_path / "plain", where=True).different
    assert (one.name, one.elements, one.first) == ("norm", 1, (3,))
    assert holdfast.same(tmp_path / "beside", tmp_path / "plain").only_a == ("norms",)
    assert holdfast.same(tmp_path / "beside", tmp_path / "plain", include=["model"]).same
    # Which of the two is meant can't be told, so nothing is left out.
    assert len(holdfast.same(tmp_path / "twice", tmp_path / "plain").only_a) == 2 * len(state)
    assert holdfast.same(tmp_path / "twice", tmp_path / "plain", include=["average"]).same


def test_nothing_was_compared_by_fingerprints_that_are_not_there(tmp_path: Path) -> None:
    for name in ("a", "b"):
        holdfast.save({name: torch.ones(2)}, tmp_path / name, job=holdfast.Job(no_dist=True))
    said = CliRunner().invoke(cli, ["same", str(tmp_path / "a"), str(tmp_path / "b")])
    assert "Different: 2 tensors; equal: 0; no weights read." in said.output


def test_another_dtype_is_compared_in_the_less_exact_one(tmp_path: Path) -> None:
    exact = weights(dtype=torch.float32)
    rounded = {name: tensor.bfloat16() for name, tensor in exact.items()}
    a, b = (
        spread(exact, tmp_path / "a", 1, options=MARKED),
        spread(rounded, tmp_path / "b", 2, options=MARKED),
    )
    found = holdfast.same(a, b)
    assert found.same
    assert found.converted == dict.fromkeys(exact, "bfloat16")
    other = spread(changed(rounded, "norm", 3), tmp_path / "c", 2)
    assert [one.name for one in holdfast.same(other, a).different] == ["norm"]


def test_rounding_is_told_and_what_a_dtype_holds_exactly_is_not(tmp_path: Path) -> None:
    exact = {"a": torch.tensor([1.0, 0.1]), "b": torch.tensor([1.0, 2.0]), "c": torch.tensor([float("inf")])}
    holdfast.save(exact, tmp_path / "exact", job=holdfast.Job(no_dist=True))
    holdfast.save(
        {name: value.bfloat16() for name, value in exact.items()},
        tmp_path / "bf16",
        job=holdfast.Job(no_dist=True),
    )
    found = holdfast.same(tmp_path / "exact", tmp_path / "bf16")
    assert found.same
    assert found.converted == dict.fromkeys("abc", "bfloat16")
    assert found.rounded == {"a": "bfloat16"}
    said = CliRunner().invoke(cli, ["same", str(tmp_path / "bf16"), str(tmp_path / "exact")])
    assert said.exit_code == 0
    assert "Compared as bfloat16: 3 tensors, a, b, c." in said.output
    assert "Rounded for this: 'a' to bfloat16." in said.output


LOST = {
    "infinite": (1e5, torch.float16, "become infinite"),
    "zero": (1e-9, torch.float16, "become zero"),
    "infinite in bfloat16": (3.4e38, torch.bfloat16, "become infinite"),
    "zero in bfloat16": (1e-45, torch.bfloat16, "become zero"),
}


@pytest.mark.parametrize("options", [MARKED, PLAIN], ids=["fingerprints", "read"])
@pytest.mark.parametrize("case", LOST)
def test_a_cast_that_lost_a_value_is_a_difference(
    tmp_path: Path, case: str, options: holdfast.Options
) -> None:
    value, dtype, words = LOST[case]
    exact = torch.ones(4, 6)
    exact[2, 3] = value
    holdfast.save(
        {"w": exact, "b": exact[0]}, tmp_path / "a", job=holdfast.Job(no_dist=True, options=options)
    )
    less = {"w": exact.to(dtype), "b": exact[0].to(dtype)}
    holdfast.save(less, tmp_path / "b", job=holdfast.Job(no_dist=True, options=options))
    for a, b in (("a", "b"), ("b", "a")):
        found = holdfast.same(tmp_path / a, tmp_path / b, where=True)
        assert not found.same
        (one,) = found.different
        assert one.name == "w"
        assert words in (one.b if b == "b" else one.a)
        assert (one.elements, one.first) == (1, (2, 3))
        assert not holdfast.same(tmp_path / a, tmp_path / b).same
    said = CliRunner().invoke(cli, ["same", str(tmp_path / "a"), str(tmp_path / "b")])
    assert said.exit_code == 1
    assert words in " ".join(said.output.split())


def test_a_live_state_knows_that_a_cast_to_its_dtype_lost_a_value(tmp_path: Path) -> None:
    exact = torch.tensor([1.0, 1e6])
    holdfast.save({"w": exact}, tmp_path / "a", job=holdfast.Job(no_dist=True))
    live = holdfast.fingerprint({"w": exact.half()}, job=holdfast.Job(no_dist=True))
    (one,) = holdfast.same(live, tmp_path / "a").different
    assert "become infinite" in one.a


def test_a_checkpoint_of_torch_dcp_and_a_folder_of_safetensors(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in weights().items() if name != "none"}
    a = spread(state, tmp_path / "a", 3, options=MARKED)
    dcp.save(dict(state), checkpoint_id=tmp_path / "b", no_dist=True)
    (tmp_path / "c").mkdir()
    save_file(changed(state, "head", 32, 6), tmp_path / "c" / "model.safetensors")
    assert holdfast.same(a, tmp_path / "b").same
    found = holdfast.same(tmp_path / "c", tmp_path / "b", where=True)
    assert [(one.name, one.elements, one.first) for one in found.different] == [("head", 1, (32, 6))]
    assert [one.name for one in holdfast.same(tmp_path / "c", a).different] == ["head"]


def test_fingerprints_are_compared_as_json_has_them(tmp_path: Path) -> None:
    job = holdfast.Job(no_dist=True)
    holdfast.save(weights(), tmp_path / "a", job=job)
    sent = json.loads(msgspec.json.encode(holdfast.fingerprint(weights(), job=job)))
    assert holdfast.same(tmp_path / "a", sent).same
    assert holdfast.same(holdfast.fingerprint(weights(), job=job), sent).same
    assert len(holdfast.same(tmp_path / "a", sent | {"norm": sent["head"] | {"shape": [19]}}).different) == 1
    for text in (json.dumps(sent), json.dumps(sent).encode()):
        with pytest.raises(BadInput, match=r"^Fingerprints as JSON .* json\.loads"):
            holdfast.same(tmp_path / "a", text)  # type: ignore[arg-type]
    spoiled: Any
    for spoiled in (
        {**sent, "norm": 3},
        {**sent, "norm": {"value": "0"}},
        weights(),
        {3: sent["norm"]},
        torch.nn.Linear(2, 2),
    ):
        with pytest.raises(BadInput, match="what fingerprint"):
            holdfast.same(tmp_path / "a", spoiled)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "float33"},
        {"shape": [-1]},
        {"value": ""},
        {"value": "0" * 31 + "F"},
        {"rounded": {"x": ROUNDED}},
    ],
    ids=str,
)
def test_what_is_no_fingerprint_is_not_called_a_difference(wrong: dict[str, Any], tmp_path: Path) -> None:
    job = holdfast.Job(no_dist=True)
    holdfast.save(weights(), tmp_path / "a", job=job)
    sent = json.loads(msgspec.json.encode(holdfast.fingerprint(weights(), job=job)))
    with pytest.raises(BadInput, match="The fingerprint of 'norm' can't be that of a tensor"):
        holdfast.same(tmp_path / "a", sent | {"norm": sent["norm"] | wrong})


def test_two_live_states_are_told_apart() -> None:
    job = holdfast.Job(no_dist=True)
    known, less = (holdfast.fingerprint(state, job=job) for state in (weights(), {"head": weights()["head"]}))
    sent = json.loads(msgspec.json.encode(less))
    for a, b, only in ((known, sent, (4, 0)), (sent, known, (0, 4))):
        text = str(holdfast.same(a, b))
        assert f"only in the first live state: {only[0]}; only in the second live state: {only[1]}" in text
    ints = holdfast.fingerprint({"head": torch.ones(33, 7, dtype=torch.int8)}, job=job)
    with pytest.raises(
        BadInput, match="is bfloat16 in the first live state, and int8 in the second live state"
    ):
        holdfast.same(less, ints)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_live_state_has_the_fingerprints_of_its_checkpoints(tmp_path: Path, ranks: int) -> None:
    state = weights()
    a = spread(state, tmp_path / "a", 2, options=MARKED)
    plain = spread(state, tmp_path / "plain", 2)

    def job(roster: Any) -> Any:
        whole = state["experts"]
        cut = [0, 1, 4, 6][: ranks + 1] if ranks == 3 else [0, 2, 6] if ranks == 2 else [0, 6]
        low, high = cut[roster.rank], cut[roster.rank + 1]
        mine = dict(state) | {
            "experts": holdfast.Shard(whole[low:high], offset=(low, 0, 0), global_shape=tuple(whole.shape)),
            # On no rank row-major, and of two ranks the same part.
            "head": holdfast.Shard(
                state["head"].t().contiguous().t(),
                offset=(0, 0),
                global_shape=(33, 7),
                replica=(roster.rank, ranks),
            ),
            "optimizer": {"x": torch.full((3,), float(roster.rank))},
        }
        return holdfast.fingerprint(mine, job=holdfast.Job(roster=roster, timeout=30, stall_timeout=10))

    told = on_ranks(ranks, job)
    assert all(one == told[0] for one in told)
    assert told[0]["experts"].shape == (6, 10, 14)
    assert told[0].keys() == state.keys()
    found = holdfast.same(told[0], a)
    assert found.same
    assert found.bytes_read == 0
    assert holdfast.same(plain, told[0]).same
    other = dict(told[0], norm=told[0]["norm"].__class__("bfloat16", (19,), "0" * 32))
    assert [one.name for one in holdfast.same(other, plain, where=True).different] == ["norm"]


def test_ranks_that_hold_different_things_are_told() -> None:
    def uneven(roster: Any) -> Any:
        return holdfast.fingerprint(
            {"w": torch.full((4,), float(roster.rank))}, job=holdfast.Job(roster=roster, timeout=30)
        )

    def differing(roster: Any) -> Any:
        state = {"w": torch.full((4,), float(roster.rank)), f"own {roster.rank}": torch.ones(1)}
        return holdfast.fingerprint(state, job=holdfast.Job(roster=roster, timeout=30))

    def partial(roster: Any) -> Any:
        return holdfast.fingerprint(
            {"w": holdfast.Shard(torch.ones(2), offset=(2 * roster.rank,), global_shape=(6,))},
            job=holdfast.Job(roster=roster, timeout=30),
        )

    def shapes(roster: Any) -> Any:
        return holdfast.fingerprint(
            {"w": torch.ones(4 + roster.rank)}, job=holdfast.Job(roster=roster, timeout=30)
        )

    with pytest.raises(ReplicaMismatch, match="Ranks 0 and 1 hold different elements of 'w'"):
        on_ranks(2, differing)
    with pytest.raises(CoverageError, match=r"just once: gap from index \[4\] on"):
        on_ranks(2, partial)
    with pytest.raises(ReplicaMismatch, match=r"rank 0 holds float32\[4\], rank 1 float32\[5\]"):
        on_ranks(2, shapes)
    with pytest.raises(ReplicaMismatch, match="Ranks 0 and 1 hold different elements of 'w'"):
        on_ranks(2, uneven)


@pytest.mark.parametrize("one_element", [False, True])
def test_a_wrong_copy_on_any_rank_is_told(one_element: bool) -> None:
    right = torch.arange(4096.0).view(64, 64)
    wrong = right.clone()
    if one_element:
        wrong[40, 7] += 1
    else:
        wrong *= 1.5

    def fingerprint(roster: Any, stale: int | None) -> Any:
        # Columns over two ranks, each with four copies.
        copy, column = divmod(roster.rank, 2)
        mine = (wrong if roster.rank == stale else right)[:, 32 * column : 32 * column + 32]
        state = {"w": holdfast.Shard(mine, (64, 64), (0, 32 * column), (copy, 4))}
        return holdfast.fingerprint(state, job=holdfast.Job(roster=roster, timeout=30, stall_timeout=10))

    for told in on_ranks(8, lambda roster: fingerprint(roster, None)):
        assert told == holdfast.fingerprint({"w": right}, job=holdfast.Job(no_dist=True))
    # Of one element, column 7: ranks with an even number hold it.
    for stale in (2, 4, 6) if one_element else range(1, 8):
        with pytest.raises(ReplicaMismatch, match="hold different elements of 'w'") as error:
            on_ranks(8, lambda roster, stale=stale: fingerprint(roster, stale))
        assert error.value.details["ranks"] == ([stale, stale + 2] if stale < 2 else [stale % 2, stale])


def test_a_copy_that_is_cut_otherwise_is_not_taken_for_the_same() -> None:
    def cut_otherwise(roster: Any) -> Any:
        rows = 4 - 2 * roster.rank
        part = holdfast.Shard(torch.ones(rows), (4,), (0,), (roster.rank, 2))
        return holdfast.fingerprint({"w": part}, job=holdfast.Job(roster=roster, timeout=30))

    with pytest.raises(ReplicaMismatch, match=r"Rank 1 declares a copy of 'w' at \[0\], of shape \[2\]"):
        on_ranks(2, cut_otherwise)


def test_a_copy_is_not_taken_for_the_tensor() -> None:
    copy = holdfast.Shard(torch.ones(2), global_shape=(2,), offset=(0,), replica=(1, 2))
    with pytest.raises(CoverageError, match="do not hold 'w'"):
        holdfast.fingerprint({"w": copy}, job=holdfast.Job(no_dist=True))


def test_bad_places_are_one_sentence(tmp_path: Path) -> None:
    a = spread(weights(), tmp_path / "a", 1)
    with pytest.raises(NotCommitted, match="nothing"):
        holdfast.same(a, tmp_path / "nothing")
    holdfast.save({"optimizer": {"w": torch.ones(2)}}, tmp_path / "b", job=holdfast.Job(no_dist=True))
    with pytest.raises(BadInput, match="holds no weights"):
        holdfast.same(a, tmp_path / "b")
    told = [
        holdfast.fingerprint(weights(dtype=dtype), job=holdfast.Job(no_dist=True))
        for dtype in (torch.half, torch.bfloat16)
    ]
    with pytest.raises(BadInput, match=r"is float16 in the first live .* bfloat16 .* can't be told"):
        holdfast.same(*told)
    (file,) = (tmp_path / "a" / "data").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpoint):
        holdfast.same(a, spread(weights(), tmp_path / "c", 2))


def lose(folder: Path, other: Path) -> None:
    for path in (folder / "data").iterdir():
        path.unlink()


def lose_the_end(folder: Path, other: Path) -> None:
    path = max((folder / "data").iterdir())
    path.write_bytes(path.read_bytes()[:-1])


def take_the_index_of_another(folder: Path, other: Path) -> None:
    shutil.copy(other / "index.safetensors", folder)


def take_a_file_of_another(folder: Path, other: Path) -> None:
    """Of the same size, under this one's name."""
    for mine, theirs in zip(sorted(folder.glob("data/*")), sorted(other.glob("data/*")), strict=True):
        shutil.copy(theirs, mine)


def break_the_seal(folder: Path, other: Path) -> None:
    path = max((folder / "data").iterdir())
    path.write_bytes(path.read_bytes()[:-8] + b"8 bytes.")


@pytest.mark.parametrize(
    "spoil", [lose, lose_the_end, take_the_index_of_another, take_a_file_of_another, break_the_seal]
)
def test_fingerprints_of_data_that_is_not_there_are_not_believed(tmp_path: Path, spoil: Any) -> None:
    a = spread(weights(), tmp_path / "a", 2, options=MARKED)
    b = spread(weights(), tmp_path / "b", 2, options=MARKED)
    assert holdfast.same(a, b).same
    spoil(b, a)
    for places in ((a, b), (b, a)):
        with pytest.raises(CorruptCheckpoint, match=str(b)):
            holdfast.same(*places)
    assert CliRunner().invoke(cli, ["same", str(a), str(b)]).exit_code == 2


def test_a_file_that_is_missing_is_damage(tmp_path: Path) -> None:
    """Without fingerprints it is noticed when it is to be read: storage's own error came, of no public class."""
    a, b = (spread(weights(), tmp_path / name, 2) for name in ("a", "b"))
    lose(b, a)
    for places in ((a, b), (b, a)):
        with pytest.raises(CorruptCheckpoint, match=f"A data file of {b} is missing: ") as raised:
            holdfast.same(*places)
        assert raised.value.hint


def test_data_that_can_not_be_read_now_is_not_told_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = spread(weights(), tmp_path / "a", 1, options=MARKED)
    faults = Faults(monkeypatch, a / "data")
    faults.arm(errno.EIO, 1, FOREVER, only=("pread",))
    with pytest.raises(StorageError, match="Input/output error"):
        holdfast.same(a, a)


def test_a_pattern_to_include_that_matches_no_name_is_refused(tmp_path: Path) -> None:
    """What it was to name would be left out of the comparison."""
    for place, b in (("a", 1.0), ("b", 2.0)):
        state = {"model": {"a": torch.ones(2), "b": torch.full((2,), b)}}
        holdfast.save(
            state if place == "a" else state["model"], tmp_path / place, job=holdfast.Job(no_dist=True)
        )
    pair = tmp_path / "a", tmp_path / "b"
    for patterns in (["a"], ["model.a"], ["model.a", "a"]):
        assert holdfast.same(*pair, include=patterns).equal == 1
    assert not holdfast.same(*pair, include=["a", "b"]).same
    with pytest.raises(BadInput, match=r"^include: no weight in either place has a name that matches 'B'"):
        holdfast.same(*pair, include=["a", "B"])


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_patterns_are_a_list(tmp_path: Path, argument: str) -> None:
    a = spread(weights(), tmp_path / "a", 1)
    with pytest.raises(BadInput, match=f"{argument} takes a list of patterns, not the text 'e[*]'"):
        holdfast.same(a, a, **{argument: "e*"})
    with pytest.raises(BadInput, match=f"{argument} must be a list"):
        holdfast.same(a, a, **{argument: [1]})


def test_the_command(tmp_path: Path) -> None:
    a = spread(weights(), tmp_path / "run" / "step-00000001", 1, options=MARKED)
    b = spread(weights(), tmp_path / "b", 2, options=MARKED)
    said = CliRunner().invoke(cli, ["same", str(a.parent), str(b)])
    assert said.exit_code == 0
    assert said.output == f"A is {a}.\nThe same: 5 tensors, by fingerprints, nothing read.\n"
    said = CliRunner().invoke(cli, ["same", str(a), str(b), "--json"])
    assert json.loads(said.output)["equal"] == 5
    c = spread(weights(1), tmp_path / "c", 2)
    said = CliRunner().invoke(cli, ["same", str(a), str(c), "--exclude", "none"])
    assert said.exit_code == 1
    assert "Different: 4 tensors; equal: 0" in said.output


def test_large_tensors_are_read_in_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast._core.io.raw_read.slabs.__defaults__", (256,))
    state = weights()
    a = spread(state, tmp_path / "a", 2, options=MARKED)
    b = spread(changed(state, "experts", 5, 9, 13), tmp_path / "b", 3)
    found = holdfast.same(a, b, where=True)
    assert [(one.name, one.elements, one.first) for one in found.different] == [("experts", 1, (5, 9, 13))]


def test_asynchronous_saves_note_fingerprints_too(tmp_path: Path) -> None:
    state = weights()
    pending = holdfast.async_save(state, tmp_path / "a", job=holdfast.Job(no_dist=True, options=MARKED))
    pending.committed(60)
    found = holdfast.same(tmp_path / "a", holdfast.fingerprint(state, job=holdfast.Job(no_dist=True)))
    assert found.same
    assert found.bytes_read == 0


def test_a_thread_that_can_not_be_started_changes_no_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{at}": torch.randn(700, 1000) for at in range(4)}
    spread(state, tmp_path / "a", 1, options=MARKED)
    start, refused = threading.Thread.start, []

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name.startswith("holdfast-sums") and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    spread(state, tmp_path / "b", 1, options=MARKED)
    assert refused
    found = holdfast.same(tmp_path / "a", tmp_path / "b")
    assert found.same
    assert found.bytes_read == 0


def test_a_writer_that_is_done_computes_the_sums_that_nobody_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_thread, released = stream._one_thread, []

    def busy_thread(stack: ExitStack) -> Executor | None:
        pool, end = one_thread(stack), threading.Event()
        assert pool is not None
        pool.submit(lambda: released.append(end.wait(60)))
        stack.callback(end.set)
        return pool

    monkeypatch.setattr(stream, "_one_thread", busy_thread)
    state = {f"w{at}": torch.randn(700, 1000) for at in range(3)} | {"across": torch.randn(1000, 700).T}
    holdfast.save(state, tmp_path / "a", job=holdfast.Job(no_dist=True, options=MARKED))
    found = holdfast.same(tmp_path / "a", holdfast.fingerprint(state, job=holdfast.Job(no_dist=True)))
    assert found.same
    assert found.bytes_read == 0
    assert released == [True]


def test_a_gap_behind_an_overlap_is_told() -> None:
    def overlapping(roster: Any) -> Any:
        part = holdfast.Shard(torch.ones(2), offset=(roster.rank,), global_shape=(4,))
        return holdfast.fingerprint({"w": part}, job=holdfast.Job(roster=roster, timeout=30))

    def second_copies(roster: Any) -> Any:
        part = holdfast.Shard(torch.ones(4), offset=(0,), global_shape=(4,), replica=(1, 2))
        return holdfast.fingerprint({"w": part}, job=holdfast.Job(roster=roster, timeout=30))

    with pytest.raises(CoverageError, match=r"overlap from index \[1\] on"):
        on_ranks(2, overlapping)
    with pytest.raises(CoverageError, match=r"gap from index \[0\] on"):
        on_ranks(2, second_copies)


def test_an_index_that_is_rebuilt_has_the_fingerprints(tmp_path: Path) -> None:
    a = spread(weights(), tmp_path / "a", 3, options=MARKED)
    b = spread(weights(), tmp_path / "b", 2, options=MARKED)
    (a / "index.safetensors").unlink()
    said = CliRunner().invoke(cli, ["reindex", str(a)])
    assert said.exit_code == 0, said.output
    found = holdfast.same(a, b)
    assert found.same
    assert found.bytes_read == 0


def test_a_rank_that_does_not_come_is_named_and_the_next_call_is_as_ever() -> None:
    failed = threading.Event()

    def job(roster: Any) -> Any:
        state = weights()
        if roster.rank == 0:
            with pytest.raises(RankFailed, match="rank 1"):
                holdfast.fingerprint(state, job=holdfast.Job(roster=roster, timeout=30, stall_timeout=1.0))
            failed.set()
        assert failed.wait(30)
        # The rank that was missed hears of it first, as in any call.
        try:
            return holdfast.fingerprint(state, job=holdfast.Job(roster=roster, timeout=30, stall_timeout=10))
        except HoldfastError:
            return holdfast.fingerprint(state, job=holdfast.Job(roster=roster, timeout=30, stall_timeout=10))

    told = on_ranks(2, job)
    assert told[0] == told[1] == holdfast.fingerprint(weights(), job=holdfast.Job(no_dist=True))


CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
    (torch.float64, torch.bfloat16),
]


def fingerprint_of(state: dict[str, torch.Tensor], ranks: int = 3) -> Any:
    """Of a state whose tensors each rank holds some rows of, the last one the most."""

    def job(roster: Any) -> Any:
        mine: dict[str, object] = {}
        for name, tensor in state.items():
            if not tensor.dim() or tensor.shape[0] < ranks:
                mine[name] = tensor
                continue
            low = roster.rank
            high = tensor.shape[0] if low == ranks - 1 else low + 1
            mine[name] = holdfast.Shard(
                tensor[low:high], tuple(tensor.shape), (low, *[0] * (tensor.dim() - 1))
            )
        return holdfast.fingerprint(mine, job=holdfast.Job(roster=roster, timeout=30, stall_timeout=10))

    return on_ranks(ranks, job)[0]


@pytest.mark.parametrize("options", [MARKED, PLAIN], ids=["fingerprints", "read"])
@pytest.mark.parametrize(("exact", "less"), CASTS, ids=lambda dtype: str(dtype)[6:])
def test_a_live_state_is_compared_as_the_folder_stores_it(
    tmp_path: Path, exact: torch.dtype, less: torch.dtype, options: holdfast.Options
) -> None:
    state = {name: (1.1 * tensor).to(exact) for name, tensor in weights(dtype=torch.float64).items()}
    stored = {name: tensor.to(less) for name, tensor in state.items()}
    a = spread(stored, tmp_path / "a", 2, options=options)
    live = fingerprint_of(state)
    for places in ((live, a), (a, live), (live, fingerprint_of(stored))):
        found = holdfast.same(*places)
        assert found.same
        assert found.converted == dict.fromkeys(state, str(less)[6:])
        assert set(found.rounded) == set(state) - {"none"}
        assert str(found) == f"the same: 5 tensors; compared as {str(less)[6:]}: 5 tensors"
    assert holdfast.same(live, a).bytes_read == (
        0 if options.fingerprint else sum(tensor.nbytes for tensor in stored.values())
    )
    # An element of the folder is its neighbour, and one of the state so much more that it rounds otherwise.
    bits = {4: torch.int32, 2: torch.int16}[less.itemsize]
    stored["head"].view(bits)[32, 6] ^= 1
    b = spread(stored, tmp_path / "b", 2, options=options)
    assert [one.name for one in holdfast.same(live, b, where=True).different] == ["head"]
    changed_norm = state["norm"].clone()
    changed_norm[18] *= 1 + torch.finfo(less).eps
    (one,) = holdfast.same(fingerprint_of({**state, "norm": changed_norm}), a).different
    assert (one.name, one.b) == ("norm", f"{str(less)[6:]}[19]")
    assert "different: 1 tensor" in str(holdfast.same(live, b))


@pytest.mark.parametrize("options", [MARKED, PLAIN], ids=["fingerprints", "read"])
def test_rounding_is_to_the_nearest_and_keeps_what_is_special(
    tmp_path: Path, options: holdfast.Options
) -> None:
    patterns = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x80000000, 0x7F800000, 0xFF800000]
    patterns += [0x00010000, 0x00018000, 0x80028000, 0x007FFFFF]  # subnormal
    even = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x8000, 0x7F80, 0xFF80, 0x0001, 0x0002, 0x8002, 0x0080]
    live = {"w": torch.from_numpy(np.asarray(patterns * 3, np.uint32).view(np.float32))}
    stored = torch.from_numpy(np.asarray(even * 3, np.uint16).view(np.int16)).view(torch.bfloat16)
    holdfast.save({"w": stored}, tmp_path / "a", job=holdfast.Job(no_dist=True, options=options))
    assert holdfast.same(fingerprint_of(live), tmp_path / "a").same
    for place, bits in ((0, 0x3F81), (4, 0), (6, 0x7F80), (8, 0x0001), (7, 0)):
        other = stored.clone()
        other.view(torch.int16)[place] = bits
        folder = tmp_path / f"b {place} {bits}"
        holdfast.save({"w": other}, folder, job=holdfast.Job(no_dist=True, options=options))
        assert not holdfast.same(fingerprint_of(live), folder).same


@pytest.mark.parametrize("options", [MARKED, PLAIN], ids=["fingerprints", "read"])
def test_a_nan_that_another_device_cast_is_a_nan(tmp_path: Path, options: holdfast.Options) -> None:
    exact = torch.arange(6.0).reshape(3, 2)
    exact[1, 1] = float("nan")
    alone = holdfast.Job(no_dist=True, options=options)
    holdfast.save({"w": exact}, tmp_path / "exact", job=alone)
    for bits in (0x7FC0, 0x7FFF, -1):
        stored = exact.bfloat16()
        stored.view(torch.int16)[1, 1] = bits
        folder = tmp_path / f"{bits}"
        holdfast.save({"w": stored}, folder, job=alone)
        assert holdfast.same(fingerprint_of({"w": exact}), folder).same
        assert holdfast.same(tmp_path / "exact", folder).same
        # In one dtype bits are compared.
        assert holdfast.same(fingerprint_of({"w": stored}), folder).same
    holdfast.save({"w": exact.nan_to_num().bfloat16()}, tmp_path / "number", job=alone)
    assert not holdfast.same(fingerprint_of({"w": exact}), tmp_path / "number").same
    assert not holdfast.same(fingerprint_of({"w": exact.nan_to_num()}), folder).same
    assert not holdfast.same(tmp_path / "exact", tmp_path / "number").same
    # Of a live state that is less exact only a fingerprint of its own bits is known.
    with pytest.raises(BadInput, match=r"'w' has NaN, and is bfloat16 in the live state.* can't be told"):
        holdfast.same(fingerprint_of({"w": stored}), tmp_path / "exact")


@pytest.mark.parametrize("options", [MARKED, PLAIN], ids=["fingerprints", "read"])
@pytest.mark.parametrize("case", LOST)
def test_a_value_of_a_live_state_that_rounding_lost_is_a_difference(
    tmp_path: Path, case: str, options: holdfast.Options
) -> None:
    value, dtype, words = LOST[case]
    exact = torch.full((300, 400), 0.1)  # several pieces
    exact[299, 399] = value
    holdfast.save({"w": exact.to(dtype)}, tmp_path / "a", job=holdfast.Job(no_dist=True, options=options))
    (one,) = holdfast.same(fingerprint_of({"w": exact}), tmp_path / "a", where=True).different
    assert words in one.b


INCOMPARABLE = [
    (torch.float32, torch.int32),
    (torch.int64, torch.float32),
    (torch.float8_e4m3fn, torch.bfloat16),
    (torch.bfloat16, torch.float8_e4m3fn),
]


@pytest.mark.parametrize(("one", "other"), INCOMPARABLE, ids=lambda dtype: str(dtype)[6:])
def test_dtypes_without_a_cast_are_not_called_different(
    tmp_path: Path, one: torch.dtype, other: torch.dtype
) -> None:
    """Of float8 and of integers the scales are elsewhere."""
    alone = holdfast.Job(no_dist=True)
    for name, dtype in (("a", one), ("b", other)):
        holdfast.save({"w": torch.ones(3, 4).to(dtype), "v": torch.ones(2)}, tmp_path / name, job=alone)
    live = holdfast.fingerprint({"w": torch.ones(3, 4).to(one), "v": torch.ones(2)}, job=alone)
    for place in (tmp_path / "a", live):
        with pytest.raises(BadInput, match=r"'w' is .*whether they are the same can't be told"):
            holdfast.same(place, tmp_path / "b")
        assert holdfast.same(place, tmp_path / "b", exclude=["w"]).same
    said = CliRunner().invoke(cli, ["same", str(tmp_path / "a"), str(tmp_path / "b")])
    assert said.exit_code == 2
    assert "can't be told" in said.output
