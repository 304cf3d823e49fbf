"""Each argument of torch DCP's writers, readers, planners and stagers is honoured, refused with one sentence,
or moot. A new argument of the installed torch fails here until someone has decided."""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import pytest
import torch
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
from holdfast._format.names import INDEX
from holdfast._integrations.dcp_arguments import TAKES, ArgumentRules, understand
from holdfast.errors import BadInput

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
    return getattr(import_module(module), last, None)


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


def refused(folder: Path) -> dict[tuple[str, str], Any]:
    """For each argument that is refused: an object that has another value than the default."""
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
    decided = [*kind.honoured, *kind.moot, *kind.refused]
    assert len(decided) == len(set(decided))
    assert set(inspect.signature(theirs).parameters) <= set(decided)
    there = {(theirs.__name__, argument) for argument in kind.refused} & {
        (theirs.__name__, argument) for argument in inspect.signature(theirs).parameters
    }
    assert there == {key for key in refused(tmp_path) if key[0] == theirs.__name__}


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
            if class_of(name) is None or name.endswith("DefaultStager"):  # it wants a GPU
                continue
            made = class_of(name)(*([tmp_path] if argument.startswith("storage") else []))
            understand(call, tmp_path, **{argument: made})
            if argument != "async_stager":
                (theirs.load if call == "load" else theirs.save)(
                    state, checkpoint_id=tmp_path, **{argument: made}
                )
                understand(call, tmp_path, **{argument: made})


CASES = list(refused(Path("unused")))


@pytest.mark.parametrize(("kind", "argument"), CASES)
def test_what_is_refused_is_named(kind: str, argument: str, tmp_path: Path) -> None:
    given = refused(tmp_path)[kind, argument]
    state = {"w": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path)
    before = (tmp_path / INDEX).read_bytes()
    loads = kind in ("FileSystemReader", "DefaultLoadPlanner")
    for call in ("load",) if loads else ("save", "async_save"):
        name = "planner" if "Planner" in kind else "storage_reader" if loads else "storage_writer"
        with pytest.raises(
            BadInput, match=rf"dcp\.{call} can't honour {argument} of the {kind}: .*\. Leave "
        ):
            getattr(dcp, call)(state, checkpoint_id=tmp_path, **{name: given})
    assert (tmp_path / INDEX).read_bytes() == before


def test_methods_that_were_replaced_are_refused(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path)
    writer.finish = lambda *args: None  # type: ignore[method-assign]
    with pytest.raises(BadInput, match="can't honour finish of the FileSystemWriter"):
        dcp.save({"w": torch.ones(2)}, storage_writer=writer)


def test_a_role_takes_only_its_own_classes(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"save takes no storage_writer= \(FileSystemReader\)"):
        dcp.save({}, storage_writer=FileSystemReader(tmp_path))
    with pytest.raises(BadInput, match=r"load takes no planner= \(DefaultSavePlanner\)"):
        dcp.load({}, checkpoint_id=tmp_path, planner=DefaultSavePlanner())


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

    with pytest.raises(BadInput, match="holds a committed checkpoint already, and overwrite=False"):
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
