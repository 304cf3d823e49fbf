"""The page on weights in an engine: its lists say what the tables and the tests have."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast._models.views.forms import FORMS
from tests.docs.pages import code, text
from tests.engines.models import LAYOUTS, SETTINGS
from tests.equality.test_engine import Recorded, on_rank

SENTENCE = "does not have the trainer's weights: different: 1 tensor;.*o_proj.weight' on one or more of ranks"
NAMES = {
    "nemo-rl/nemo_rl/models/generation/vllm/vllm_backend.py": {
        "VllmInternalWorkerExtension.update_weights_via_ipc_zmq",
        "VllmInternalWorkerExtension.update_weights_from_collective",
    },
    "nemo-rl/nemo_rl/algorithms/grpo.py": {"refit_policy_generation"},
    "nemo-rl/nemo_rl/distributed/worker_groups.py": {"RayWorkerGroup.workers"},
    "slime/slime/backends/megatron_utils/update_weight/update_weight_from_distributed.py": {
        "UpdateWeightFromDistributed.update_weights"
    },
    "slime/slime/backends/sglang_utils/sglang_engine.py": {"SGLangEngine.check_weights"},
}
"""What recipes name in NeMo RL 0.7.0 and slime 0.3.1, as it was read."""


def rows(mark: str) -> list[list[str]]:
    part = text("docs/engine.md").partition(f"<!-- {mark} -->\n")[2].partition("<!-- end -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()[2:]]


def test_the_forms_are_those_of_the_source() -> None:
    told = {name: " ".join((form.__doc__ or "").split()) for name, form in FORMS.items()}
    assert {name.strip("`"): about for name, about in rows("forms")} == told


def test_ms_swift_has_the_functions_that_the_page_names() -> None:
    """Its source only: its imports need vLLM."""
    found = importlib.util.find_spec("swift")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs ms-swift")
    source = (Path(found.submodule_search_locations[0]) / "rlhf_trainers/rollout_mixin.py").read_text()
    mixin = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "RolloutTrainerMixin"
    )
    move = next(
        node
        for node in mixin.body
        if isinstance(node, ast.FunctionDef) and node.name == "_move_full_model_to_vllm"
    )
    assert {"self.engine.inner_model", "self.accelerator.device"} <= {
        ast.unparse(node) for node in ast.walk(move)
    }


@pytest.mark.parametrize("file", NAMES)
def test_copies_of_frameworks_have_the_names_that_the_page_has(file: str) -> None:
    """In the folder of copies that `make strangers` takes."""
    path = Path(os.environ.get("COPIES", "copies")) / file
    if not path.exists():
        pytest.skip("needs a copy of its source")
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)
            }
    assert NAMES[file] <= found


class Told:
    """A recipe, whose trainer and engine are recorded: what the two tell each other is real."""

    def __init__(self, recipe: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.recorded, self.patch = Recorded("llama"), patch
        self.healthy = self.recorded.fingerprint()
        wrong = "model.layers.1.self_attn.o_proj.weight"
        self.stale = self.recorded.fingerprint(
            on_rank(3, lambda model: model.get_parameter(wrong).data.mul_(2))
        )
        self.asked: list[dict[str, Any]] = []
        patch.setattr(holdfast.engine, "fingerprint", self.engine)
        patch.setattr(torch.distributed, "get_rank", lambda: 0)
        patch.setitem(vars(holdfast), "megatron", SimpleNamespace(fingerprint=self.trainer))
        (page,) = (block for _, block in code(text("docs/engine.md")) if block.startswith(f"# {recipe}.py"))
        self.space: dict[str, Any] = {"__name__": recipe}
        exec(compile(page, recipe, "exec"), self.space)
        self.space["TRAINER"] = folder / "trainer"
        self.module("ray", get=list)
        self.module("megatron.core.utils", unwrap_model=lambda model: model)

    def module(self, name: str, **content: Any) -> None:
        """Stand in for a module."""
        for part in [name[:place] for place, sign in enumerate(name) if sign == "."] + [name]:
            self.patch.setitem(sys.modules, part, ModuleType(part))
        vars(sys.modules[name]).update(content)

    def trainer(self, state: Any, published: object) -> Any:
        assert (state, published) == ("state", "folder")
        return holdfast.fingerprint(self.recorded.tensors)

    def engine(self, model: Any, **more: Any) -> Any:
        self.asked.append(more)
        return {"healthy": self.healthy, "stale": self.stale}[model]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Told]:
    return lambda recipe: Told(recipe, tmp_path, monkeypatch)


class Remote(SimpleNamespace):
    """A method of an actor, which is called at once."""

    def __init__(self, method: Callable[..., Any]) -> None:
        super().__init__(remote=method)


MODEL = SimpleNamespace(sharded_state_dict=lambda: "state")


@pytest.mark.parametrize("way", ["update_weights_via_ipc_zmq", "update_weights_from_collective"])
def test_nemo_rls_rollout_stops_at_other_weights(told: Callable[[str], Told], way: str) -> None:
    recipe = told("nemo_check")

    class Worker:
        arrived = True

        def update_weights_via_ipc_zmq(self) -> bool:
            return self.arrived

        def update_weights_from_collective(self) -> bool:
            return self.arrived

    backend = "nemo_rl.models.generation.vllm.vllm_backend"
    recipe.module(backend, VllmInternalWorkerExtension=Worker)
    recipe.space["install"]()
    vllm: Any = Worker()
    grpo = SimpleNamespace(refit_policy_generation=lambda policy, generation: getattr(generation, way)())
    recipe.space["check"](grpo, "folder")
    policy = SimpleNamespace(model=MODEL)
    policy.__ray_call__ = Remote(lambda function, *args: function(policy, *args))
    policies = SimpleNamespace(worker_group=SimpleNamespace(workers=[policy]))
    vllm.model_runner = SimpleNamespace(model="healthy")
    grpo.refit_policy_generation(policies, vllm)
    assert recipe.asked == [{}]
    vllm.model_runner.model = "stale"
    with pytest.raises(RuntimeError, match=SENTENCE):
        grpo.refit_policy_generation(policies, vllm)
    Worker.arrived = False
    assert getattr(vllm, way)() is False


def test_slimes_rollout_stops_at_other_weights(told: Callable[[str], Told]) -> None:
    recipe, sent = told("slime_check"), []

    class Sender:
        def update_weights(self) -> None:
            sent.append(self)

    class Checker:
        def handle(self, action: str, allow_quant_error: bool = False) -> object:
            return action, allow_quant_error

    there = "slime.backends.megatron_utils.update_weight"
    recipe.module(f"{there}.update_weight_from_distributed", UpdateWeightFromDistributed=Sender)
    vars(sys.modules[there])["update_weight_from_distributed"] = sys.modules[
        f"{there}.update_weight_from_distributed"
    ]
    recipe.module("sglang.srt.utils.weight_checker", WeightChecker=Checker)
    recipe.space["install"]()
    recipe.space["init"](SimpleNamespace(hf_checkpoint="folder"))
    checker: Any = Checker()
    assert checker.handle("compare", True) == ("compare", True)
    sender: Any = Sender()
    sender.model, sender.rollout_engines = [MODEL], [SimpleNamespace(check_weights=Remote(checker.handle))]
    checker._model_runner = SimpleNamespace(model="healthy", tp_rank=1, tp_size=2)
    sender.update_weights()
    assert sent == [sender]
    assert recipe.asked == [{"tp": (1, 2)}]
    checker._model_runner.model = "stale"
    with pytest.raises(RuntimeError, match=SENTENCE):
        sender.update_weights()


def test_the_models_are_those_that_are_run() -> None:
    assert [row[0].split("`")[1] for row in rows("engines")] == sorted(SETTINGS)
    for kind, _, *layouts in rows("engines"):
        assert [cell.startswith("yes") for cell in layouts] == [
            not experts or "expert" in str(SETTINGS[kind.split("`")[1]]) for _, experts in LAYOUTS.values()
        ]
