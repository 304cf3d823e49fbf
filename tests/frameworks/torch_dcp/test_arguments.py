"""Each argument of torch DCP's writers, readers, planners and stagers is honoured, moot, or sends the call to torch
DCP. A new argument of the installed torch fails here until someone has decided."""

from __future__ import annotations

import inspect
import io
import logging
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager

import holdfast
import holdfast.dcp as dcp
from holdfast._core.base.reporting import warn_once
from holdfast._core.format.names import INDEX
from holdfast._frameworks.torch_dcp.arguments import TAKES, ArgumentRules, understand
from holdfast.errors import BadInput, CorruptCheckpoint

extensions: Any
try:
    from torch.distributed.checkpoint import _extension as extensions
except ImportError:  # before torch 2.7
    extensions = None
Transform: Any = extensions.StreamTransformExtension if extensions else object
SECRET = b"a very plain text " * 4
KINDS = {name: kind for taken in TAKES.values() for kinds in taken.values() for name, kind in kinds.items()}


def class_of(name: str) -> Any:
    """The class; None if the installed torch does not have it."""
    module, _, last = name.rpartition(".")
    try:
        return getattr(import_module(module), last, None)
    except ModuleNotFoundError:
        return None


class Swapping(Transform):  # type: ignore[misc]
    """A cipher of sorts: every byte is swapped for its complement."""

    @staticmethod
    def registry_name() -> str:
        return "stream.swapping"

    @staticmethod
    def from_descriptor(version: str) -> Swapping:
        return Swapping()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Writer(io.RawIOBase):
            def write(self, data: Any) -> int:
                return output.write(bytes(255 - byte for byte in bytes(data)))

        return Writer()  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002
        return io.BytesIO(bytes(255 - byte for byte in input.read()))


def registry() -> Any:
    made = extensions.ExtensionRegistry()
    made.register(Swapping)
    return made


def torchs(folder: Path) -> dict[tuple[str, str], Any]:
    """For each argument that only torch honours: an object that has another value than the default."""
    made: dict[tuple[str, str], Any] = {
        ("FileSystemWriter", "single_file_per_rank"): FileSystemWriter(folder, single_file_per_rank=False),
    }
    if extensions:
        made["FileSystemWriter", "_extensions"] = FileSystemWriter(folder, _extensions=[Swapping()])
        made["FileSystemReader", "_extension_registry"] = FileSystemReader(folder, registry())
    for kind in (DefaultSavePlanner, DefaultLoadPlanner):
        made[kind.__name__, "flatten_state_dict"] = kind(flatten_state_dict=False)
        made[kind.__name__, "flatten_sharded_tensors"] = kind(flatten_sharded_tensors=False)
    if "serialization_format" in inspect.signature(FileSystemWriter).parameters:  # since torch 2.8
        from torch.distributed.checkpoint.filesystem import SerializationFormat

        made["FileSystemWriter", "serialization_format"] = FileSystemWriter(
            folder, serialization_format=SerializationFormat.SAFETENSORS
        )
    return made


@pytest.mark.parametrize("name", KINDS)
def test_every_argument_of_the_installed_torch_has_a_decision(name: str, tmp_path: Path) -> None:
    kind, theirs = KINDS[name], class_of(name)
    if theirs is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    decided = [*kind.honoured, *kind.moot, *kind.torchs]
    assert len(decided) == len(set(decided))
    assert set(inspect.signature(theirs).parameters) <= set(decided)
    there = {(theirs.__name__, argument) for argument in kind.torchs} & {
        (theirs.__name__, argument) for argument in inspect.signature(theirs).parameters
    }
    assert there == {key for key in torchs(tmp_path) if key[0] == theirs.__name__}


@pytest.mark.parametrize("call", ["save", "async_save", "load"])
def test_every_argument_of_the_functions_is_ours_too(call: str) -> None:
    assert set(inspect.signature(getattr(theirs, call)).parameters) <= set(
        inspect.signature(getattr(dcp, call)).parameters
    )


def kinds_of(call: str) -> Iterator[tuple[str, Mapping[str, ArgumentRules]]]:
    yield from TAKES[call].items()


@pytest.mark.parametrize("call", TAKES)
def test_plain_objects_are_understood_also_after_torch_has_used_them(call: str, tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "step": 3}
    theirs.save(state, checkpoint_id=tmp_path)
    for argument, kinds in kinds_of(call):
        for name in kinds:
            if class_of(name) is None or name.endswith(("DefaultStager", "HuggingFaceStorageReader")):
                # One wants a GPU, the other a folder of Holdfast.
                continue
            made = class_of(name)(*([tmp_path] if argument.startswith("storage") else []))
            understand(call, tmp_path, **{argument: made})
            if argument != "async_stager":
                (theirs.load if call == "load" else theirs.save)(
                    state, checkpoint_id=tmp_path, **{argument: made}
                )
                understand(call, tmp_path, **{argument: made})


CASES = list(torchs(Path("unused")))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Returns what was logged since it was last asked; each sentence is logged once in a process."""

    def ask() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "holdfast"]
        caplog.clear()
        return found

    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "holdfast"):
        yield ask


@pytest.mark.parametrize(("kind", "argument"), CASES)
def test_what_only_torch_honours_is_torchs_and_is_said(
    kind: str, argument: str, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    given = torchs(tmp_path / "a")[kind, argument]
    loads = kind in ("FileSystemReader", "DefaultLoadPlanner")
    name = "planner" if "Planner" in kind else "storage_reader" if loads else "storage_writer"
    state = {"w": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    before = (tmp_path / "a" / INDEX).read_bytes()
    for call in ("load",) if loads else ("save", "async_save"):
        there = tmp_path / ("a" if loads else call)
        if hasattr(given, "path") and not loads:
            given.path = there
        words = rf"dcp\.{call} can't honour {argument} of the {kind}: .*\. Leave .* Or leave out job"
        with pytest.raises(BadInput, match=words):
            getattr(dcp, call)(state, checkpoint_id=there, **{name: given}, job=holdfast.Job())
        assert not said()
        done = getattr(dcp, call)(state, checkpoint_id=there, **{name: given})
        if call == "async_save":
            done.result(60)
        [sentence] = said()
        assert sentence.startswith(
            f"torch.distributed.checkpoint.{call} does this call, with collectives: holdfast."
        )
        assert loads == (there / INDEX).exists(), "torch DCP's files are no Holdfast checkpoint"
    assert (tmp_path / "a" / INDEX).read_bytes() == before


def test_torch_gets_only_the_arguments_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torch 2.6, neither `save` nor `load` has `no_dist`."""
    got: list[set[str]] = []

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            got.append(set(named))
            return original(*args, **named)

        return call

    for name in ("save", "async_save", "load"):
        monkeypatch.setattr(
            torch.distributed.checkpoint, name, noting(getattr(torch.distributed.checkpoint, name))
        )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        state, theirs_alone = {"w": torch.ones(2)}, FileSystemWriter(tmp_path, single_file_per_rank=False)
        dcp.save(state, storage_writer=theirs_alone)
        dcp.async_save(state, storage_writer=theirs_alone).result()
        dcp.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(flatten_state_dict=False))
    finally:
        dist.destroy_process_group()
    assert not set.union(*got) & {"no_dist", "use_collectives", "async_stager", "async_checkpointer_type"}
    assert len(got) == 3


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_deprecated_functions_are_the_same(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    dcp.save_state_dict({"w": torch.ones(2)}, FileSystemWriter(tmp_path / "a"), no_dist=True)
    assert (tmp_path / "a" / INDEX).exists()
    found = {"w": torch.zeros(2)}
    dcp.load_state_dict(found, FileSystemReader(tmp_path / "a"), None, 0, True)
    assert torch.equal(found["w"], torch.ones(2))
    assert not said()
    theirs_alone = FileSystemWriter(tmp_path / "b", single_file_per_rank=False)
    dcp.save_state_dict(found, theirs_alone, None, 0, True)
    assert not (tmp_path / "b" / INDEX).exists()
    whole = DefaultLoadPlanner(flatten_state_dict=False)
    found["w"].zero_()
    dcp.load_state_dict(found, FileSystemReader(tmp_path / "b"), no_dist=True, planner=whole)
    assert torch.equal(found["w"], torch.ones(2))
    assert len(said()) == 2


def test_methods_that_were_replaced_are_torchs_to_call(tmp_path: Path) -> None:
    writer, called = FileSystemWriter(tmp_path), []
    writer.finish = lambda *args, **named: called.append(named)  # type: ignore[method-assign]
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    assert called


def test_by_position_comes_what_came_there_in_torch(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, FileSystemWriter(tmp_path))
    found = {"w": torch.zeros(2, dtype=torch.float64)}
    dcp.load(found, FileSystemReader(tmp_path))
    assert torch.equal(found["w"], torch.ones(2, dtype=torch.float64)), "converted, as torch does"
    with pytest.raises(
        BadInput, match=r"takes no storage_writer= \(str\): it is no StorageWriter. Give checkpoint_id="
    ):
        dcp.save({}, str(tmp_path))
    for call in (
        lambda: dcp.save({}, FileSystemWriter(tmp_path), None),
        lambda: dcp.save({}, FileSystemWriter(tmp_path), storage_writer=None),
    ):
        with pytest.raises(BadInput, match=r"dcp\.save takes the state and storage_writer by position"):
            call()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_casts_both_ways(half: torch.dtype, tmp_path: Path) -> None:
    exact = torch.arange(7.0)
    for name, stored, wanted in (("down", torch.float32, half), ("up", half, torch.float32)):
        for save in (dcp.save, theirs.save):
            folder = tmp_path / f"{name}-{save.__module__}"
            save({"m": {"w": exact.to(stored)}}, checkpoint_id=folder)
            found = {"m": {"w": torch.zeros(7, dtype=wanted)}}
            target = found["m"]["w"]
            dcp.load(found, checkpoint_id=folder)
            assert found["m"]["w"] is target
            assert torch.equal(target, exact.to(wanted))


def test_what_is_saved_is_told_as_torchs_metadata(tmp_path: Path) -> None:
    state = {"w": torch.ones(2, 3), "step": 3}
    for found in (
        dcp.save(state, checkpoint_id=tmp_path),
        dcp.async_save(state, checkpoint_id=tmp_path).result(60),
    ):
        assert isinstance(found, theirs.Metadata)
        assert (found.path, found.tensors) == (str(tmp_path), 2)
        assert found.state_dict_metadata["w"].size == torch.Size((2, 3))
        assert isinstance(found.state_dict_metadata["step"], theirs.BytesStorageMetadata)
        with pytest.raises(AttributeError, match="nothing"):
            _ = found.nothing


def test_errors_begin_with_torchs_words(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2, 3), "step": 3}, checkpoint_id=tmp_path)
    for state, words in (
        ({"w": torch.zeros(2, 3), "v": 1}, r"^Missing key in checkpoint state_dict: v\. .*holds? 2 names"),
        ({"w": torch.zeros(3, 2)}, r"^Size mismatch between saved and current tensors\. .*float32\[2, 3\]"),
        ({"step": torch.zeros(2)}, "^load of .*can't be exchanged"),
    ):
        with pytest.raises(theirs.CheckpointException, match=words):
            dcp.load(state, checkpoint_id=tmp_path)


def test_writer_and_planner_know_what_torchs_would(tmp_path: Path) -> None:
    writer, planner = FileSystemWriter(tmp_path), DefaultLoadPlanner()
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    about = FileSystemReader(tmp_path).read_metadata().storage_meta
    assert about is not None
    assert (about.checkpoint_id, about.save_id) == (str(tmp_path), writer.save_id)
    dcp.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path, planner=planner)
    dcp.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path, planner=planner)
    assert planner.metadata is not None
    assert [*planner.metadata.state_dict_metadata] == ["w"]


def test_a_url_is_torchs(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    with pytest.raises(Exception, match=r"(?i)msc|fsspec|Cannot detect"):
        dcp.load({"w": torch.zeros(2)}, checkpoint_id="msc://bucket/it")
    assert "dcp.load has no store for msc:// places" in said()[0]


@pytest.mark.skipif(not extensions, reason="this torch has no extensions")
def test_what_is_in_a_checkpoint_sends_no_load_to_torch(
    tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    """torch unpickles, so that is the caller's to choose, not the checkpoint's."""
    dcp.save({"w": torch.ones(9)}, FileSystemWriter(tmp_path, _extensions=[Swapping()]))
    assert len(said()) == 1
    with pytest.raises(
        CorruptCheckpoint, match=r"compressed or encrypted.*If you trust it, load it with torch"
    ):
        dcp.load({"w": torch.zeros(9)}, checkpoint_id=tmp_path)
    assert not said()


@pytest.mark.skipif(not hasattr(theirs, "HuggingFaceStorageReader"), reason="this torch has none")
def test_readers_and_writers_of_hugging_face(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    state = {"w": torch.arange(6.0)}
    dcp.save(state, checkpoint_id=tmp_path / "ours")
    assert not said()
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "theirs")))
    [sentence] = said()
    assert "takes no storage_writer= (HuggingFaceStorageWriter)" in sentence
    assert [*(tmp_path / "theirs").glob("model*.safetensors")]
    for name in ("ours", "theirs"):
        found = {"w": torch.zeros(6)}
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / name)))
        assert torch.equal(found["w"], state["w"])
        assert not said()  # a folder as transformers finds it is read without a collective
    where = str(tmp_path / "shards")
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(where, save_distributed=True))
    found = {"w": torch.zeros(6)}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(where))
    assert torch.equal(found["w"], state["w"])
    [sentence] = said()
    assert "neither a checkpoint of Holdfast nor a published model" in sentence


class Watching(dict[str, Any]):
    """A dict that listens."""

    heard: tuple[str, ...] = ()

    def __setitem__(self, key: str, value: object) -> None:
        self.heard += (key,)
        super().__setitem__(key, value)


def test_values_are_put_back_as_torch_does(tmp_path: Path) -> None:
    dcp.save({"a": {"w": torch.ones(2)}, "m": torch.nn.Linear(1, 1)}, checkpoint_id=tmp_path)
    state = Watching({"a": {"w": torch.zeros(2)}, "m": torch.nn.Linear(1, 1)})
    dcp.load(state, checkpoint_id=tmp_path)
    assert state.heard == ("a",)


def test_a_role_takes_only_its_own_classes(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"save takes no storage_writer= \(FileSystemReader\): it is no StorageWriter"
    ):
        dcp.save({}, storage_writer=FileSystemReader(tmp_path))
    with pytest.raises(
        BadInput, match=r"load takes no planner= \(DefaultSavePlanner\): it is no LoadPlanner"
    ):
        dcp.load({}, checkpoint_id=tmp_path, planner=DefaultSavePlanner())
    with pytest.raises(BadInput, match=r"save takes no async_stager= \(int\): it is no AsyncStager"):
        dcp.async_save({}, checkpoint_id=tmp_path, async_stager=3)
    with pytest.raises(BadInput, match="names no folder"):
        dcp.save({})


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("first", [dcp.save, theirs.save], ids=["ours", "torch DCP's"])
def test_overwrite_false_replaces_no_checkpoint(first: Any, asynchronous: bool, tmp_path: Path) -> None:
    first({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.is_file()}

    def save(folder: str) -> None:
        writer = FileSystemWriter(tmp_path / folder, overwrite=False)
        if asynchronous:
            dcp.async_save({"w": torch.zeros(2)}, storage_writer=writer).result()
        else:
            dcp.save({"w": torch.zeros(2)}, storage_writer=writer)

    with pytest.raises(
        BadInput,
        match=r"^Checkpoint already exists.*holds a committed checkpoint already, and overwrite=False",
    ):
        save("a")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.is_file()}
    found = {"w": torch.zeros(2)}
    dcp.load(found, checkpoint_id=tmp_path / "a")
    assert torch.equal(found["w"], torch.ones(2))
    save("b")
    dcp.load(found, checkpoint_id=tmp_path / "b")
    assert torch.equal(found["w"], torch.zeros(2))


def test_the_count_of_threads_is_the_writers_and_the_rest_is_moot(tmp_path: Path) -> None:
    writer = FileSystemWriter(
        tmp_path, thread_count=3, sync_files=False, per_thread_copy_ahead=1, cache_staged_state_dict=True
    )
    assert understand("save", None, storage_writer=writer).threads == 3
    moot = {"dedup_save_to_lowest_rank", "enable_plan_caching"} & {
        *inspect.signature(DefaultSavePlanner).parameters
    }
    planner = DefaultSavePlanner(**dict.fromkeys(moot, True))  # type: ignore[arg-type]
    stager = BlockingAsyncStager(cache_staged_state_dict=True, type_check=True)
    state = {"w": torch.arange(5.0), "step": 3}
    dcp.async_save(state, storage_writer=writer, planner=planner, async_stager=stager).result()
    found = {"w": torch.zeros(5), "step": 0}
    dcp.load(found, storage_reader=FileSystemReader(tmp_path))
    assert torch.equal(found["w"], state["w"])
    assert found["step"] == 3


class Framework:
    def save(self, state: dict[str, Any], **how: Any) -> Any:
        return theirs.save(state, **how)

    def load(self, state: dict[str, Any], **how: Any) -> None:
        theirs.load(state, **how)


@pytest.mark.skipif(not extensions, reason="this torch has no extensions")
def test_a_cipher_inside_a_framework_is_torch_dcps_and_no_text_is_plain(tmp_path: Path) -> None:
    place = f"{__name__}.Framework"
    holdfast.install("torch-dcp", guard=[f"{place}.save", f"{place}.load"], job=holdfast.Job(timeout=60))
    try:
        state = {"text": torch.frombuffer(bytearray(SECRET), dtype=torch.uint8).clone()}
        ciphered = FileSystemWriter(tmp_path / "a", _extensions=[Swapping()])
        Framework().save(state, storage_writer=ciphered)
        written = [path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()]
        assert written
        assert not any(SECRET in data for data in written)
        found = {"text": torch.zeros(len(SECRET), dtype=torch.uint8)}
        Framework().load(found, storage_reader=FileSystemReader(tmp_path / "a", registry()))
        assert torch.equal(found["text"], state["text"])
        once = FileSystemWriter(tmp_path / "b", overwrite=False)
        Framework().save(state, storage_writer=once)
        assert (tmp_path / "b" / INDEX).exists()
        with pytest.raises(BadInput, match="overwrite=False"):
            Framework().save({"text": torch.zeros(3)}, storage_writer=once)
    finally:
        holdfast.uninstall()
