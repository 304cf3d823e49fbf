"""Files that say more than they can pay for: refused with a sentence, in little memory, in bounded time, by a
live process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast import Options
from holdfast._core.format import objects
from holdfast._core.format.container import encode_header
from holdfast._core.format.limits import DATA_HEADER_BYTES
from holdfast._core.io.file_writer import CHUNKS_PER_FILE, split_files
from holdfast._core.plan.shard_table import PlannedRows, SavePlan
from holdfast._frameworks.torch_dcp.torch_dist import import_torch_dist
from holdfast.errors import BadInput, CorruptCheckpoint
from tests.hostile import forged

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP's own


def places(root: Path) -> dict[str, tuple[Path, str]]:
    """Each forgery's folder, and what is said of it."""
    made = {
        name: (forged.with_metadata(root / f"pickle{at}", data), words)
        for at, (name, (data, words)) in enumerate(forged.PICKLES.items())
    }
    for at, (name, (build, words)) in enumerate(forged.OBJECTS.items()):
        made[name] = forged.with_object(root / f"object{at}", build()), words
    made["a zip bomb in DCP's format"] = (
        forged.with_dcp_object(root / "dcp", forged.bomb()),
        "'w' was not loaded, because it is damaged: its member 'archive/data.pkl' is compressed.",
    )
    made["tensors that share their chunks"] = (
        forged.with_metadata(root / "shared", forged.shared_metadata()),
        "more chunks than its length can pay for",
    )
    made["64 GB of nothing"] = (
        forged.with_metadata(root / "sparse", size=64 << 30),
        "has 68719476736 bytes, more than the 1073741824 that Holdfast reads of it",
    )
    made["a GiB of nothing, which is more memory than there is"] = (
        forged.with_metadata(root / "memory", size=1 << 30),
        "asks for more memory than there is",
    )
    made["an index with a header of a GiB"] = (
        forged.with_index_header(root / "header", 1 << 30),
        "has 1073741824 bytes, more than the 16777216 that Holdfast reads of it",
    )
    made["an object of 10 GiB"] = (
        forged.with_large_object(root / "large", 10 << 30),
        "asks for more memory than there is",
    )
    made["an object of 20 GiB"] = (
        forged.with_large_object(root / "larger", 20 << 30),
        "has 21474836480 bytes, more than the 17179869184 that Holdfast reads of it",
    )
    return made


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str]]:
    """(expected words, kind, words) of each forgery. All are read by one process, so that none may end it."""
    root = tmp_path_factory.mktemp("forged")
    made = places(root)
    run = root / "run"
    holdfast.save({"w": [1]}, run / "step-00000001", step=1, job=holdfast.Job(no_dist=True))
    forged.with_index_header(run / "step-00000002", 1 << 30)
    forged.with_large_object(run / "step-00000003", 10 << 30)
    told = forged.outcomes({name: place for name, (place, _) in made.items()} | {"restore": run})
    expected = {name: words for name, (_, words) in made.items()} | {"restore": ""}
    return {name: (expected[name], *told[name]) for name in told}


NAMES = [
    *forged.PICKLES,
    *forged.OBJECTS,
    "a zip bomb in DCP's format",
    "tensors that share their chunks",
    "64 GB of nothing",
    "a GiB of nothing, which is more memory than there is",
    "an index with a header of a GiB",
    "an object of 10 GiB",
    "an object of 20 GiB",
]


@pytest.mark.timeout(295)
@pytest.mark.parametrize("name", NAMES)
def test_what_says_more_than_it_can_pay_for_is_corrupt(
    name: str, found: dict[str, tuple[str, str, str]]
) -> None:
    expected, kind, words = found[name]
    assert kind == "CorruptCheckpoint", words
    assert expected in words
    assert len(words) < 2000


def test_restore_passes_over_it(found: dict[str, tuple[str, str, str]]) -> None:
    assert found["restore"][1:] == ("restored", "1")


def test_an_import_refuses_a_bomb_and_a_file_of_holes(tmp_path: Path) -> None:
    bombed = forged.with_dcp_object(tmp_path / "bombed", forged.bomb())
    with pytest.raises(
        CorruptCheckpoint, match=r"'w' is damaged: its member 'archive/data\.pkl' is compressed"
    ):
        import_torch_dist(bombed, tmp_path / "new")
    stock = tmp_path / "stock"
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=stock, no_dist=True)
    with open(stock / "common.pt", "wb") as file:
        file.truncate(64 << 30)
    with pytest.raises(
        CorruptCheckpoint, match=r"common\.pt has 68719476736 bytes, more than the 17179869184"
    ):
        import_torch_dist(stock, tmp_path / "new")
    (stock / "common.pt").unlink()
    import_torch_dist(stock, tmp_path / "new")


# -- what is written keeps to the same bounds ------------------------------------------------------


def test_notes_that_an_index_has_no_room_for_are_told_at_the_save(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(1)}, tmp_path / "step", notes={"text": "x" * (15 << 20)})
    with pytest.raises(BadInput, match=r"notes .* take \d{8} bytes in its index"):
        holdfast.save({"w": torch.zeros(1)}, tmp_path / "step", notes={"text": "x" * (16 << 20)})
    state = {"w": torch.zeros(1)}
    holdfast.load(state, tmp_path / "step")
    assert state["w"] == 1
    assert len(list((tmp_path / "step" / "data").iterdir())) == 1


def test_a_header_that_no_reader_takes_is_not_written() -> None:
    rows = [(f"{at}" + "n" * 500_000, "F32", (1,), 4 * at, 4 * at + 4) for at in range(201)]
    assert len(encode_header(rows[:199], {})) < DATA_HEADER_BYTES
    with pytest.raises(BadInput, match="header of a data file with 201 parts of tensors would have 100"):
        encode_header(rows, {})


def test_a_rank_with_more_chunks_than_a_header_lists_writes_several_files() -> None:
    count = 2 * CHUNKS_PER_FILE + 5
    numbers = np.ones(count, np.int64)
    chunks = PlannedRows(numbers, numbers[:, None], numbers[:, None], numbers, numbers)
    plan = SavePlan(1, chunks, PlannedRows(*(column[:0] for column in chunks)), np.zeros(0, bool))
    cuts = split_files(plan, Options())
    assert cuts == [
        (0, CHUNKS_PER_FILE),
        (CHUNKS_PER_FILE, 2 * CHUNKS_PER_FILE),
        (2 * CHUNKS_PER_FILE, count),
    ]


def test_an_object_that_no_reader_takes_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "OBJECT_BYTES", 1000)
    objects.encode("x" * 900, "it")
    for value in ("x" * 1000, [torch.zeros(300)]):
        with pytest.raises(BadInput, match=r"'it' is an object of \d+ bytes, more than the 1000"):
            objects.encode(value, "it")
