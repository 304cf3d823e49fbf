"""The reader of foreign pickles: it reads what pickle reads, and knows nothing by name."""

from __future__ import annotations

import gc
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.format.pickle_reader import BadPickle, PickleReader
from holdfast._core.format.torch_dist import read_metadata
from holdfast.errors import CorruptCheckpoint
from tests.frameworks.torch_dcp.test_torch_dist import state

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP's own

atoms = (
    st.none() | st.booleans() | st.integers(-(1 << 2000), 1 << 2000) | st.floats(allow_nan=False) | st.text()
)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(1 << 59), 1 << 59) | st.none(), inner, max_size=5)
    ),
    max_leaves=20,
)


@settings(max_examples=200)
@given(values, st.integers(2, 5))
def test_plain_values_are_what_pickle_makes_of_them(value: Any, protocol: int) -> None:
    shared = [value, value, [value]]
    data = pickle.dumps(shared, protocol)
    found = PickleReader(data).read()
    assert found == pickle.loads(data)
    assert repr(found) == repr(shared), "1 and True, or 0.0 and -0.0, are not the same"


@given(st.binary(max_size=300), st.integers(3, 5))
def test_bytes_and_long_text_too(value: bytes, protocol: int) -> None:
    data = pickle.dumps([value, value.hex() * 3], protocol)
    assert PickleReader(data).read() == [value, value.hex() * 3]


def test_a_set_is_a_list_in_which_nothing_is_hashed() -> None:
    assert sorted(PickleReader(pickle.dumps({1, 2, 3}, 4)).read()) == [1, 2, 3]
    assert sorted(PickleReader(pickle.dumps(frozenset([1, 2, 3]), 4)).read()) == [1, 2, 3]


@pytest.mark.parametrize(
    "value", [time, Path("/x"), torch.float32, pickle.Pickler, {(1, 2): 3}, {1.5: 2}, {1 << 60: 2}]
)
def test_no_name_is_known_and_no_key_is_hashed_that_could_cost(value: Any) -> None:
    if value is time:
        value = time.sleep
    with pytest.raises(BadPickle, match=r"which is not part of the format|a key in it is"):
        PickleReader(pickle.dumps(value, 4)).read()


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("dcp")
    dcp.save(state(), checkpoint_id=folder, no_dist=True)
    return (folder / ".metadata").read_bytes()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_is_read_alike_in_every_protocol(metadata: bytes, protocol: int) -> None:
    root = pickle.loads(metadata)
    found = read_metadata(pickle.dumps(root, protocol), "it")
    assert found == read_metadata(metadata, "it")
    assert [entry.name for entry in found] == sorted(root.state_dict_metadata)
    for entry in found:
        said = root.state_dict_metadata[entry.name]
        if isinstance(said, dcp.metadata.TensorStorageMetadata):
            assert (entry.shape, f"torch.{entry.dtype}") == (tuple(said.size), str(said.properties.dtype))
            for chunk in entry.chunks:
                stored = root.storage_data[dcp.metadata.MetadataIndex(entry.name, chunk.offset)]
                assert (chunk.file, chunk.start, chunk.length) == (
                    stored.relative_path,
                    stored.offset,
                    stored.length,
                )


def test_the_collector_is_as_it_was_after_good_and_bad_metadata(metadata: bytes) -> None:
    for enabled in (True, False):
        try:
            (gc.enable if enabled else gc.disable)()
            read_metadata(metadata, "it")
            assert gc.isenabled() is enabled
            with pytest.raises(CorruptCheckpoint):
                read_metadata(metadata[:-10], "it")
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


def changed(metadata: bytes, **fields: Any) -> bytes:
    root = pickle.loads(metadata)
    for name, value in fields.items():
        setattr(root, name, value)
    return pickle.dumps(root)


def one_tensor(chunks: Any, size: Any = (4,), info: Any = None) -> bytes:
    found = dcp.metadata
    said = found.TensorStorageMetadata(found.TensorProperties(dtype=torch.float32), size, chunks)
    stored = {
        found.MetadataIndex("w", chunk.offsets): info or dcp.filesystem._StorageInfo("f", 0, 10)
        for chunk in chunks or []
    }
    return pickle.dumps(found.Metadata({"w": said}, storage_data=stored))


def chunk(offset: Any, size: Any) -> Any:
    return dcp.metadata.ChunkStorageMetadata(offset, size)


def stored_at(*where: Any) -> bytes:
    """One whole tensor in a file, at a place, of a length, through transforms."""
    return one_tensor([chunk(S([0]), S([4]))], info=dcp.filesystem._StorageInfo(*where))


S = torch.Size


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (one_tensor([chunk(S([2]), S([3]))]), "lies outside of its tensor"),
        (one_tensor([chunk(S([0, 0]), S([1, 4]))]), "lies outside of its tensor"),
        (one_tensor([chunk(S([0]), (1.5,))]), "not of whole numbers"),
        (one_tensor([chunk(S([0]), ("4",))]), "not of whole numbers"),
        (one_tensor([chunk(S([0]), (-4,))]), r"is \[-4\]"),
        (one_tensor([chunk(S([0]), (1 << 63,))]), "not of whole numbers"),
        (one_tensor([chunk(S([0]), [0] * 100)]), "is none"),
        (one_tensor([], size=(1 << 40, 1 << 40)), "has the shape"),
        (one_tensor(None), "chunks that are no list"),
        (stored_at("f", -1, 10), r"is \[-1, 10\]"),
        (stored_at("f" * 300, 0, 10), "outside the checkpoint's folder"),
        (stored_at("f", 0, 10, ["zstd"]), "compressed or encrypted"),
    ],
)  # fmt: skip
def test_metadata_that_can_not_be_is_corrupt(data: bytes, words: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=words):
        read_metadata(data, "it")


def test_an_object_that_is_too_large_is_told_with_both_sizes(metadata: bytes) -> None:
    root = pickle.loads(metadata)
    root.storage_data[dcp.metadata.MetadataIndex("step")].length = 1 << 40
    with pytest.raises(
        CorruptCheckpoint, match="'step' of it has 1099511627776 bytes, more than the 17179869184"
    ):
        read_metadata(pickle.dumps(root), "it")


@pytest.mark.parametrize("field", ["state_dict_metadata", "storage_data"])
@pytest.mark.parametrize("value", [None, 5, [], "x", {1: 2}, {"a": None}])
def test_fields_of_another_kind_are_corrupt(metadata: bytes, field: str, value: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match="metadata of a torch_dist checkpoint"):
        read_metadata(changed(metadata, **{field: value}), "it")
