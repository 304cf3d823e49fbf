"""Tied weights: stored once, whole under each name, and tied again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import holdfast
import holdfast.dcp as dcp
from holdfast._core.existing.reindex import reindex
from holdfast._core.format.index import Index
from holdfast._core.format.index_layout import encode
from holdfast._core.format.names import FORMAT, NARROW, SHARED
from holdfast._core.io.index_file import open_index
from holdfast._core.state.flatten import build_shard_table, flatten
from holdfast._core.state.tied import find_ties
from holdfast._core.store.local import LocalStore
from holdfast._models.equality.same import same
from holdfast._tools.checkpoints.inspect import Checkpoint, describe
from holdfast._tools.checkpoints.verify import verify
from holdfast.errors import CorruptCheckpoint, LoadFailed
from tests.support.cpu_time import cpu_seconds
from tests.support.threads import on_ranks

ALONE = holdfast.Job(no_dist=True)
W = torch.arange(512.0 * 256).reshape(512, 256)
NBYTES = W.nbytes


class Model(torch.nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(512, 256)
        self.norm = torch.nn.LayerNorm(256)
        self.lm_head = torch.nn.Linear(256, 512, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def written(folder: Path) -> int:
    """The bytes of the data files."""
    return sum(path.stat().st_size for path in (folder / "data").iterdir())


def is_tied(folder: Path) -> bool:
    values = holdfast.open(folder).read()
    assert torch.equal(values["embed.weight"], values["lm_head.weight"])
    return values["embed.weight"] is values["lm_head.weight"]


def save(state: Any, folder: Path, background: bool = False, **arguments: Any) -> None:
    job = arguments.pop("job", ALONE)
    if background:
        holdfast.async_save(state, folder, job=job, **arguments).committed(60)
    else:
        holdfast.save(state, folder, job=job, **arguments)


@pytest.mark.parametrize("background", [False, True], ids=["now", "async"])
def test_the_bytes_are_stored_once_and_are_whole_under_both_names(tmp_path: Path, background: bool) -> None:
    model = Model(tied=True)
    save(model, tmp_path / "it", background)
    assert NBYTES < written(tmp_path / "it") < 1.2 * NBYTES
    with holdfast.open(tmp_path / "it") as opened:
        for name in ("embed.weight", "lm_head.weight"):
            assert torch.equal(opened[name][3:5], model.embed.weight[3:5])
    assert verify(tmp_path / "it").whole
    assert reindex(tmp_path / "it", force=True).action == "written"
    assert is_tied(tmp_path / "it")


OPTIONS = [
    holdfast.Options(max_file_bytes=300_000),
    holdfast.Options(columns=("embed.*",), fingerprint=True),
    holdfast.Options(host_memory_budget=600_000),
]


@pytest.mark.parametrize("options", OPTIONS, ids=["several files", "panels", "waves"])
@pytest.mark.parametrize("background", [False, True], ids=["now", "async"])
def test_however_the_bytes_are_cut(tmp_path: Path, background: bool, options: holdfast.Options) -> None:
    one, other = W.clone(), W.clone() + 1
    state = {"embed.weight": one, "lm_head.weight": one, "a": other, "z": other}
    save(state, tmp_path / "it", background, job=holdfast.Job(no_dist=True, options=options))
    assert is_tied(tmp_path / "it")
    assert written(tmp_path / "it") < 2.2 * NBYTES
    assert verify(tmp_path / "it").whole
    assert torch.equal(holdfast.open(tmp_path / "it")["z"][...], other)


@pytest.mark.parametrize("target", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("source", [False, True], ids=["from untied", "from tied"])
def test_each_loads_into_each(tmp_path: Path, source: bool, target: bool) -> None:
    model, other = Model(source), Model(target)
    model.lm_head.load_state_dict({"weight": model.embed.weight})
    save({"m": model}, tmp_path / "it")
    report = holdfast.load({"m": other}, tmp_path / "it", job=ALONE)
    assert torch.equal(other.embed.weight, model.embed.weight)
    assert torch.equal(other.lm_head.weight, model.embed.weight)
    assert (other.lm_head.weight is other.embed.weight) == target
    assert report.tensors == 4
    assert (report.bytes_needed > 2 * NBYTES) == (not target)  # a tied target is filled once


def test_without_a_state_the_names_give_one_tensor(tmp_path: Path) -> None:
    save(Model(tied=True), tmp_path / "it")
    values = holdfast.load(tmp_path / "it")
    assert values["embed"]["weight"] is values["lm_head"]["weight"]
    cast = holdfast.load(tmp_path / "it", cast=torch.bfloat16, rename={"embed": "wte"})
    assert cast["wte"]["weight"] is cast["lm_head"]["weight"]
    assert cast["wte"]["weight"].dtype is torch.bfloat16
    lazy = holdfast.load(tmp_path / "it", lazy=True)
    assert torch.equal(lazy["lm_head"]["weight"][7], values["embed"]["weight"][7])
    part = holdfast.load(tmp_path / "it", include=["lm_head"])
    assert torch.equal(part["lm_head"]["weight"], values["lm_head"]["weight"])


def test_equal_bytes_are_not_tied_and_views_that_overlap_are_stored_by_themselves(tmp_path: Path) -> None:
    zeros = torch.zeros(64, 64)
    state = {
        "a": zeros,
        "b": zeros.clone(),
        "part": zeros[:32],
        "turned": zeros.T,
        "as_ints": zeros.view(torch.int32),
        "flat": zeros.view(-1),
        "row": W[0].expand(4, 256),
        "row_again": W[0].expand(4, 256),
        "conj": torch.zeros(4, dtype=torch.complex64).conj(),
    }
    state["plain"] = state["conj"].conj()
    save(state, tmp_path / "it")
    values = holdfast.open(tmp_path / "it").read()
    assert len({id(value) for value in values.values()}) == len(values) - 1
    assert values["row"] is values["row_again"]
    assert all(torch.equal(values[name], value) for name, value in state.items())


def test_an_index_has_the_new_format_only_if_bytes_are_shared(tmp_path: Path) -> None:
    found = {}
    for name, tied in (("tied", True), ("untied", False)):
        save(Model(tied), tmp_path / name)
        with open_index(LocalStore(tmp_path / name)) as index:
            found[name] = index._header.metadata["format"]
    assert found == {"tied": SHARED, "untied": NARROW}


def test_chunks_may_share_all_their_bytes_or_none(tmp_path: Path) -> None:
    save({"a": W, "b": W}, tmp_path / "it")
    with open_index(LocalStore(tmp_path / "it")) as index:
        columns, about = index.select(), index.about

    def opened() -> Any:
        data = encode(columns, about)
        return Index(lambda start, length: data[start : start + length], len(data), "it").select()

    assert opened().names == ["a", "b"]
    columns.shared = False  # an earlier format
    with pytest.raises(CorruptCheckpoint, match="two chunks on the same bytes"):
        opened()
    columns.shared = True
    columns.position[0] -= 4
    with pytest.raises(CorruptCheckpoint, match="two chunks on the same bytes"):
        opened()


def test_a_reader_of_earlier_formats_refuses_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(Model(tied=True), tmp_path / "it")
    monkeypatch.setattr("holdfast._core.format.index.SHARED", "holdfast-1.3")
    with pytest.raises(CorruptCheckpoint, match=rf"has format '{SHARED}'; this Holdfast reads '{FORMAT}'"):
        holdfast.open(tmp_path / "it")


@pytest.mark.parametrize("stored", ["holdfast", "other chunks", "torch DCP"])
def test_two_values_for_one_tensor_are_refused(tmp_path: Path, stored: str) -> None:
    state = {"a": W, "b": W.clone()}

    def put() -> None:
        if stored == "torch DCP":
            torch_dcp.save(state, checkpoint_id=tmp_path / "it", no_dist=True)
        elif stored == "holdfast":
            save(state, tmp_path / "it")
        else:
            cut = {"b": [holdfast.Shard(state["b"][at : at + 256], (512, 256), (at, 0)) for at in (0, 256)]}
            save({"a": W, **cut}, tmp_path / "it")

    put()
    one = torch.zeros_like(W)
    holdfast.load({"a": one, "b": one}, tmp_path / "it", job=ALONE)
    assert torch.equal(one, W)
    state["b"][300, 7] += 1
    put()
    with pytest.raises(LoadFailed, match="'a' and 'b' share memory on rank 0") as caught:
        holdfast.load({"a": one, "b": one}, tmp_path / "it", job=ALONE)
    assert "exclude" in str(caught.value)
    holdfast.load({"a": one, "b": one}, tmp_path / "it", exclude=["a"], job=ALONE)
    assert torch.equal(one, state["b"])


OVERLAP: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "views": lambda w: {"a": w, "b": w[2:5]},
    "views, larger": lambda w: {"a": w[:400], "b": w[300:]},
    "a shard and a plain tensor": lambda w: {"a": w, "b": holdfast.Shard(w, w.shape, (0, 0))},
    "two replicas": lambda w: {"a": w, "b": holdfast.Shard(w, w.shape, (0, 0), (0, 2))},
    "a row of a strided view": lambda w: {"a": w.t()[:, :5], "b": w[0]},
    "columns": lambda w: {"a": w[:, :60], "b": w[:, 59:]},
    "a row and a column": lambda w: {"a": w[3], "b": w[:, 4]},
    "the diagonal and a row": lambda w: {"a": w.diagonal(), "b": w[7]},
    "among many columns": lambda w: {"a": w[:, 0], "b": w[:, :2], **{f"c{n}": w[:, n] for n in range(2, 99)}},
}


@pytest.mark.parametrize("kind", OVERLAP)
def test_targets_that_overlap_get_all_that_is_stored_or_the_load_says_so(tmp_path: Path, kind: str) -> None:
    """Not the damage that it looks like: then `restore` would pass over a whole step."""
    given = OVERLAP[kind](W.clone())
    values = {name: getattr(value, "tensor", value).clone() for name, value in given.items()}
    save(values, tmp_path / "it")
    target = torch.zeros_like(W)
    into = OVERLAP[kind](target)
    holdfast.load(into, tmp_path / "it", job=ALONE)
    for name, value in values.items():
        assert torch.equal(getattr(into[name], "tensor", into[name]), value)
    values["b"] += 1
    save(values, tmp_path / "it")
    with pytest.raises(LoadFailed, match=r"'[ab]' and '[ab]' share memory on rank 0"):
        holdfast.load(into, tmp_path / "it", job=ALONE)


def test_one_tensor_for_names_of_other_dtypes(tmp_path: Path) -> None:
    save({"a": W, "b": W.bfloat16(), "c": W[:100]}, tmp_path / "it")
    one = torch.zeros_like(W)
    with pytest.raises(LoadFailed, match="share memory"):  # W has bits that bfloat16 has not
        holdfast.load({"a": one, "b": one}, tmp_path / "it", cast=True, job=ALONE)
    save({"a": W, "b": W.double()}, tmp_path / "it", expected=None)
    holdfast.load({"a": one, "b": one}, tmp_path / "it", cast=True, job=ALONE)
    assert torch.equal(one, W)


def test_the_columns_of_a_matrix_do_not_overlap(tmp_path: Path) -> None:
    """They are read once, although the memory of one begins in that of the other."""
    save({"a": W[:, :100].clone(), "b": W[:, 100:].clone()}, tmp_path / "it")
    target = torch.zeros_like(W)
    report = holdfast.load({"a": target[:, :100], "b": target[:, 100:]}, tmp_path / "it", job=ALONE)
    assert torch.equal(target, W)
    assert report.bytes_read < 1.2 * NBYTES


def test_many_columns_of_a_matrix_are_loaded(tmp_path: Path) -> None:
    save({f"c{n}": W[:, n].clone() for n in range(W.shape[1])}, tmp_path / "it")
    target = torch.zeros_like(W)
    holdfast.load({f"c{n}": target[:, n] for n in range(W.shape[1])}, tmp_path / "it", job=ALONE)
    assert torch.equal(target, W)


def shared_by_ranks(
    tmp_path: Path, state_of: Callable[[int], dict[str, Any]], world: int = 4, background: bool = False
) -> None:
    def job(roster: Any) -> None:
        mine = holdfast.Job(roster=roster, timeout=60, options=holdfast.Options(split_bytes=1 << 16))
        save(state_of(roster.rank), tmp_path / "it", background, job=mine)

    on_ranks(world, job)


@pytest.mark.parametrize("background", [False, True], ids=["now", "async"])
@pytest.mark.parametrize("knows", ["all", "one", "all but one"])
def test_replicas_are_tied_if_all_ranks_know(tmp_path: Path, knows: str, background: bool) -> None:
    """Pieces of one tensor are written by four ranks; which ones depends on the name."""
    tied = {"all": range(4), "one": [2], "all but one": [0, 1, 3]}[knows]

    def state_of(rank: int) -> dict[str, Any]:
        one = W.clone()
        return {"embed.weight": one, "lm_head.weight": one if rank in tied else W.clone(), "rank": 3}

    shared_by_ranks(tmp_path, state_of, background=background)
    assert is_tied(tmp_path / "it") == (knows == "all")
    assert torch.equal(holdfast.open(tmp_path / "it")["lm_head.weight"][...], W)
    assert (written(tmp_path / "it") < 1.5 * NBYTES) == (knows == "all")
    assert verify(tmp_path / "it").whole


@pytest.mark.parametrize("background", [False, True], ids=["now", "async"])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("knows", ["all", "one"])
def test_shards_are_tied_if_all_ranks_know(tmp_path: Path, copies: int, knows: str, background: bool) -> None:
    """As with FSDP2, and with replicated shards as of HSDP, whose ranks choose a writer by the name."""

    def state_of(rank: int) -> dict[str, Any]:
        low = rank // copies * 512 // (4 // copies)
        part = W[low : low + 512 // (4 // copies)].clone()
        other = part if knows == "all" or rank == 1 else part.clone()
        replica = (rank % copies, copies)
        return {
            "embed.weight": holdfast.Shard(part, (512, 256), (low, 0), replica),
            "lm_head.weight": holdfast.Shard(other, (512, 256), (low, 0), replica),
        }

    shared_by_ranks(tmp_path, state_of, background=background)
    assert is_tied(tmp_path / "it") == (knows == "all")
    assert verify(tmp_path / "it").whole
    whole = Model(tied=True)
    holdfast.load(whole, tmp_path / "it", exclude=["norm"], job=ALONE)
    assert torch.equal(whole.lm_head.weight, W)


def test_steps_that_share_files_may_tie_and_untie(tmp_path: Path) -> None:
    job = holdfast.Job(no_dist=True, options=holdfast.Options(link_unchanged=True, fingerprint=True))
    model = Model(tied=True)
    for step, change in enumerate(["tied", "again", "untied", "tied"]):
        if change == "untied":
            model.lm_head.weight = torch.nn.Parameter(model.embed.weight.detach().clone())
        elif change == "tied":
            model.lm_head.weight = model.embed.weight
        folder = tmp_path / f"step-{step:08d}"
        save(model, folder, step=step, job=job)
        assert is_tied(folder) == (change != "untied")
        assert verify(folder).whole
    report = same(tmp_path / "step-00000001", tmp_path / "step-00000002")
    assert report.same
    assert describe(tmp_path / "step-00000003").bytes < 1.2 * NBYTES  # type: ignore[union-attr]


def test_what_is_printed_counts_them_once(tmp_path: Path) -> None:
    save(Model(tied=True), tmp_path / "it")
    about = describe(tmp_path / "it")
    assert isinstance(about, Checkpoint)
    assert sum(total.bytes for total in about.totals) == NBYTES + 2 * 256 * 4
    assert {tensor.name: tensor.tied_to for tensor in about.shown if tensor.tied_to} == {
        "lm_head.weight": "embed.weight"
    }


def test_a_flipped_bit_is_found_once(tmp_path: Path) -> None:
    save(Model(tied=True), tmp_path / "it")
    [path] = (tmp_path / "it" / "data").iterdir()
    data = bytearray(path.read_bytes())
    data[NBYTES // 2] ^= 1
    path.write_bytes(data)
    report = verify(tmp_path / "it")
    assert [damage.tensor for damage in report.damage] == ["embed.weight"]  # type: ignore[union-attr]
    for name in ("embed.weight", "lm_head.weight"):
        with pytest.raises(CorruptCheckpoint, match="do not match the digest"):
            holdfast.open(tmp_path / "it")[name][...]


def test_stock_dcp_reads_both_names(tmp_path: Path) -> None:
    dcp.save({"a": W, "b": W}, checkpoint_id=tmp_path / "it", no_dist=True)
    state = {"a": torch.zeros_like(W), "b": torch.zeros_like(W)}
    torch_dcp.load(state, storage_reader=dcp.HoldfastReader(tmp_path / "it"), no_dist=True)
    assert torch.equal(state["a"], W)
    assert torch.equal(state["b"], W)


def test_ties_are_found_without_comparing_pairs() -> None:
    def seconds(count: int) -> float:
        one = torch.zeros(2)
        table, _ = build_shard_table(flatten({f"w{at}": one for at in range(count)}, 0).leaves, 0, (0,))
        assert len(find_ties(table)) == count - 1
        return cpu_seconds(lambda: find_ties(table))

    # Comparing pairs would take a hundred times as long.
    assert seconds(40_000) < 20 * seconds(4_000)
