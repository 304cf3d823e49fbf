"""In an object store a step refers to the unchanged data of earlier ones, and goes on as if it had written it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner

import holdfast
from holdfast._core.existing.reindex import reindex
from holdfast._core.format.columns import Columns
from holdfast._core.format.index import Index
from holdfast._core.format.index_layout import encode
from holdfast._core.format.names import INDEX, PINS, REMOVED, split_reference
from holdfast._core.io import removal
from holdfast._core.io.index_file import open_index
from holdfast._core.run import leftovers
from holdfast._core.store.base import Store
from holdfast._core.store.local import open_store
from holdfast._core.store.objects import ObjectStore
from holdfast._tools.checkpoints.diff import compare
from holdfast._tools.checkpoints.inspect import describe_run
from holdfast._tools.checkpoints.prune import prune
from holdfast._tools.checkpoints.verify import Verified, verify
from holdfast._tools.cli import cli
from holdfast.errors import BadInput, CorruptCheckpoint, HoldfastError
from tests.store.test_object_pins import folder, objects, plant
from tests.support.object_servers import Proxy

pytest.importorskip("obstore")
pytestmark = pytest.mark.usefixtures("deletions_are_waited_for")
LINK = holdfast.Options(link_unchanged=True)
ALONE = holdfast.Job(no_dist=True, options=LINK)
BASE = torch.arange(3000.0)


@pytest.fixture
def run(place: str, proxy: Proxy) -> str:
    return place


def state(step: int, base: torch.Tensor = BASE) -> dict[str, torch.Tensor]:
    return {"base": base.clone(), "lora": torch.full((5,), float(step))}


def opened(run: str, keep: int | None = None, **more: Any) -> holdfast.Checkpoints:
    return holdfast.Checkpoints(run, keep=keep, asynchronous=False, job=ALONE, **more)


def saved(run: str, *steps: int, keep: int | None = None) -> None:
    with opened(run, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step))


def holds(run: str, *steps: int) -> None:
    for step in steps:
        back = {name: torch.zeros_like(value) for name, value in state(0).items()}
        holdfast.load(back, f"{run}/{folder(step)}", job=holdfast.Job(no_dist=True))
        assert all(torch.equal(back[name], value) for name, value in state(step).items())
        found = verify(f"{run}/{folder(step)}")
        assert isinstance(found, Verified)
        assert found.whole, found.damage


def refers(run: str, step: int) -> list[str]:
    """The folders of the steps whose data a step names."""
    with open_index(open_store(f"{run}/{folder(step)}")) as index:
        return [found[0] for name in index.file_names() if (found := split_reference(name))]


def copy(source: Store, target: Store) -> None:
    plant(target, {path: source.open(path).read(0, 1 << 20) for path in objects(source)})


@pytest.mark.parametrize("background", [False, True])
def test_unchanged_data_is_written_once_and_stays_while_a_step_refers_to_it(
    run: str, background: bool
) -> None:
    store = open_store(run)
    with holdfast.Checkpoints(run, keep=2, asynchronous=background, job=ALONE) as checkpoints:
        for step in range(1, 6):
            pending = checkpoints.save(step, state(step))
            assert pending is not None
            written = pending.result().bytes_written
            assert written > BASE.nbytes if step == 1 else written < BASE.nbytes / 2
        # The first step is gone but for the data that others refer to; there is no chain.
        assert checkpoints.steps() == [4, 5]
        assert refers(run, 4) == refers(run, 5) == [folder(1)]
        assert folder(1) + "/" in store.list()
        assert store.stat(f"{folder(1)}/{INDEX}") is None
        holds(run, 4, 5)
        for step in (6, 7, 8):
            checkpoints.save(step, state(step, BASE + 1))
    with opened(run, 2) as checkpoints:
        checkpoints.save(9, state(9, BASE + 1))
        checkpoints.save(10, state(10, BASE + 1))
    left = {path.split("/")[0] for path in objects(store)}
    assert left - {".holdfast-removed"} == {folder(6), folder(9), folder(10)}
    assert refers(run, 10) == [folder(6)]


def test_a_later_process_goes_on_referring(run: str) -> None:
    saved(run, 1)
    with opened(run) as checkpoints:
        back = {name: torch.zeros_like(value) for name, value in state(0).items()}
        assert checkpoints.restore(back) == 1
        checkpoints.save(2, state(2))
    assert refers(run, 2) == [folder(1)]
    holds(run, 1, 2)


def test_every_reader_follows(run: str, tmp_path: Path) -> None:
    saved(run, 1, 2)
    second = f"{run}/{folder(2)}"
    with holdfast.open(second) as checkpoint:
        assert torch.equal(checkpoint["base"][...], BASE)
    assert [one.name for one in compare(f"{run}/{folder(1)}", second).content] == ["lora"]
    for command in (
        ["verify", second],
        ["inspect", second],
        ["same", second, second],
        ["explain", second, "base"],
    ):
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == 0, (command, done.output)
        if command[0] == "inspect":
            assert f"of {folder(1)}: it is not complete by itself" in done.output
    open_store(second).delete(INDEX)
    assert reindex(second).action == "written"
    assert refers(run, 2) == [folder(1)]
    holds(run, 2)


def test_a_copy_of_one_step_is_refused_in_a_sentence(run: str, tmp_path: Path) -> None:
    saved(run, 1, 2)
    source = open_store(f"{run}/{folder(2)}")
    for target, error, says in (
        (f"{run}-other/{folder(2)}", HoldfastError, "is not complete by itself: it names data/"),
        (f"{run}-other/best", BadInput, "which only a step of a run may do: it was copied or renamed"),
        (str(tmp_path / folder(2)), BadInput, "is not complete by itself, and only in an object store"),
    ):
        copy(source, open_store(target))
        back = {name: torch.zeros_like(value) for name, value in state(0).items()}
        with pytest.raises(error, match=says):
            holdfast.load(back, target, job=holdfast.Job(no_dist=True))
        found = verify(target)
        assert isinstance(found, Verified)
        assert any("not complete by itself" in one.problem or says in one.problem for one in found.damage)
    copy(open_store(run), open_store(f"{run}-whole"))
    holds(f"{run}-whole", 1, 2)


def test_an_older_holdfast_refuses_such_an_index_and_knows_all_others(run: str) -> None:
    saved(run, 1, 2)
    heads = [open_store(f"{run}/{folder(step)}").open(INDEX).read(0, 4096) for step in (1, 2)]
    assert b'"format":"holdfast-1.1"' in heads[0]
    assert b'"format":"holdfast-1.3"' in heads[1]


@pytest.mark.parametrize(
    "name",
    [
        "../step-00000001/../../other/data/x.safetensors",
        "../../run/step-00000001/data/x.safetensors",
        "../step-1/data/x.safetensors",
        "../other/data/x.safetensors",
        "../step-00000001/index.safetensors",
        "/step-00000001/data/x.safetensors",
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    good = "../step-00000001/data/000000000001-r00000.safetensors"
    columns = Columns(file_names=[good, name])
    columns.file_size = columns.file_rank = torch.zeros(2, dtype=torch.int64).numpy()
    columns.file_rank = columns.file_rank.astype("<i4")
    data = encode(columns, {}, narrow=True)
    index = Index(lambda start, length: data[start : start + length], len(data), "it")
    with pytest.raises(CorruptCheckpoint, match="not inside its data folder"):
        index.file_names()


def test_a_step_that_is_saved_again_keeps_what_later_ones_refer_to(run: str) -> None:
    saved(run, 1, 2)
    with opened(run) as checkpoints:
        checkpoints.restore({name: torch.zeros_like(value) for name, value in state(0).items()}, step=1)
        checkpoints.save(1, state(7, BASE + 7))
    holds(run, 2)
    assert len(open_store(run).list(f"{folder(1)}/data")) == 2
    with opened(run, keep=1) as checkpoints:
        checkpoints.save(3, state(3, BASE + 3))
        checkpoints.save(4, state(4, BASE + 4))
    assert {path.split("/")[0] for path in objects(open_store(run)) if path[0] != "."} == {folder(4)}
    assert not any("/ref-" in path or "removed" in path for path in objects(open_store(run)))


def test_a_plain_save_refers_to_nothing(run: str) -> None:
    for step in (1, 2):
        holdfast.save(state(step), f"{run}/{folder(step)}", step=step, job=ALONE)
    assert refers(run, 2) == []


def test_prune_says_what_stays_for_later_steps(run: str) -> None:
    saved(run, 1, 2)
    planned = prune(run, keep=1, dry_run=True)
    assert [one.why for one in planned.skipped] == [
        "its index would be removed; later steps refer to data of it"
    ]
    assert planned.bytes_freed < BASE.nbytes
    pruned = prune(run, keep=1)
    assert pruned.kept == (2,)
    assert [one.why for one in pruned.skipped] == [
        "its index is removed; data of it is being read, or later steps refer to it"
    ]
    again = prune(run)
    assert [one.why for one in again.skipped] == [
        "later steps refer to its data, or a save that may be under way"
    ]
    holds(run, 2)
    assert planned.bytes_freed == pruned.bytes_freed


def test_what_stays_of_a_removed_step_is_said(run: str, tmp_path: Path) -> None:
    saved(run, 1, 2, 3, keep=1)
    first = f"{run}/{folder(1)}"
    assert [(one.step, one.committed, one.is_removed) for one in describe_run(open_store(run)).steps] == [
        (1, False, True),
        (3, True, False),
    ]

    def told(*command: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, command)
        return done.exit_code, " ".join(done.output.split())

    code, output = told("inspect", run)
    assert code == 0, output
    assert "2 steps, 1 of them removed but for data" in output
    assert "not committed" not in output
    # The data of the first step counts once.
    stored = sum(entry.size for path in objects(open_store(run)) if (entry := open_store(run).stat(path)))
    assert stored > sum(one.bytes for one in describe_run(open_store(run)).steps) > BASE.nbytes
    assert told("inspect", run, "--html", str(tmp_path / "page.html"))[0] == 0
    assert '"removed"' in (tmp_path / "page.html").read_text()
    for command in (
        ["verify", first],
        ["inspect", first],
        ["diff", first, f"{run}/{folder(3)}"],
        ["same", first, f"{run}/{folder(3)}"],
        ["export", "torch_dist", first, str(tmp_path / "out")],
    ):
        code, output = told(*command)
        assert code == 2, output
        assert "it was removed from its run" in output
        assert "a save failed" not in output
    assert told("verify", run)[0] == 0


def plant_note(store: Store) -> None:
    """Let a note say that the data of step 1 is to be deleted."""
    [data] = store.list(f"{folder(1)}/data")
    note = removal.Note(folder(1), [f"data/{data}"])
    plant(store, {f"{REMOVED}/{folder(1)}.0123456789abcdef": msgspec.json.encode(note)})


def test_a_removed_step_whose_data_is_kept_can_be_brought_back_until_the_data_goes(run: str) -> None:
    saved(run, 1, 2, keep=1)
    first, store = f"{run}/{folder(1)}", open_store(run)
    assert reindex(first).action == "written"
    holds(run, 1, 2)
    assert prune(run).skipped == ()
    assert prune(run, keep=1).kept == (2,)
    holds(run, 2)
    # Now the data is to be deleted: a note says so.
    plant_note(store)
    with pytest.raises(BadInput, match="is being removed"):
        reindex(first)
    assert store.stat(f"{folder(1)}/{INDEX}") is None


def test_reindex_gives_way_to_who_deletes_meanwhile(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note comes between the look at the notes and the index."""
    saved(run, 1, 2, keep=1)
    first, store = f"{run}/{folder(1)}", open_store(run)
    real = ObjectStore.publish

    def later(self: ObjectStore, path: str, content: bytes, replacing: bytes | None) -> None:
        plant_note(store)
        real(self, path, content, replacing)

    monkeypatch.setattr(ObjectStore, "publish", later)
    with pytest.raises(BadInput, match="is being removed"):
        reindex(first)
    assert store.stat(f"{folder(1)}/{INDEX}") is None


def test_who_deletes_gives_way_to_reindex_that_was_before(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index comes between the look at the claims and the note."""
    saved(run, 1, 2, keep=1)
    first, store = f"{run}/{folder(1)}", open_store(run)
    [(path, kept)] = removal.notes_of(store)[1]
    open_store(f"{run}/{folder(2)}").delete(INDEX)
    for claim in store.list(f"{folder(1)}/{PINS}"):  # nobody refers to it any more
        store.delete(f"{folder(1)}/{PINS}/{claim}")
    real, done = removal._write, list[str]()

    def later(*arguments: Any) -> str:
        monkeypatch.setattr(removal, "_write", real)
        done.append(reindex(first).action)
        return real(*arguments)

    monkeypatch.setattr(removal, "_write", later)
    assert not removal.finish_kept(store, path, kept, removal.nothing_known)
    assert done == ["written"]
    holds(run, 1)
    assert removal.notes_of(store)[0] == []


def test_a_save_that_fails_gives_its_claim_back(run: str, proxy: Proxy) -> None:
    saved(run, 1)
    with opened(run) as checkpoints:
        checkpoints.restore({name: torch.zeros_like(value) for name, value in state(0).items()})
        proxy.rule = lambda method, path, query, number: (
            "denied" if method == "PUT" and f"{folder(2)}/{INDEX}" in path else "pass"
        )
        with pytest.raises(HoldfastError, match="may not write objects"):
            checkpoints.save(2, state(2))
    proxy.rule = lambda *_: "pass"
    assert not [path for path in objects(open_store(run)) if "/ref-" in path]


def test_a_claim_of_a_save_that_is_known_to_have_failed_keeps_nothing(run: str) -> None:
    saved(run, 1, 2)
    store = open_store(run)
    [claim] = [path for path in objects(store) if "/ref-" in path]
    assert prune(run, keep=1).kept == (2,)
    store.child(folder(2)).delete(INDEX)  # as if it had never been committed
    attempt = claim.partition("ref-")[2].partition(".")[0]
    assert any("refer to" in one.why for one in prune(run).skipped)
    assert store.stat(claim) is not None
    known = leftovers.Leftovers(store)
    known._void.add(attempt)
    removal.finish_removals(store, lambda _: known.why_kept)
    assert not [path for path in objects(store) if path.startswith((folder(1), ".holdfast-removed"))]
