"""Imports, exports and fetches that are killed, meet failing storage, or lose power: what they leave is no
checkpoint that is not whole, and the same call again ends what was begun."""

from __future__ import annotations

import errno
import json
import multiprocessing as mp
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import holdfast
from holdfast import huggingface
from holdfast._core.saving import cleanup, commit
from holdfast._core.store import filesystem
from holdfast._frameworks.torch_dcp.torch_dist import export_torch_dist, import_torch_dist
from holdfast._tools.checkpoints.verify import Verified, verify
from holdfast.errors import BadInput, HoldfastError, NotCommitted
from tests.cli.test_fetch import make_published, tensors_of
from tests.frameworks.huggingface import jobs
from tests.frameworks.huggingface.models import TINY, publish
from tests.store.faults import FOREVER, Faults
from tests.support.crash import cut_power, die_before, mount_ext4, unmount_ext4
from tests.support.processes import ProcessWorld, forked_after

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # DCP's own
    pytest.mark.timeout(600),
]
COMMON = {"iteration": 5, "args": {"lr": 0.1}}


class Case(NamedTuple):
    convert: Callable[[Path, Path], object]
    """From a folder of sources into a new folder."""
    look: Callable[[Path, Path], bool]
    """Is the new folder whole? Raises if what it holds is not what was converted."""
    files: str
    """Which files there are `count` of, if nothing is left of calls that were interrupted."""
    count: int


# -- sources ------------------------------------------------------------------------------------------


def state_of(blank: bool = False) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    state = {f"layer.{number}": torch.randn(37, 11 + number, generator=made) for number in range(4)}
    return {name: torch.zeros_like(value) for name, value in state.items()} if blank else state


def is_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def make_torch_dist(folder: Path) -> None:
    dcp.save(state_of(), checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save(COMMON, folder / "common.pt")


def make_holdfast(folder: Path) -> None:
    import_torch_dist(folder.parent / "torch_dist", folder)


def make_megatron(folder: Path) -> None:
    folder.mkdir()
    publish(TINY["qwen3_moe"], folder / "like")
    with ProcessWorld(1) as world:
        world.run(jobs.save_some, "qwen3_moe", str(folder / "like"), str(folder / "step"), timeout=120)


# -- what is converted, and what must come out ----------------------------------------------------------


def is_committed(out: Path) -> bool:
    if not (out / "index.safetensors").exists():
        with pytest.raises(NotCommitted):
            holdfast.load(state_of(), out, job=holdfast.Job(no_dist=True))
        return False
    found = verify(out)
    assert isinstance(found, Verified)
    assert found.whole, found.damage
    return True


def imported(sources: Path, out: Path) -> bool:
    if not is_committed(out):
        return False
    state = {**state_of(blank=True), "common_state": None}
    holdfast.load(state, out, job=holdfast.Job(no_dist=True))
    assert state.pop("common_state") == COMMON
    assert is_equal(state, state_of())
    return (out / "metadata.json").exists()


def imported_model(sources: Path, out: Path) -> bool:
    if not is_committed(out):
        return False
    assert holdfast.same(out, sources / "published").same
    for name in ("config.json", "tokenizer.json"):
        assert (out / name).read_text() == (sources / "published" / name).read_text()
    return True


def exported(sources: Path, out: Path) -> bool:
    if not (out / ".metadata").exists():
        return False
    state = state_of(blank=True)
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert is_equal(state, state_of())
    assert torch.load(out / "common.pt") == COMMON
    assert (out / "metadata.json").exists()
    return True


def exported_model(sources: Path, out: Path) -> bool:
    if not (out / "model.safetensors.index.json").exists():
        return False
    where = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    wanted = {}
    for path in (sources / "megatron" / "like").glob("*.safetensors"):
        wanted |= load_file(path)
    assert where.keys() == wanted.keys()
    assert len(set(where.values())) > 2
    for file in set(where.values()):
        found = load_file(out / file)
        assert is_equal(found, {name: wanted[name] for name in found})
    assert (out / "config.json").exists()
    return True


def fetched(sources: Path, out: Path) -> bool:
    if not (out / "slice.holdfast").exists():
        return False
    state = {name: torch.zeros_like(value) for name, value in tensors_of().items()}
    holdfast.load(state, out, job=holdfast.Job(no_dist=True))
    assert is_equal(state, tensors_of())
    return True


def export_model(sources: Path, out: Path) -> None:
    folder = sources / "megatron"
    huggingface.export(
        folder / "step", out, like=folder / "like", file_bytes=60_000, job=holdfast.Job(no_dist=True)
    )


CASES = {
    "import torch_dist": Case(
        lambda at, out: import_torch_dist(at / "torch_dist", out), imported, "data/*", 1
    ),
    "import hf": Case(
        lambda at, out: huggingface.import_(at / "published", out, job=holdfast.Job(no_dist=True)),
        imported_model,
        "data/*",
        1,
    ),
    "export torch_dist": Case(
        lambda at, out: export_torch_dist(at / "holdfast", out), exported, "*.distcp", 1
    ),
    "export hf": Case(export_model, exported_model, ".model*", 0),
    "fetch": Case(
        lambda at, out: huggingface.fetch(at / "published", "0", "world=1", out), fetched, "data/.*", 0
    ),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    pytest.importorskip("megatron.core")
    folder = tmp_path_factory.mktemp("sources")
    make_torch_dist(folder / "torch_dist")
    make_holdfast(folder / "holdfast")
    make_published(folder / "published")
    make_megatron(folder / "megatron")
    return folder


@pytest.fixture
def others(tmp_path: Path, sources: Path) -> Iterator[None]:
    """What is nobody's business stays as it is: the sources, and what lies beside the new folder."""

    def tree() -> dict[Path, bytes]:
        found = [*sources.rglob("*"), *(tmp_path / "beside").rglob("*")]
        return {path: path.read_bytes() for path in found if path.is_file()}

    (tmp_path / "beside" / "data").mkdir(parents=True)
    (tmp_path / "beside" / "data" / "a.safetensors").write_text("somebody's")
    before = tree()
    yield
    assert tree() == before


every_case = pytest.mark.parametrize("case", CASES)
every_call = pytest.mark.parametrize(
    "every", [37, pytest.param(19, marks=pytest.mark.wide), pytest.param(1, marks=pytest.mark.soak)]
)
"""Of the calls that change something, so many-th ones are tried."""


# -- deaths -----------------------------------------------------------------------------------------------


def converted(case: str, sources: Path, out: Path, number: int) -> int | None:
    """The exit code of a process that converts, and dies before its call of that number."""
    context = mp.get_context("forkserver")
    process = context.Process(target=convert_and_die, args=(case, sources, out, number))
    with forked_after("conversions"):
        process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode


def convert_and_die(case: str, sources: Path, out: Path, number: int) -> None:
    torch.set_num_threads(1)
    die_before(number)
    CASES[case].convert(sources, out)


def end(case: str, sources: Path, out: Path) -> None:
    """The same call again ends what was begun, and changes nothing of what has ended."""
    convert, look, files, count = CASES[case]
    convert(sources, out)
    assert look(sources, out)
    assert len(list(out.glob(files))) == count


@every_call
@every_case
def test_killed_at_any_call(case: str, every: int, sources: Path, tmp_path: Path, others: None) -> None:
    whole = []
    for number in range(1, 1000, every):
        out = tmp_path / "new" / "out"
        ended = converted(case, sources, out, number)
        whole.append(CASES[case].look(sources, out))
        end(case, sources, out)
        if ended == 0:
            break
        shutil.rmtree(tmp_path / "new")
    assert len(whole) > 15 / every  # it did die at many places
    assert (whole[0], whole[-1]) == (False, True)


@every_case
def test_killed_twice(case: str, sources: Path, tmp_path: Path, others: None) -> None:
    """The second time in the middle of what the first one has left."""
    for first, second in ((8, 12), (14, 9), (20, 25)):
        out = tmp_path / f"out-{first}"
        for number in (first, second):
            converted(case, sources, out, number)
        end(case, sources, out)


@pytest.fixture
def loop_ext4(tmp_path: Path) -> Iterator[Path]:
    place = mount_ext4(tmp_path)
    yield place
    unmount_ext4(place)


@every_call
@every_case
def test_power_cut_at_any_call(case: str, every: int, sources: Path, loop_ext4: Path, others: None) -> None:
    look = CASES[case].look
    for number in range(1, 1000, every):
        out = loop_ext4 / f"{number}" / "out"
        ended = converted(case, sources, out, number)
        cut_power(loop_ext4)
        assert look(sources, out) or ended != 0
        end(case, sources, out)
        cut_power(loop_ext4)
        assert look(sources, out)
        if ended == 0:
            break
        shutil.rmtree(out.parent)


# -- storage that fails -------------------------------------------------------------------------------------


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Faults]:
    monkeypatch.setattr(filesystem, "PATIENCE", 0.02)
    monkeypatch.setattr(filesystem, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(commit, "LOOK_AGAIN", 0.02)
    monkeypatch.setattr(cleanup, "OTHERS_LEAVE", 0.05)
    some = Faults(monkeypatch, tmp_path / "new")
    yield some
    assert some.left_open() == []


@every_call
@pytest.mark.parametrize(
    "length", [1, pytest.param(FOREVER, marks=pytest.mark.wide)], ids=["once", "for ever"]
)
@every_case
def test_storage_that_fails_at_any_call(
    case: str, length: int, every: int, sources: Path, tmp_path: Path, others: None, faults: Faults
) -> None:
    convert, look, *_ = CASES[case]
    out, ends = tmp_path / "new" / "out", set()
    for first in range(1, 1000, every):
        faults.arm(errno.EIO, first, length)
        try:
            convert(sources, out)
        except HoldfastError as error:
            ends.add(type(error).__name__)
            whole = False
        else:
            whole = True
        failed = faults.failed
        faults.disarm()
        assert look(sources, out) or not whole
        end(case, sources, out)
        if not failed:
            break
        for thread in threading.enumerate():  # it may still wait for the folder to get empty, and remove it
            if thread.name == "holdfast-sweep":
                thread.join(10)
        shutil.rmtree(tmp_path / "new")
    assert whole
    assert ends


def killed(case: str, sources: Path, out: Path, number: int) -> set[Path]:
    """Return the data files that a process leaves which dies before its call of that number."""
    assert converted(case, sources, out, number) != 0
    return set(out.glob("data/*"))


@pytest.mark.parametrize("case", ["import torch_dist", "import hf"])
def test_leftovers_that_can_not_be_deleted_are_told_and_go_with_the_next_call(
    case: str, sources: Path, tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "new" / "out"
    # Killed as soon as its data file has a name, before the index.
    left = next(found for number in range(12, 99, 2) if (found := killed(case, sources, out, number)))
    faults.arm(errno.EIO, 1, FOREVER, only=("unlink",))
    CASES[case].convert(sources, out)
    assert CASES[case].look(sources, out)
    assert f"1 file left by an interrupted call in {out} could not be deleted: Deleting" in caplog.text
    assert left < set(out.glob("data/*"))
    faults.disarm()
    end(case, sources, out)
    assert not left & set(out.glob("data/*"))


# -- folders of others ----------------------------------------------------------------------------------------


@every_case
def test_what_lies_there_of_others_stays(case: str, sources: Path, tmp_path: Path, others: None) -> None:
    """Beside what an interrupted call has left, too."""
    left = tmp_path / "left"
    left.mkdir()
    converted(case, sources, left / "out", 16)
    for number, strange in enumerate(
        2 * ["notes.txt", "data/aaaaaaaaaaaa-r00000.safetensors", "model.safetensors"]
    ):
        out = tmp_path / str(number) / "out"
        if number < 3:
            shutil.copytree(left, out.parent)
        (out / strange).parent.mkdir(parents=True, exist_ok=True)
        (out / strange).write_text("somebody's")
        if case == "export hf" and strange != "model.safetensors":
            CASES[case].convert(sources, out)  # an export goes beside other files
        else:
            with pytest.raises(BadInput, match="holds"):
                CASES[case].convert(sources, out)
        assert (out / strange).read_text() == "somebody's"


@pytest.mark.parametrize("case", ["import torch_dist", "import hf", "export torch_dist"])
def test_another_source_in_its_place_is_refused(case: str, sources: Path, tmp_path: Path) -> None:
    """Also one of the same names and sizes: only the values differ."""
    copies = tmp_path / "copies"
    shutil.copytree(sources, copies)
    CASES[case].convert(copies, tmp_path / "out")
    for path in copies.rglob("*"):
        if path.suffix in (".distcp", ".safetensors"):
            path.touch()
    if case == "export torch_dist":
        holdfast.save(state_of(), copies / "holdfast", job=holdfast.Job(no_dist=True), expected=None)
    with pytest.raises(BadInput, match="goes into a new folder"):
        CASES[case].convert(copies, tmp_path / "out")
    assert CASES[case].look(sources, tmp_path / "out")
