"""The complete programs of the recipes: two ranks run each, and a run that goes on from its checkpoint has the
losses of the one that was not interrupted, bit for bit. Then the bad days of some of them."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast._format.names import INDEX
from tests.support.programs import SAVED, STEPS, Launcher, changed, losses, programs_of

NEEDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("accelerate", "train.py"): ("accelerate", "transformers"),
    ("ddp", "train.py"): ("torchdata",),
    ("fsdp2", "train.py"): (),
    ("lightning", "train.py"): ("lightning", "torchdata"),
    ("lightning", "fabric.py"): ("lightning", "torchdata"),
}
"""The packages of each page's programs; that of transformers has a test of its own."""


def there(*packages: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in packages)


trainers = pytest.mark.skipif(
    not there("accelerate", "transformers"), reason="needs accelerate and transformers"
)
LINE = "holdfast.install()"
HASTY = "holdfast.install(job=holdfast.Job(timeout=30, stall_timeout=3))"
DYING = """
class Dying(Trainer):
    def _save_optimizer_and_scheduler(self, output_dir):
        if self.state.global_step == steps and self.args.process_index == 1:
            os._exit(9)
        super()._save_optimizer_and_scheduler(output_dir)


trainer = Dying("""
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


@pytest.mark.parametrize(("page", "file"), NEEDS)
def test_a_run_that_goes_on_has_the_same_losses(
    page: str, file: str, launcher: Launcher, tmp_path: Path
) -> None:
    if not there(*NEEDS[page, file]):
        pytest.skip(f"needs {' and '.join(NEEDS[page, file])}")
    program, run = programs_of(page)[file], tmp_path / "run"
    whole = losses(launcher.run(program, run))
    assert list(whole) == list(range(1, STEPS + 1))
    for last in run.glob(f"*{STEPS}"):  # as if it had been killed before that save
        shutil.rmtree(last)
    assert list(run.rglob(INDEX)), "nothing was saved by Holdfast"
    assert losses(launcher.run(program, run)) == {step: loss for step, loss in whole.items() if step > SAVED}


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


@trainers
@pytest.mark.soak
def test_a_save_on_the_main_process_alone_names_the_others(launcher: Launcher, tmp_path: Path) -> None:
    program = changed(programs_of("accelerate")["train.py"], LINE, HASTY)
    alone = "accelerator.is_main_process and accelerator.save_state(run)"
    ended = launcher.run(changed(program, "accelerator.save_state(run)", alone), tmp_path / "run")
    assert ended.codes[0] == 1
    assert ended.seconds < 30
    assert "rank 1" in ended.said
    assert "save_state" in ended.said


@pytest.mark.soak
def test_fsdp2_goes_on_with_more_ranks(launcher: Launcher, tmp_path: Path) -> None:
    program, run = programs_of("fsdp2")["train.py"], tmp_path / "run"
    two, four = losses(launcher.run(program, run)), losses(launcher.run(program, run, ranks=4))
    assert four == pytest.approx({step: loss for step, loss in two.items() if step > SAVED}, rel=1e-5)


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
