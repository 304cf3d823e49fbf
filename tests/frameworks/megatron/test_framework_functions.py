"""Save and load functions of whole frameworks, as they are published, called after `install()`.

What the packages import and these functions need nothing from (models, tokenizers, hubs, Transformer Engine,
the state of a quantized model) is empty here: `tests/support/stand_ins.py` lists it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from holdfast._tools.checkpoints.diff import compare
from holdfast.errors import RankFailed
from tests.frameworks.megatron.cpu import use_cpu
from tests.frameworks.megatron.jobs import training
from tests.frameworks.megatron.models import Layout, Recipe, Training
from tests.support.collectives import counted
from tests.support.processes import ProcessWorld
from tests.support.stand_ins import stand_in_for
from tests.support.waiting import SLACK
from tests.support.wide import wide

SMALL = Recipe(layers=2)
RANKS, ABSENT = 4, 3
HOME, OTHER = Layout(tp=2, ep=2), Layout(pp=2, ep=2)
TRACKER, ITERATION = "latest_checkpointed_iteration.txt", "iter_0000001"


class Framework(NamedTuple):
    """A framework's own functions over a `Training`; `load` returns the iteration."""

    save: Callable[[], Any]
    load: Callable[[], int]
    guards: tuple[str, ...]
    """Dotted names of what `guard=` takes."""


def scheduler(run: Training) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        run.optimizer, 1e-3, 1e-3, 1e-3, 0, 100, "constant", 0.0, 0.0, 100, "constant"
    )


def ms_swift(run: Training, folder: str, load_from: str) -> Framework:
    stand_in_for("ms-swift")
    from swift.megatron.utils import megatron_lm_utils as swift

    args = argparse.Namespace(
        output_dir=folder,
        mcore_model=load_from,
        tuner_type="full",
        finetune=False,
        fp16=False,
        bf16=False,
        tensor_model_parallel_size=run.layout.tp,
        pipeline_model_parallel_size=run.layout.pp,
        use_distributed_optimizer=True,
        data_parallel_random_init=False,
        async_save=False,
        no_save_optim=False,
        no_save_rng=False,
        no_load_optim=False,
        no_load_rng=False,
        dist_ckpt_save_pre_mcore_014=False,
        dist_ckpt_optim_fully_reshardable=False,
        distrib_optim_fully_reshardable_mem_efficient=False,
    )
    schedule = scheduler(run)
    place = "swift.megatron.utils.megatron_lm_utils"
    return Framework(
        lambda: swift.save_mcore_checkpoint(args, run.models, run.optimizer, schedule, run.iteration),
        lambda: int(swift.load_mcore_checkpoint(args, run.models, run.optimizer, schedule)),
        (f"{place}.save_mcore_checkpoint", f"{place}.load_mcore_checkpoint"),
    )


def bridge_state(run: Training, folder: str, load_from: str, **settings: Any) -> Any:
    """Megatron-Bridge's GlobalState for this training. settings: of its CheckpointConfig."""
    stand_in_for("megatron-bridge")
    from megatron.bridge.training import config
    from megatron.bridge.training.state import GlobalState
    from megatron.bridge.training.tokenizers.config import TokenizerConfig
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    init_num_microbatches_calculator(0, None, 8, 1, 1)
    state = GlobalState()
    state.cfg = config.ConfigContainer(
        train=config.TrainingConfig(train_iters=10, global_batch_size=8, micro_batch_size=1),
        model=run.config,
        optimizer=config.OptimizerConfig(use_distributed_optimizer=True),
        scheduler=config.SchedulerConfig(),
        dataset=None,
        logger=config.LoggerConfig(),
        tokenizer=TokenizerConfig(),
        checkpoint=config.CheckpointConfig(save=folder, load=load_from, **settings),
    )
    return state


def megatron_bridge(run: Training, folder: str, load_from: str) -> Framework:
    state, schedule = bridge_state(run, folder, load_from), scheduler(run)
    from megatron.bridge.training import checkpointing as bridge

    context: dict[str, Any] = {}

    def save() -> None:
        state.train_state.step = run.iteration
        bridge.save_checkpoint(state, run.models, run.optimizer, schedule, 0, context)

    def load() -> int:
        found = bridge.load_checkpoint(
            state, run.models, run.optimizer, schedule, checkpointing_context=context
        )
        return int(found[0])

    place = "megatron.bridge.training.checkpointing"
    return Framework(save, load, (f"{place}.save_checkpoint", f"{place}.load_checkpoint"))


def bridge_manager(run: Training, folder: str, load_from: str) -> Framework:
    """The class that Megatron-Bridge is told to make its manager of. It guards itself."""
    manager_class = "tests.frameworks.megatron.manager.Manager"
    state = bridge_state(run, folder, load_from, custom_manager_class=manager_class)
    schedule = scheduler(run)
    from megatron.bridge.training import checkpointing as bridge
    from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

    register_allowed_target_prefix("tests")
    manager = bridge.create_checkpoint_manager(state.cfg.checkpoint)
    own = (state, run.models, run.optimizer, schedule)

    def save() -> None:
        state.train_state.step = run.iteration
        manager.save(bridge.CheckpointSaveContext(*own, 0), None)

    def load() -> int:
        return int(manager.load(bridge.CheckpointLoadContext(*own))[0])

    return Framework(save, load, ())


def megatron_lm(run: Training, folder: str, load_from: str) -> Framework:
    stand_in_for("megatron-lm")
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training import checkpointing, global_vars
    from megatron.training.arguments import parse_args

    init_num_microbatches_calculator(0, None, 8, 1, 1)
    given = {
        "save": folder,
        "load": load_from,
        "ckpt-format": "torch_dist",
        "num-layers": run.config.num_layers,
        "hidden-size": run.config.hidden_size,
        "num-attention-heads": run.config.num_attention_heads,
        "tensor-model-parallel-size": run.layout.tp,
        "pipeline-model-parallel-size": run.layout.pp,
    }
    before = sys.argv
    sys.argv = [
        "pretrain",
        "--use-distributed-optimizer",
        *(f"--{key}={value}" for key, value in given.items()),
    ]
    try:
        args = parse_args()
    finally:
        sys.argv = before
    args.use_dist_ckpt, args.phase_transition_iterations = (
        True,
        None,
    )  # `validate_args` sets both, and wants a GPU
    global_vars.set_args(args)
    schedule = scheduler(run)
    context: dict[str, Any] = {}

    def save() -> None:
        checkpointing.save_checkpoint(run.iteration, run.models, run.optimizer, schedule, 0, context)

    def load() -> int:
        found = checkpointing.load_checkpoint(
            run.models, run.optimizer, schedule, checkpointing_context=context
        )
        return int(found[0])

    place = "megatron.training.checkpointing"
    return Framework(save, load, (f"{place}.save_checkpoint", f"{place}.load_checkpoint"))


FRAMEWORKS = {
    "ms-swift": ms_swift,
    "megatron-bridge": megatron_bridge,
    "bridge-manager": bridge_manager,
    "megatron-lm": megatron_lm,
}
MODULES = {
    "ms-swift": "swift",
    "megatron-bridge": "megatron.bridge",
    "bridge-manager": "megatron.bridge",
    "megatron-lm": "megatron.training",
}
# Barriers of their own around a save, and other collectives of their own in a load, which `guard` leaves.
BARRIERS = {"ms-swift": 1, "megatron-bridge": 3, "bridge-manager": 0, "megatron-lm": 2}
LEFT = {
    "ms-swift": {"all_reduce"},
    "megatron-bridge": {"broadcast_object_list", "broadcast"},
    "bridge-manager": {"broadcast_object_list", "broadcast"},
    "megatron-lm": {"all_reduce"},
}


@contextlib.contextmanager
def framework_of(
    rank: int,
    name: str,
    layout: Layout,
    folder: str,
    load_from: str,
    guarded: bool,
    *,
    timeout: float = 60,
    stall_timeout: float = 30,
) -> Iterator[tuple[Training, Framework]]:
    """A model and a framework's functions over it, after `install()`."""
    from megatron.core import tensor_parallel

    import holdfast
    from tests.frameworks.megatron.manager import Manager

    os.environ["RANK"] = str(rank)  # as launchers do
    use_cpu()
    Manager.timeout, Manager.stall_timeout = timeout, stall_timeout
    torch.cuda.get_rng_state = torch.get_rng_state  # type: ignore[assignment]
    torch.cuda.set_rng_state = lambda state, *args: None
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()), training(layout, SMALL, seed=3) as run:
        tensor_parallel.get_cuda_rng_tracker().set_states({"model-parallel-rng": torch.get_rng_state()})
        framework = FRAMEWORKS[name](run, folder, load_from)
        holdfast.install(
            guard=guarded,
            warm_up=False,
            session=False,
            job=holdfast.Job(timeout=timeout, stall_timeout=stall_timeout),
        )
        try:
            yield run, framework
        finally:
            holdfast.uninstall()


def train_and_save(rank: int, name: str, folder: str) -> tuple[list[float], list[str]]:
    """The losses after the save, and the collectives of the save."""
    with framework_of(rank, name, HOME, folder, "", False) as (run, framework):
        run.step()
        seen = counted(framework.save)
        return [run.step() for _ in range(2)], seen


def load_and_save(
    rank: int, name: str, layout: Layout, folder: str, load_from: str
) -> tuple[list[float], list[str], list[str]]:
    """The losses after a load and another save, and the collectives of each, with `guard`."""
    with framework_of(rank, name, layout, folder, load_from, True) as (run, framework):
        found: list[int] = []
        loading = counted(lambda: found.append(framework.load()))
        [run.iteration] = found
        saving = counted(framework.save)
        return [run.step() for _ in range(2)], loading, saving


def save_without(rank: int, name: str, folder: str, absent: int) -> tuple[str, float]:
    """One rank never comes to the save."""
    with framework_of(rank, name, HOME, folder, "", True, timeout=30, stall_timeout=2) as (run, framework):
        run.step()
        begun = time.monotonic()
        if rank == absent:
            return "elsewhere", 0.0
        try:
            framework.save()
        except RankFailed as error:
            return f"RankFailed {error.rank}", time.monotonic() - begun
        return "saved", time.monotonic() - begun


class Saved(NamedTuple):
    name: str
    folder: Path
    losses: list[float]
    collectives: list[list[str]]


def takes_a_manager() -> bool:
    """Has the installed Megatron-Bridge the setting? To import it needs stand-ins."""
    bridge = importlib.metadata.distribution("megatron-bridge")
    source = Path(str(bridge.locate_file("megatron/bridge/training/checkpointing.py")))
    return "def create_checkpoint_manager(" in source.read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=wide(FRAMEWORKS, suite=("ms-swift", "megatron-lm")))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    name = request.param
    if importlib.util.find_spec(MODULES[name]) is None:
        pytest.skip(f"{name} is not installed")
    if name == "bridge-manager" and not takes_a_manager():
        pytest.skip("this Megatron-Bridge takes no manager of its user's")
    folder = tmp_path_factory.mktemp(name)
    with ProcessWorld(RANKS) as world:
        found = world.run(train_and_save, name, str(folder), timeout=120)
    return Saved(name, folder, found[0][0], [seen for _, seen in found])


def test_the_tracker_is_written_after_the_commit(saved: Saved) -> None:
    tracker, index = saved.folder / TRACKER, saved.folder / ITERATION / "index.safetensors"
    assert tracker.read_text() == "1"
    assert index.stat().st_mtime_ns <= tracker.stat().st_mtime_ns


def test_only_their_own_barriers_are_left(saved: Saved) -> None:
    assert saved.collectives == [["barrier"] * BARRIERS[saved.name]] * RANKS


@pytest.mark.parametrize("layout", [pytest.param(HOME, marks=pytest.mark.wide), OTHER], ids=str)
def test_loads(saved: Saved, layout: Layout, tmp_path: Path) -> None:
    with ProcessWorld(RANKS) as world:
        found = world.run(load_and_save, saved.name, layout, str(tmp_path), str(saved.folder), timeout=120)
    for losses, loading, saving in found:
        assert losses == (saved.losses if layout == HOME else pytest.approx(saved.losses, rel=1e-4))
        assert set(loading) == LEFT[saved.name]
        assert saving == []
    report = compare(saved.folder / ITERATION, tmp_path / ITERATION)
    changed = [item.name for item in (*report.content, *report.changed)]
    assert [
        name for name in (*changed, *report.only_a, *report.only_b) if not _may_differ(name, layout)
    ] == []
    assert report.equal > 30


def _may_differ(name: str, layout: Layout) -> bool:
    """The arguments name other folders; generators are not loaded into another layout, and differ by it."""
    return name == "common_state" or (layout != HOME and name.startswith("rng_state/"))


def test_who_never_comes_is_named(saved: Saved, tmp_path: Path) -> None:
    with ProcessWorld(RANKS) as world:
        found = world.run(save_without, saved.name, str(tmp_path), ABSENT, timeout=120)
    for rank, (said, took) in enumerate(found):
        assert said == ("elsewhere" if rank == ABSENT else f"RankFailed {ABSENT}")
        assert took < 2 + SLACK
    assert not (tmp_path / TRACKER).exists()
