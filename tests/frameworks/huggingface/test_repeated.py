"""A call that is repeated: what the first one wrote is taken as done only if it is still there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.errors import BadInput, CorruptCheckpoint
from holdfast.huggingface import export, fetch, import_
from tests.cli.conftest import flip

ALONE = holdfast.Job(no_dist=True)
TENSORS = {f"model.layers.{layer}.w.weight": torch.arange(24.0).view(4, 6) + layer for layer in range(4)}
Call = Callable[[Path, Path], int]
CALLS: dict[str, Call] = {
    "import": lambda source, out: import_(source, out, job=ALONE).bytes_written,
    "fetch": lambda source, out: fetch(source, "0", "world=2,pp=2", out).bytes_written,
}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A model of a type without a table."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "of_no_table"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def step(tmp_path: Path) -> Path:
    holdfast.save(TENSORS, tmp_path / "step", job=ALONE)
    return tmp_path / "step"


@pytest.mark.parametrize("kind", CALLS)
def test_a_conversion_whose_data_is_gone_is_not_done(kind: str, published: Path, tmp_path: Path) -> None:
    call, out = CALLS[kind], tmp_path / "out"
    assert call(published, out) > 0
    (out / "tokenizer.json").unlink()
    assert call(published, out) == 0
    assert (out / "tokenizer.json").read_text() == "{}"
    (file,) = (out / "data").iterdir()
    whole = file.read_bytes()
    for content, words in (
        (whole[:-1], "bytes, but was written with"),
        (whole[:-9] + bytes(9), "not that of the save"),
    ):
        file.write_bytes(content)
        with pytest.raises(
            CorruptCheckpoint, match=f"is what this {kind} wrote, and damaged since: .* {words}"
        ):
            call(published, out)
    file.unlink()
    with pytest.raises(CorruptCheckpoint, match=rf"is missing. Remove the folder, and {kind} again\."):
        call(published, out)


def test_an_export_of_which_a_byte_changed_is_not_done(published: Path, step: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    told: list[tuple[int, int]] = []

    def call() -> int:
        return export(
            step, out, like=published, file_bytes=100, progress=lambda *done: told.append(done), job=ALONE
        ).bytes_written

    nbytes = call()
    assert (call(), told[-1]) == (0, (nbytes, nbytes))
    files = sorted(out.glob("model-*"))
    assert len(files) == 4
    for position in (-1, -96, -50):
        before = files[1].read_bytes()
        flip(files[1], len(before) + position)
        with pytest.raises(BadInput, match=f"{files[1].name} does not hold what an export has written there"):
            call()
        files[1].write_bytes(before)
    files[1].unlink()
    (out / "model.safetensors.index.json").write_text("{}")
    assert call() == 96
    assert holdfast.same(out, published).same


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "adapter_config.json"])
def test_an_export_goes_nowhere_where_a_file_names_other_weights(
    name: str, published: Path, step: Path, tmp_path: Path
) -> None:
    """transformers takes `model.safetensors` before an index, other readers do not; of a folder with the
    configuration of an adapter it takes the base model that this names."""
    out = tmp_path / "out"
    (published / name).write_text("{}")
    if name == "adapter_config.json":
        import_(published, tmp_path / "imported", job=ALONE)
        export(tmp_path / "imported", tmp_path / "first", like=published, job=ALONE)
        assert not any((tmp_path / made / name).exists() for made in ("imported", "first"))
    out.mkdir()
    (out / name).write_text("{}")
    with pytest.raises(BadInput, match=f"holds {name}, which is not of this export"):
        export(step, out, like=published, job=ALONE)
    assert len(list(out.iterdir())) == 1


def test_numbers_that_are_no_numbers_are_refused(published: Path, step: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="file_bytes must be a whole number from 1 on, not True"):
        export(step, tmp_path / "out", like=published, file_bytes=True, job=ALONE)
    with pytest.raises(BadInput, match="vocabulary must be at least 1, not True"):
        fetch(published, "0", "world=1", vocabulary=True)
