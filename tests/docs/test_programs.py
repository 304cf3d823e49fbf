"""The complete programs of the recipes: two ranks run each, and a run that goes on from its checkpoint has the
losses of the one that was not interrupted, bit for bit. Then the bad days of some of them."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast._core.format.names import INDEX
from tests.docs.test_recipes import environment
from tests.support.programs import SAVED, STEPS, Launcher, changed, losses, losses_in, programs_of, weights_of
from tests.support.wide import wide

PROGRAMS = [
    pytest.param("fsdp2", "train.py", (), id="fsdp2"),
    *wide(
        (
            pytest.param("ddp", "train.py", ("torchdata",), id="ddp"),
            pytest.param("accelerate", "train.py", ("accelerate", "transformers"), id="accelerate"),
            pytest.param("lightning", "train.py", ("lightning", "torchdata"), id="lightning"),
            pytest.param("lightning", "fabric.py", ("lightning",), id="fabric"),
        )
    ),
]
"""The programs and the packages that they need. Those of transformers and Ray Train have tests of their own."""


def there(*packages: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in packages)


trainers = pytest.mark.skipif(
    not there("accelerate", "transformers"), reason="needs accelerate and transformers"
)
LINE = "holdfast.install()"
HASTY = "holdfast.install(job=holdfast.Job(timeout=120, stall_timeout=3))"
DYING = """
class Dying(Trainer):
    def _save_optimizer_and_scheduler(self, output_dir):
        if self.state.global_step == steps and self.args.process_index == 1:
            os._exit(9)
        super()._save_optimizer_and_scheduler(output_dir)


trainer = Dying("""
DEEPSPEED_ON_CPU = """
import os
os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it compiles for minutes
"""
MERGE = """
import sys
import holdfast
holdfast.install()
from accelerate.utils import merge_fsdp_weights
merge_fsdp_weights(f"{sys.argv[1]}/pytorch_model_fsdp_0", f"{sys.argv[1]}/merged")
"""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with Launcher(tmp_path_factory.mktemp("programs")) as made:
        yield made


@pytest.mark.parametrize(("page", "file", "needs"), PROGRAMS)
def test_a_run_that_goes_on_has_the_same_losses(
    page: str, file: str, needs: tuple[str, ...], launcher: Launcher, tmp_path: Path
) -> None:
    if not there(*needs):
        pytest.skip(f"needs {' and '.join(needs)}")
    program, run = programs_of(page)[file], tmp_path / "run"
    whole = losses(launcher.run(program, run))
    assert list(whole) == list(range(1, STEPS + 1))
    for last in run.glob(f"*{STEPS}"):  # as if it had been killed before that save
        shutil.rmtree(last)
    assert list(run.rglob(INDEX)), "nothing was saved by Holdfast"
    assert losses(launcher.run(program, run)) == {step: loss for step, loss in whole.items() if step > SAVED}


@pytest.mark.soak
@pytest.mark.skipif(not there("lightning", "torchdata"), reason="needs lightning and torchdata")
def test_the_weights_of_lightning(launcher: Launcher, tmp_path: Path) -> None:
    import torch

    run = tmp_path / "run"
    losses(launcher.run(programs_of("lightning")["train.py"], run))
    model = torch.nn.Module()
    model.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    before = model.net[0].weight.clone()
    [saved] = run.glob(f"*step={SAVED}.ckpt")
    exec(weights_of("lightning", "run/epoch=0-step=4.ckpt", saved), {"holdfast": holdfast, "model": model})
    assert not torch.equal(model.net[0].weight, before)


# -- bad days ------------------------------------------------------------------------------------


@trainers
def test_a_trainer_that_died_in_a_save_goes_on(launcher: Launcher, tmp_path: Path) -> None:
    program, run = programs_of("transformers")["train.py"], tmp_path / "run"
    dying = launcher.run(changed(changed(program, LINE, HASTY), "trainer = Trainer(", DYING), run)
    whole = losses(dying, failed=True)
    assert dying.codes[1] == 9
    assert "RankFailed" in dying.said
    assert "rank 1" in dying.said
    assert list(whole) == list(range(1, STEPS + 1))
    assert (run / f"checkpoint-{STEPS}").exists()
    again = launcher.run(program, run)
    assert losses(again) == {step: loss for step, loss in whole.items() if step > SAVED}
    assert f"checkpoint-{STEPS} is incomplete" in again.said
    lines = weights_of("transformers", "run/checkpoint-500", run / f"checkpoint-{STEPS}")
    model = program.partition("args = TrainingArguments")[0]
    assert not any(launcher.run(model + changed(lines, '"final"', f'"{run}/final"'), run, ranks=1).codes)
    assert (run / "final" / "model.safetensors").exists()


@trainers
@pytest.mark.soak
def test_a_save_on_the_main_process_alone_names_the_others(launcher: Launcher, tmp_path: Path) -> None:
    program = changed(programs_of("accelerate")["train.py"], LINE, HASTY)
    alone = "accelerator.is_main_process and accelerator.save_state(run)"
    ended = launcher.run(changed(program, "accelerator.save_state(run)", alone), tmp_path / "run")
    assert ended.codes[0] == 1
    assert ended.seconds < 100  # `timeout` is 120 s
    assert "rank 1" in ended.said
    assert "save_state" in ended.said


@pytest.mark.soak
def test_fsdp2_goes_on_with_more_ranks(launcher: Launcher, tmp_path: Path) -> None:
    program, run = programs_of("fsdp2")["train.py"], tmp_path / "run"
    two, four = losses(launcher.run(program, run)), losses(launcher.run(program, run, ranks=4))
    assert four == pytest.approx({step: loss for step, loss in two.items() if step > SAVED}, rel=1e-5)


@pytest.mark.wide
@pytest.mark.skipif(not there("deepspeed"), reason="needs deepspeed")
def test_deepspeed_goes_on_with_another_number_of_ranks(launcher: Launcher, tmp_path: Path) -> None:
    program, run = DEEPSPEED_ON_CPU + programs_of("deepspeed")["train.py"], tmp_path / "run"
    two = losses(launcher.run(program, run))
    assert list(two) == list(range(1, STEPS + 1))
    three = losses(launcher.run(program, run, ranks=3))
    assert three == pytest.approx({step: loss for step, loss in two.items() if step > SAVED}, rel=1e-5)


@pytest.mark.soak
@pytest.mark.skipif(not there("ray", "pandas", "pyarrow"), reason="needs ray, pandas and pyarrow")
def test_ray_train_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(programs_of("ray-train")["train.py"])
    command = [sys.executable, "-W", "ignore", "train.py", "run", str(STEPS)]
    found = []
    for _ in range(2):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=130, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(losses_in(done.stdout + done.stderr))
    assert list(found[0]) == list(range(1, STEPS + 1))
    assert found[1] == {step: loss for step, loss in found[0].items() if step > SAVED}


@trainers
@pytest.mark.soak
def test_accelerate_goes_on_with_more_ranks(launcher: Launcher, tmp_path: Path) -> None:
    """And its weights are merged."""
    import torch
    from safetensors.torch import load_file

    run, program = (
        tmp_path / "run",
        changed(programs_of("accelerate")["train.py"], "Dropout(0.1)", "Dropout(0.0)"),
    )
    two = losses(launcher.run(program, run))
    assert not any(launcher.run(MERGE, run, ranks=1).codes)
    with holdfast.open(run / "pytorch_model_fsdp_0") as checkpoint:
        saved = checkpoint.read("model")
    merged = load_file(run / "merged" / "model.safetensors")
    assert merged.keys() == saved.keys()
    assert all(torch.equal(merged[name], saved[name]) for name in saved)
    four = losses(launcher.run(program, run, ranks=4))
    assert four == pytest.approx({step: loss for step, loss in two.items() if step > SAVED}, rel=1e-5)
