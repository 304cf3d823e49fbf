"""Bytes that the last save has written are linked, and everything else goes on as if they had been written."""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._core.existing.reindex import reindex
from holdfast._core.io import spot_check, unchanged
from holdfast._core.io.index_file import open_index
from holdfast._core.store.local import LocalStore
from holdfast._tools.checkpoints.prune import prune
from holdfast._tools.checkpoints.verify import verify
from holdfast.errors import CorruptCheckpoint, HoldfastError, ReplicaMismatch, StorageError, Vanished
from tests.saving import unchanged_jobs as jobs
from tests.support.crash import cut_power, die_before, mount_ext4, unmount_ext4
from tests.support.processes import ProcessWorld
from tests.support.threads import on_ranks

OLD, NEW = [0] * 10, [0] * 9 + [1]
LINK = holdfast.Options(link_unchanged=True)
ALONE = holdfast.Job(no_dist=True, options=LINK)
MARKED = holdfast.Job(no_dist=True, options=holdfast.Options(link_unchanged=True, fingerprint=True))


@pytest.fixture(scope="module")
def four() -> Iterator[ProcessWorld]:
    with ProcessWorld(4) as shared:
        yield shared


def step_of(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


def taken(*folders: Path) -> int:
    """The bytes that folders take on disk; of files that they share, once."""
    found = {(entry := path.stat()).st_ino: entry for folder in folders for path in folder.rglob("*")}
    return sum(512 * entry.st_blocks for entry in found.values())


def links(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "data").iterdir() if path.name.count("-r") == 2)


def columns_of(folder: Path) -> dict[str, Any]:
    with open_index(LocalStore(folder)) as index:
        columns = vars(index.select())
    return {
        name: value if isinstance(value, list | bool) else value.tolist() for name, value in columns.items()
    }


def layers(versions: list[int]) -> dict[str, Any]:
    return {f"w{at}": jobs.tensor(f"w{at}", version)[:16].clone() for at, version in enumerate(versions)}


def holds(folder: Path, versions: list[int]) -> bool:
    state = layers([-1] * len(versions))
    holdfast.load(state, folder, job=holdfast.Job(no_dist=True))
    return all(torch.equal(state[name], value) for name, value in layers(versions).items())


@pytest.mark.parametrize("background", [False, True])
def test_a_save_with_nine_tenths_unchanged_writes_a_tenth(
    background: bool, four: ProcessWorld, tmp_path: Path
) -> None:
    run = str(tmp_path)
    first, second, third = (step_of(tmp_path, step) for step in (1, 2, 3))
    whole = four.run(jobs.save, run, 1, OLD, background)
    part = four.run(jobs.save, run, 2, NEW, background)
    # `dense` has changed, too: two of eleven.
    assert sum(part) < 2 / 11 * sum(whole) * 1.1
    assert taken(first, second) - taken(first) < 2 / 11 * taken(first) * 1.1
    assert sum(four.run(jobs.save, run, 3, NEW, background)) < 0.02 * sum(whole)
    for step in (first, second, third):
        assert verify(str(step)).whole
    # Once the step is gone that has written the bytes, nothing is missing.
    assert {item.path for item in prune(run, keep=1, older_than=0).removed} == {first.name, second.name}
    assert verify(str(third)).whole
    four.run(jobs.load, str(third), NEW, 4, [0, 1, 2, 3])
    four.run(jobs.load, str(third), NEW, 2, [0, 1], ranks=[0, 1])


def test_a_rank_killed_after_it_has_linked_harms_no_step(tmp_path: Path) -> None:
    with ProcessWorld(4) as mortal:
        run = str(tmp_path)
        mortal.run(jobs.save, run, 1, OLD, False)
        mortal.start(jobs.save_and_die, run, 2, NEW, 2)
        results = mortal.collect(40)
        assert results[2].died == -9
        for result in results:
            assert result.rank == 2 or isinstance(result.error, HoldfastError)
    assert [path.name.count("-r00002-") for path in links(step_of(tmp_path, 2))] == [
        1
    ]  # the others have tidied up
    assert verify(str(step_of(tmp_path, 1))).whole
    swept = prune(run, older_than=0)
    assert swept.kept == (1,)
    assert not step_of(tmp_path, 2).exists()
    assert verify(str(step_of(tmp_path, 1))).whole


def next_save(run: str, number: int) -> None:
    """In a new process, which dies before its call of this number that changes something."""
    holdfast.load(layers([-1] * 10), step_of(Path(run), 1), job=ALONE)
    die_before(number)
    holdfast.save(layers(NEW), step_of(Path(run), 2), job=ALONE)


def test_killed_at_every_call_and_the_power_cut(tmp_path: Path) -> None:
    place = mount_ext4(tmp_path)
    try:
        context = mp.get_context("forkserver")
        survived = list[bool]()
        for number in range(1, 40):
            run = place / f"run{number}"
            holdfast.save(layers(OLD), step_of(run, 1), job=ALONE)
            process = context.Process(target=next_save, args=(str(run), number))
            process.start()
            process.join(60)
            assert process.exitcode in (0, -signal.SIGKILL)
            cut_power(place)
            survived.append((step_of(run, 2) / "index.safetensors").exists())
            for step in (1, 2) if survived[-1] else (1,):
                assert verify(str(step_of(run, step))).whole
            shutil.rmtree(run)
            if process.exitcode == 0:
                break
    finally:
        unmount_ext4(place)
    assert len(survived) > 6
    assert sorted(survived) == survived
    assert [survived[0], survived[-1]] == [False, True]


def test_reindex_makes_the_same_index(four: ProcessWorld, tmp_path: Path) -> None:
    run, second = str(tmp_path), step_of(tmp_path, 2)
    four.run(jobs.save, run, 1, OLD, False)
    four.run(jobs.save, run, 2, NEW, False)
    shutil.rmtree(step_of(tmp_path, 1))
    before = columns_of(second)
    (second / "index.safetensors").unlink()
    made = reindex(str(second))
    assert (made.step, made.left_out) == (2, ())
    assert columns_of(second) == before
    assert verify(str(second)).whole
    four.run(jobs.load, str(second), NEW, 4, [0, 1, 2, 3])
    links(second)[0].unlink()
    with pytest.raises(HoldfastError, match=r"1 data files are missing.*holds a part of what its rank saved"):
        reindex(str(second), force=True)


def test_parts_of_unequal_length_are_linked(four: ProcessWorld, tmp_path: Path) -> None:
    run, third = str(tmp_path), step_of(tmp_path, 3)
    whole = four.run(jobs.save_uneven, run, 1, 2)
    four.run(jobs.save_uneven, run, 2, 3)
    assert sum(four.run(jobs.save_uneven, run, 3, 4)) < 0.4 * sum(whole)
    before = columns_of(third)
    assert reindex(str(third), force=True).left_out == ()
    assert columns_of(third) == before
    assert verify(str(third)).whole
    state = {name: torch.zeros(10, 90_000) for name in ("base", "more", "adapter")}
    holdfast.load(state, third, job=ALONE)
    for name, add in (("base", 0), ("more", 1), ("adapter", 4)):
        assert torch.equal(state[name], torch.arange(900_000.0).reshape(10, -1) + add)


def test_a_state_that_is_copied_in_waves_is_written_whole(tmp_path: Path) -> None:
    options = holdfast.Options(link_unchanged=True, host_memory_budget=2 << 20)
    for step in (1, 2):
        job = holdfast.Job(no_dist=True, options=options)
        report = holdfast.async_save(layers(NEW), step_of(tmp_path, step), job=job).committed(40)
        assert report.bytes_written > sum(value.nbytes for value in layers(NEW).values())
    # What it has written, another save links.
    assert (
        holdfast.save(layers(OLD), step_of(tmp_path, 3), job=ALONE).bytes_written < 0.6 * report.bytes_written
    )
    assert verify(str(step_of(tmp_path, 3))).whole
    assert holds(step_of(tmp_path, 3), OLD)


def test_what_can_not_be_linked_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def refusing(source: str, target: str, **more: Any) -> None:
        if target.startswith(str(tmp_path)) and "/data/" in target:
            raise OSError(errno.EXDEV, "no link")
        real(source, target, **more)

    monkeypatch.setattr(os, "link", refusing)
    whole = holdfast.save(layers(OLD), step_of(tmp_path, 1), job=ALONE).bytes_written
    assert holdfast.save(layers(NEW), step_of(tmp_path, 2), job=ALONE).bytes_written == whole
    assert links(step_of(tmp_path, 2)) == []
    assert holds(step_of(tmp_path, 2), NEW)


def test_a_process_that_has_loaded_a_step_links_it(four: ProcessWorld, tmp_path: Path) -> None:
    run = str(tmp_path)
    whole = sum(four.run(jobs.save, run, 1, OLD, False))
    with ProcessWorld(4) as restarted:
        assert sum(restarted.run(jobs.save, run, 2, NEW, False)) > 0.9 * whole
        restarted.run(jobs.load, str(step_of(tmp_path, 1)), OLD, 4, [0, 1, 2, 3])
        assert sum(restarted.run(jobs.save, run, 3, NEW, False)) < 2 / 11 * whole * 1.1
    assert {path.stat().st_nlink for path in links(step_of(tmp_path, 3))} == {2}
    assert verify(str(step_of(tmp_path, 3))).whole


@pytest.mark.parametrize("harm", ["gone", "truncated", "a link", "another index"])
def test_an_earlier_file_that_is_not_as_it_was_is_not_linked(harm: str, tmp_path: Path) -> None:
    run, aside = tmp_path / "run", tmp_path / "aside"
    whole = holdfast.save(layers(OLD), step_of(run, 1), job=ALONE).bytes_written
    (file,) = (step_of(run, 1) / "data").iterdir()
    content = file.read_bytes()
    if harm == "gone":
        shutil.rmtree(step_of(run, 1))
    elif harm == "truncated":
        # The index at the end is where it was, so only the size tells.
        file.write_bytes(content + b"more")
    elif harm == "a link":
        file.rename(aside)
        file.symlink_to(aside)
    else:
        file.write_bytes(content[:-100] + bytes(100))
    assert holdfast.save(layers(NEW), step_of(run, 2), job=ALONE).bytes_written == whole
    assert links(step_of(run, 2)) == []
    assert holds(step_of(run, 2), NEW)


def test_a_step_takes_at_most_twice_what_it_holds(tmp_path: Path) -> None:
    versions = [0] * 10
    live = sum(value.nbytes for value in layers(versions).values())
    wrote = []
    for step in range(10):
        wrote.append(holdfast.save(layers(versions), step_of(tmp_path, step), job=ALONE).bytes_written)
        assert taken(step_of(tmp_path, step)) < 2.05 * live
        if step:
            shutil.rmtree(step_of(tmp_path, step - 1))
        assert verify(str(step_of(tmp_path, step))).whole
        assert holds(step_of(tmp_path, step), versions)
        for at in range(3):
            versions[(3 * step + at) % 10] += 1
    assert sum(wrote) < 0.6 * 10 * live


def test_many_small_changes_do_not_make_many_files(tmp_path: Path) -> None:
    versions = [0] * 40
    for step in range(40):
        versions[step] += 1
        holdfast.save(layers(versions), step_of(tmp_path, step), job=ALONE)
        assert len(list((step_of(tmp_path, step) / "data").iterdir())) <= 17
    assert verify(str(step_of(tmp_path, 39))).whole
    assert holds(step_of(tmp_path, 39), versions)


def test_a_save_into_the_same_folder_links_what_it_replaces(tmp_path: Path) -> None:
    folder = tmp_path / "newest"
    whole = holdfast.save(layers(OLD), folder, job=ALONE).bytes_written
    for version in range(1, 4):
        versions = [0] * 9 + [version]
        assert holdfast.save(layers(versions), folder, job=ALONE).bytes_written < 0.12 * whole
        assert len(list((folder / "data").iterdir())) == 2
        assert holds(folder, versions)


@pytest.mark.parametrize("fails", ["the writing", "the commit"])
def test_a_failed_save_takes_its_links_away(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.save(layers(OLD), step_of(tmp_path, 1), job=ALONE)

    def full(*_: Any) -> int:
        assert links(step_of(tmp_path, 2))
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        if fails == "the writing":
            patch.setattr(os, "pwritev", full)
        with pytest.raises(StorageError if fails == "the writing" else Vanished):
            holdfast.save(layers(NEW), step_of(tmp_path, 2), job=ALONE, expected=["there_is_none"])
    assert not step_of(tmp_path, 2).exists()
    (file,) = (step_of(tmp_path, 1) / "data").iterdir()
    assert file.stat().st_nlink == 1
    # The failed save is not what the next one links.
    holdfast.save(layers(NEW), step_of(tmp_path, 2), job=ALONE)
    assert [path.stat().st_ino for path in links(step_of(tmp_path, 2))] == [file.stat().st_ino]


def test_a_replica_that_differs_is_found_though_its_writer_has_written_nothing(tmp_path: Path) -> None:
    def save(roster: Any, step: int, change: float) -> None:
        state = {"w": jobs.tensor("w", 0) + change * roster.rank, "v": jobs.tensor("v", step)}
        job = holdfast.Job(
            roster=roster, options=holdfast.Options(link_unchanged=True, check_replicas="full")
        )
        holdfast.save(state, step_of(tmp_path, step), job=job)

    on_ranks(2, lambda roster: save(roster, 1, 0.0))
    with pytest.raises(ReplicaMismatch, match="'w'"):
        on_ranks(2, lambda roster: save(roster, 2, 1.0))
    on_ranks(2, lambda roster: save(roster, 3, 0.0))
    assert links(step_of(tmp_path, 3))
    assert verify(str(step_of(tmp_path, 3))).whole


def test_prune_spares_the_links_of_a_save_that_has_just_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.save(layers(OLD), step_of(tmp_path, 1), job=ALONE)
    (file,) = (step_of(tmp_path, 1) / "data").iterdir()
    os.utime(file, (1e9, 1e9))
    real, pruned = LocalStore.create, []

    def create(store: LocalStore, path: str) -> Any:
        assert len(links(step_of(tmp_path, 2))) == 1
        pruned.append(prune(str(tmp_path)))
        return real(store, path)

    monkeypatch.setattr(LocalStore, "create", create)
    holdfast.save(layers(NEW), step_of(tmp_path, 2), job=ALONE)
    assert [item.removed for item in pruned] == [()]
    assert links(step_of(tmp_path, 2))[0].stat().st_ino == file.stat().st_ino
    assert holds(step_of(tmp_path, 2), NEW)


def test_prune_counts_what_it_frees(tmp_path: Path) -> None:
    for step, versions in ((1, OLD), (2, NEW), (3, NEW)):
        holdfast.save(layers(versions), step_of(tmp_path, step), job=ALONE)
    before = taken(tmp_path)
    assert prune(str(tmp_path), keep=1, dry_run=True).bytes_freed < 0.01 * before
    freed = prune(str(tmp_path), keep=1).bytes_freed
    assert abs(before - taken(tmp_path) - freed) < 64 << 10  # blocks and folders
    holdfast.save(layers([2] * 10), step_of(tmp_path, 4), job=ALONE)
    assert prune(str(tmp_path), keep=1).bytes_freed > 0.9 * before


def test_fingerprints_of_linked_bytes_are_kept(tmp_path: Path) -> None:
    # A save without fingerprints has none to give: the next one computes them all.
    whole = holdfast.save(layers(OLD), step_of(tmp_path, 1), job=ALONE).bytes_written
    assert holdfast.save(layers(OLD), step_of(tmp_path, 2), job=MARKED).bytes_written > 0.9 * whole
    assert holdfast.save(layers(NEW), step_of(tmp_path, 3), job=MARKED).bytes_written < 0.12 * whole
    with open_index(LocalStore(step_of(tmp_path, 3))) as index:
        found = {name: tuple(sums.tolist()) for name, sums in index.fingerprints().items()}
    anew = holdfast.Job(no_dist=True, options=holdfast.Options(fingerprint=True))
    holdfast.save(layers(NEW), tmp_path / "anew", job=anew)
    with open_index(LocalStore(tmp_path / "anew")) as index:
        assert found == {name: tuple(sums.tolist()) for name, sums in index.fingerprints().items()}


def test_a_tensor_is_only_linked_as_what_it_was(tmp_path: Path) -> None:
    """Equal bytes of another dtype, shape, place or name are written."""
    zeros = torch.zeros(64, 64)
    holdfast.save({name: zeros.clone() for name in "abcd"}, step_of(tmp_path, 1), job=ALONE)
    state = {"a": zeros.to(torch.int32), "b": zeros.reshape(32, 128).clone(), "e": zeros.clone(), "d": zeros}
    holdfast.save(state, step_of(tmp_path, 2), job=ALONE, expected=None)
    assert links(step_of(tmp_path, 2)) == []  # `d` alone is too little of the file
    assert verify(str(step_of(tmp_path, 2))).whole
    many = {"a": zeros, "f": [zeros.clone() for _ in range(8)]}
    holdfast.save(many, step_of(tmp_path, 3), job=ALONE, expected=None)
    holdfast.save({**many, "a": zeros.to(torch.int32)}, step_of(tmp_path, 4), job=ALONE)
    assert len(links(step_of(tmp_path, 4))) == 1
    assert verify(str(step_of(tmp_path, 4))).whole


def test_damage_in_a_linked_file_is_found_in_each_step_that_names_it(tmp_path: Path) -> None:
    holdfast.save(layers(OLD), step_of(tmp_path, 1), job=ALONE)
    holdfast.save(layers(NEW), step_of(tmp_path, 2), job=ALONE)
    (file,) = links(step_of(tmp_path, 2))
    with file.open("r+b") as opened:
        opened.seek(100_000)
        opened.write(b"\xff\x00\xff")
    for step in (1, 2):
        assert [found.tensor for found in verify(str(step_of(tmp_path, step))).damage] == ["w0"]
    with pytest.raises(CorruptCheckpoint):
        holds(step_of(tmp_path, 2), NEW)


@pytest.mark.parametrize("background", [False, True])
def test_what_is_linked_is_read_back_and_written_anew_if_it_is_damaged(
    background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    # With a writer process of its own: that of this thread may be one of an earlier test, and log elsewhere.
    run = holdfast.Checkpoints(tmp_path, asynchronous=background, job=ALONE)

    def save(step: int) -> None:
        pending = run.save(step, layers(OLD))
        assert pending is not None
        pending.committed()

    save(1)
    save(2)
    (file,) = links(step_of(tmp_path, 2))
    with file.open("r+b") as opened:
        opened.seek(100_000)
        opened.write(b"\xff\x00\xff")
    for step in (3, 4):
        save(step)
    run.close()
    said = capfd.readouterr().err if background else caplog.text  # the writer process logs to stderr
    assert said.count("holds other bytes than were written, at least in 'w0'") == 1, said
    whole = {step: verify(str(step_of(tmp_path, step))).whole for step in (1, 2, 3, 4)}
    assert whole == {1: False, 2: False, 3: True, 4: True}
    assert links(step_of(tmp_path, 3)) == []
    assert links(step_of(tmp_path, 4)) != []


def test_every_linked_byte_is_read_back_in_so_many_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a share of each save, in which every byte comes in its turn."""
    monkeypatch.setattr(spot_check, "LEAST", 0)
    read, first = [], spot_check._first_wrong

    def noted(reader: Any, blocks: spot_check.Blocks, rows: Any, progress: Any) -> Any:
        read.append(set(rows.tolist()))
        return first(reader, blocks, rows, progress)

    monkeypatch.setattr(spot_check, "_first_wrong", noted)
    state = {f"w{at}": torch.full((64,), float(at)) for at in range(40)}
    for step in range(1, spot_check.SAVES + 3):
        holdfast.save(state, step_of(tmp_path, step), job=ALONE)
    assert set.union(*read) == set(range(40))
    assert max(map(len, read)) <= 4


def test_a_file_that_a_load_found_damaged_is_not_linked_again(tmp_path: Path) -> None:
    for step in (1, 2):
        holdfast.save(layers(OLD), step_of(tmp_path, step), job=ALONE)
    (file,) = links(step_of(tmp_path, 2))
    with file.open("r+b") as opened:
        opened.seek(100_000)
        opened.write(b"\xff\x00\xff")
    with pytest.raises(CorruptCheckpoint):
        holds(step_of(tmp_path, 2), OLD)
    assert holdfast.save(layers(OLD), step_of(tmp_path, 3), job=ALONE).bytes_written > file.stat().st_size / 2
    assert verify(str(step_of(tmp_path, 3))).whole


def test_what_is_remembered_of_saves_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a path does not tell which number is the step's, each step looks like a run of its own."""
    monkeypatch.setattr(unchanged, "_last", {})
    monkeypatch.setattr(unchanged, "RUNS", 3)
    job = holdfast.Job(no_dist=True, options=holdfast.Options(link_unchanged=True))
    for step in range(5):
        holdfast.save({"w": torch.ones(2)}, tmp_path / f"x-{step}" / "part-1", job=job)
    assert len(unchanged._last) == 3


@pytest.mark.parametrize(
    "folder", ["step-{}/part-{}", "checkpoint-{}/global_step{}", "iter_000{}/mp_rank_0{}", "a{}/{}"]
)
def test_a_step_of_several_folders_is_linked_to_the_step_before(folder: str, tmp_path: Path) -> None:
    """Parts of a step are saved one after the other by the same process."""
    written = {}
    for step in (7, 8):
        for part in (1, 2):
            numbers = (
                (step, step) if "global" in folder else (part, step) if folder[0] == "a" else (step, part)
            )
            state = layers([part * 10] * 3)
            report = holdfast.save(state, tmp_path / folder.format(*numbers), job=ALONE)
            written[step, part] = report.bytes_written
            if "global" in folder:
                break
    assert all(size < 0.1 * written[7, part] for (step, part), size in written.items() if step == 8)
