"""`save` and `load` called as the installed megatron-core takes its arguments, by position and by name, as its own
functions after `install()` and as `from holdfast import megatron as dist_checkpointing`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast._core.format.names import INDEX
from holdfast._frameworks.megatron.patches import PLANNED_BY
from tests.frameworks.megatron.cpu import use_cpu
from tests.frameworks.megatron.jobs import SOON, children_allowed
from tests.support.processes import ProcessWorld
from tests.support.third_parties import version_of

VERSION, NUMBERS = version_of("megatron-core")
RANKS = 2


def state(value: float) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    rank = dist.get_rank()
    whole = torch.full((2, 3), value)
    return {"a": ShardedTensor.from_rank_offsets("a", whole, (0, rank, RANKS)), "args": {"lr": value}}


def calls(rank: int, root: str) -> dict[str, Any]:
    """What each form of a call did, by where the functions come from."""
    use_cpu()
    from megatron.core import dist_checkpointing as theirs
    from megatron.core.dist_checkpointing.validation import StrictHandling

    import holdfast
    from holdfast import megatron

    stock = inspect.signature(theirs.save).parameters
    # Before 0.17 there is another strategy in the middle.
    middle = (None,) if "common_strategy" in stock else ()
    found: dict[str, Any] = {}
    for name in ("installed", "module"):
        functions: Any = theirs if name == "installed" else megatron
        if name == "installed":
            holdfast.install(job=SOON, warm_up=False, session=False)
        try:
            folder, seen = f"{root}/{name}", []

            def preprocess(common: Any, seen: list[Any] = seen) -> Any:
                seen.append(common["args"])
                return common

            saved = functions.save(state(1.0), folder, None, *middle, True, False, preprocess)
            loaded = functions.load(state(0.0), folder, None, *middle, True, StrictHandling.RETURN_ALL)
            form = {
                "saved": saved,
                "index": os.path.exists(f"{folder}/{INDEX}"),
                "preprocessed": seen,
                "loaded": (loaded[0]["a"].tolist(), loaded[0]["args"], *loaded[1:]),
            }
            if "async_strategy" in stock:
                functions.save(state(2.0), f"{folder}-all", None, True, False, None, {"v": 1}, "mcore", True)
                group = dist.group.WORLD
                again = functions.load(state(0.0), f"{folder}-all", process_group=group)
                form["all"] = (again["a"].tolist(), functions.load_content_metadata(f"{folder}-all"))
                again = functions.load(state(0.0), f"{folder}-all", None, True, "raise_all", True, group)
                assert again["a"].tolist() == form["all"][0]
            for wrong in ({"nobody": 1}, {"strict": "raise_all", "sharded_strategy": None, "surely": 1}):
                with pytest.raises(TypeError, match="unexpected keyword"):
                    functions.load(state(0.0), folder, **wrong)
            more = {**state(0.0), "b": state(0.0)["a"]}
            more["b"].key = "b"
            with pytest.raises(theirs.core.CheckpointingException) as refused:
                functions.load(more, folder, None, *middle, True, "raise_all")
            form["refused"] = (type(refused.value).__name__, str(refused.value))
            found[name] = form
        finally:
            holdfast.uninstall()
    with megatron.Checkpoints(f"{root}/run", job=SOON) as run:
        run.save(1, state(1.0), force=True).committed()
        with pytest.raises(theirs.core.CheckpointingException):
            run.load(more, 1, strict="raise_all")
    return found


def test_positions_are_those_of_the_installed_version(tmp_path: Path) -> None:
    with ProcessWorld(RANKS) as world:
        for found in world.run(calls, str(tmp_path), timeout=120):
            assert set(found) == {"installed", "module"}
            for form in found.values():
                assert form["saved"] is None
                assert form["index"]
                assert form["preprocessed"] == [{"lr": 1.0}]
                assert form["loaded"] == ([[1.0] * 3] * 2, {"lr": 1.0}, set(), set())
                assert form.get("all") in (None, ([[2.0] * 3] * 2, {"v": 1}))
                kind, text = form["refused"]
                assert kind == "MissingTensors"
                assert "1 are asked for and not in the checkpoint: 'b'" in text


def asynchronous(rank: int, root: str) -> list[list[str]]:
    """The warnings of two plans of an asynchronous save, inside a guarded function and outside."""
    use_cpu()
    import logging

    from megatron.core.dist_checkpointing.strategies import state_dict_saver
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from torch.distributed.checkpoint import DefaultSavePlanner

    import holdfast
    from holdfast._frameworks.guard import guarded

    said: list[list[str]] = []
    holdfast.install(job=SOON, warm_up=False, session=False)
    try:
        for inside in (False, True):
            records: list[str] = []
            handler = logging.Handler()
            handler.emit = lambda record, records=records: records.append(record.getMessage())  # type: ignore[method-assign,misc]
            logging.getLogger("holdfast").addHandler(handler)
            for number in range(2):
                folder = f"{root}/{inside}{number}"
                os.makedirs(folder, exist_ok=True)
                writer = FileSystemWriterAsync(folder)
                how = {"planner": DefaultSavePlanner()}
                with children_allowed(), guarded("save", job=SOON) if inside else contextlib.nullcontext():
                    state_dict_saver.save_state_dict_async_plan({"a": torch.ones(2)}, writer, **how)
            logging.getLogger("holdfast").removeHandler(handler)
            said.append([text for text in records if "not replaced" in text])
    finally:
        holdfast.uninstall()
    return said


def test_an_asynchronous_save_that_is_not_replaced_is_told(tmp_path: Path) -> None:
    with ProcessWorld(1) as world:
        for outside, inside in world.run(asynchronous, str(tmp_path), timeout=60):
            assert outside == []
            [text] = inside
            assert text.startswith(
                "An asynchronous save of fsdp_dtensor or torch_dcp is not replaced: megatron."
            )
            assert "Leave out --async-save" in text


def test_the_writers_that_are_told_of_are_those_that_megatron_core_imports() -> None:
    core = importlib.metadata.distribution("megatron-core")
    source = Path(str(core.locate_file("megatron/core/dist_checkpointing/strategies/torch.py"))).read_text()
    imported = re.findall(r"from (\S*state_dict_saver) import", source)
    absolute = {
        name if "." in name.strip(".") else f"megatron.core.dist_checkpointing.strategies{name}"
        for name in imported
    }
    assert absolute
    assert absolute <= set(PLANNED_BY)


def integrity(rank: int, root: str) -> list[Any]:
    """What a load with `verify_integrity=True` gives: of a healthy folder of stock's, one with a flipped byte,
    one with a file more, one without a list, and one of ours."""
    use_cpu()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    from holdfast import megatron

    for name, listed in (("healthy", True), ("flipped", True), ("more", True), ("unlisted", False)):
        if rank == 0:
            os.makedirs(f"{root}/{name}")
        dist.barrier()
        with children_allowed():
            dist_checkpointing.save(state(1.0), f"{root}/{name}", verify_integrity=listed)
    megatron.save(state(1.0), f"{root}/ours", verify_integrity=True, job=SOON)
    if rank == 0:
        path = f"{root}/flipped/__0_0.distcp"
        data = bytearray(Path(path).read_bytes())
        at = data.find(torch.full((6,), 1.0).numpy().tobytes())
        data[at + 3] ^= 1
        Path(path).write_bytes(data)
        Path(f"{root}/more/__7_0.distcp").write_bytes(b"nobody knows")
    dist.barrier()
    found: list[Any] = []
    for name in ("healthy", "flipped", "more", "unlisted", "ours"):
        try:
            loaded = megatron.load(state(0.0), f"{root}/{name}", verify_integrity=True, job=SOON)
            found.append(loaded["a"].tolist())
        except CheckpointingException as error:
            found.append((type(error).__name__, str(error)))
    return found


@pytest.mark.skipif(NUMBERS < (0, 18), reason=f"megatron-core {VERSION} has no verify_integrity")
def test_what_asks_for_integrity_is_checked(tmp_path: Path) -> None:
    with ProcessWorld(RANKS) as world:
        for healthy, flipped, more, unlisted, ours in world.run(integrity, str(tmp_path), timeout=120):
            assert healthy == ours == [[1.0] * 3] * 2
            assert flipped[0] == more[0] == "CorruptCheckpoint"
            assert "__0_0.distcp (its SHA-256 is another one)" in flipped[1]
            assert "__7_0.distcp (it is not listed)" in more[1]
            assert unlisted[0] == "BadInput"
            assert "has no integrity.json. It was saved without verify_integrity=True." in unlisted[1]
