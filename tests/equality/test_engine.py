"""Fingerprints of an engine's parameters, as vLLM's own loader has filled them: recorded by
`tests/engines/record.py`, with what vLLM's modules say of themselves. No vLLM here."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast._models.equality.parts import EngineFingerprint
from holdfast.errors import BadInput, CoverageError, RankFailed, ReplicaMismatch
from holdfast.huggingface import families
from tests.engines.faults import FAULTS
from tests.support.threads import on_ranks
from tests.support.wide import wide

RECORDED = Path(__file__).parent / "engine"
KINDS = sorted({path.name.rpartition("-")[0] for path in RECORDED.glob("*.npz")})


class Recorded:
    """A published model of random numbers, and the engine's models of all ranks with them."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.files = []
        for path in sorted(RECORDED.glob(f"{kind}-*.npz")):
            with np.load(path) as file:  # here, not on threads of ranks: Python 3.11 parses on one at a time
                self.files.append({name: file[name] for name in file.files})
        self.about = [json.loads(str(file["about"])) for file in self.files]
        shapes = self.about[0]["published"]
        many = sum(int(np.prod(shape)) for shape in shapes.values())
        random = torch.randn(many + 1, generator=torch.Generator().manual_seed(1))
        self.values = random.to(dtype)
        self.values[0] = 0  # padding
        self.tensors, first = {}, 1
        for name, shape in shapes.items():
            count = int(np.prod(shape))
            self.tensors[name] = self.values[first : first + count].view(shape)
            first += count

    @property
    def ranks(self) -> int:
        return len(self.files)

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.about[0]["config"]
        return config

    def publish(self, folder: Path, **more: torch.Tensor) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: tensor.contiguous() for name, tensor in (self.tensors | more).items()}
        save_file(tensors, folder / "model.safetensors")
        return folder

    def model(self, rank: int) -> torch.nn.Module:
        """Return the engine's model on a rank."""
        about, model = self.about[rank], torch.nn.Module()
        model.config = SimpleNamespace(to_dict=lambda: self.config)
        for name, shape in about["shapes"].items():
            numbers = torch.from_numpy(np.cumsum(self.files[rank][name], dtype=np.int64)).view(shape)
            module, _, leaf = name.rpartition(".")
            parameter = torch.nn.Parameter(self.values[numbers], requires_grad=False)
            _module(model, module).register_parameter(leaf, parameter)
        for name, said in about["modules"].items():
            _describe(_module(model, name), said)
        return model

    def fingerprint(
        self, change: Callable[[int, torch.nn.Module], object] = lambda rank, model: None
    ) -> dict[str, EngineFingerprint]:
        """Return what all ranks find. change: called with each model before."""

        def job(roster: Any) -> Any:
            model = self.model(roster.rank)
            change(roster.rank, model)
            tp = roster.rank, self.ranks
            return holdfast.engine.fingerprint(model, tp=tp, job=holdfast.Job(roster=roster, timeout=60))

        told = on_ranks(self.ranks, job)
        assert all(one == told[0] for one in told)
        found: dict[str, EngineFingerprint] = told[0]
        return found


def _module(model: torch.nn.Module, name: str) -> torch.nn.Module:
    for part in filter(None, name.split(".")):
        if part not in model._modules:
            model.add_module(part, torch.nn.Module())
        model = model.get_submodule(part)
    return model


def _describe(module: torch.nn.Module, said: dict[str, Any]) -> None:
    for name, value in said.items():
        if isinstance(value, int) or name == "output_sizes":
            setattr(module, name, value)
    if "vocabulary" in said:
        start, end = said["vocabulary"]
        module.shard_indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
    if "method" in said:
        backend = SimpleNamespace(name=said["backend"]) if said["backend"] else None
        method = type(said["method"], (), {})()
        method.unquantized_backend, method.moe_kernel = backend, None
        module.quant_method = method
    if "experts" in said:
        rank, size, balanced = said["experts"]
        parallel = SimpleNamespace(tp_rank=rank, tp_size=size, enable_eplb=balanced)
        module.moe_config = SimpleNamespace(moe_parallel_config=parallel)
    if "expert_map" in said:
        module.register_buffer("_expert_map", torch.tensor(said["expert_map"]), persistent=False)


def on_rank(
    wanted: int, change: Callable[[torch.nn.Module], object]
) -> Callable[[int, torch.nn.Module], object]:
    return lambda rank, model: change(model) if rank == wanted else None


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_has_the_fingerprints_of_its_published_model(kind: str, tmp_path: Path) -> None:
    recorded = Recorded(kind)
    found = recorded.fingerprint()
    trainer = holdfast.fingerprint(recorded.tensors)
    assert {name: one.value for name, one in found.items()} == {
        name: one.value for name, one in trainer.items()
    }
    assert holdfast.same(trainer, found).same
    sent = json.loads(msgspec.json.encode(found))
    assert holdfast.same(trainer, sent).same
    verdict = holdfast.same(recorded.publish(tmp_path / "model"), sent)
    assert verdict.same
    assert verdict.equal == len(recorded.tensors)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_are_found_under_the_names_that_they_have_in_vllm_0_20(kind: str, tmp_path: Path) -> None:
    def older(rank: int, model: torch.nn.Module) -> None:
        for name, module in list(model.named_modules()):
            if name.endswith(".mlp.experts"):
                model.get_submodule(name.rpartition(".")[0]).experts = module.routed_experts

    recorded = Recorded(kind)
    verdict = holdfast.same(recorded.publish(tmp_path / "model"), recorded.fingerprint(older))
    assert verdict.same
    assert verdict.equal == len(recorded.tensors)


@pytest.mark.parametrize(
    ("kind", "place"),
    # The first rank, a middle one and the last.
    wide(
        ((kind, place) for kind in KINDS for place in (0, 1, -1)),
        suite=[("qwen3_moe", 0), ("qwen3_moe", -1), ("gpt_oss", -1), ("deepseek_v3", -1)],
    ),
)
def test_each_fault_is_found_with_its_rank(kind: str, place: int, tmp_path: Path) -> None:
    recorded = Recorded(kind)
    victim = place % recorded.ranks

    def job(roster: Any) -> Any:
        model, told = recorded.model(roster.rank), {}
        parameters = dict(model.named_parameters())
        loaded = {name: parameter.clone() for name, parameter in parameters.items()}
        for fault in FAULTS:
            name = fault.find(parameters)
            if name is None:
                continue
            if roster.rank == victim:
                fault.change(parameters[name].data)
            tp = roster.rank, recorded.ranks
            told[fault.name] = holdfast.engine.fingerprint(
                model, tp=tp, job=holdfast.Job(roster=roster, timeout=120)
            )
            parameters[name].data.copy_(loaded[name])
        return told

    folder, trainer = recorded.publish(tmp_path / "model"), holdfast.fingerprint(recorded.tensors)
    told = on_ranks(recorded.ranks, job)[0]
    assert len(told) > 5
    for fault, found in told.items():
        verdict = holdfast.same(found, folder)
        assert not verdict.same, fault
        assert not verdict.only_a, fault
        assert not verdict.only_b, fault
        assert {(one.ranks, one.surely) for one in verdict.different} == {((victim,), True)}, fault
        # By the fingerprints of whole tensors alone, the rank is known where copies differ.
        by_whole = holdfast.same(trainer, found)
        assert {one.name for one in by_whole.different} == {one.name for one in verdict.different}, fault
        for one in by_whole.different:
            assert victim in one.ranks, fault
            assert one.ranks == (victim,) or not one.surely, fault
    assert str(verdict).rpartition("; ")[2].endswith(f" on rank {victim}")


def test_a_copy_that_differs_is_told_also_where_no_copy_is_right(tmp_path: Path) -> None:
    recorded = Recorded("qwen3_moe")
    name = "model.layers.0.mlp.gate.weight"
    found = recorded.fingerprint(lambda rank, model: model.get_parameter(name).data.mul_(2 + rank))
    assert found[name].value == ""
    for right in (recorded.publish(tmp_path / "model"), holdfast.fingerprint(recorded.tensors)):
        (one,) = holdfast.same(found, right).different
        assert (one.name, one.ranks, one.surely) == (name, (0, 1, 2, 3), True)
        assert holdfast.same(json.loads(msgspec.json.encode(found)), right).different == (one,)
    # Two engines with the same copies in disagreement are not the same.
    assert not holdfast.same(found, found).same


def test_a_layer_that_no_rank_has_is_told(tmp_path: Path) -> None:
    recorded = Recorded("llama")
    found = recorded.fingerprint(lambda rank, model: model.get_submodule("model.layers")._modules.pop("1"))
    verdict = holdfast.same(found, recorded.publish(tmp_path / "model"))
    assert not verdict.same
    assert len(verdict.only_b) == 9
    with pytest.raises(CoverageError, match=r"do not hold .model\.layers\.1"):
        recorded.fingerprint(on_rank(2, lambda model: model.get_submodule("model.layers")._modules.pop("1")))


def test_layers_that_predict_further_tokens_are_told_apart(tmp_path: Path) -> None:
    recorded = Recorded("glm4_moe")
    more = {
        "model.layers.2.enorm.weight": torch.ones(64),
        "model.layers.2.embed_tokens.weight": torch.ones(100, 64),
    }
    verdict = holdfast.same(recorded.fingerprint(), recorded.publish(tmp_path / "model", **more))
    assert verdict.same
    assert verdict.not_in_engine == tuple(sorted(more))
    assert str(verdict).endswith("not in the engine, and not compared: 2 tensors")
    other = {"model.layers.1.other.weight": torch.ones(3)}
    assert holdfast.same(
        recorded.fingerprint(), recorded.publish(tmp_path / "other", **other)
    ).only_b == tuple(other)


def test_a_trainer_with_more_exact_elements_is_rounded() -> None:
    exact, engine = Recorded("qwen3_moe", torch.float32), Recorded("qwen3_moe")
    verdict = holdfast.same(holdfast.fingerprint(exact.tensors), engine.fingerprint())
    assert verdict.same
    assert set(verdict.rounded) == set(exact.tensors)
    name = "model.layers.0.self_attn.k_proj.weight"

    def change(model: torch.nn.Module) -> None:
        model.get_parameter("model.layers.0.self_attn.qkv_proj.weight").data[-40] *= 2

    (one,) = holdfast.same(
        holdfast.fingerprint(exact.tensors), engine.fingerprint(on_rank(3, change))
    ).different
    assert (one.name, one.ranks, one.surely) == (name, (3,), True)


# -- what is not as it was loaded --------------------------------------------------------------------------


def refused(change: Callable[[torch.nn.Module], object], kind: str = "qwen3_moe") -> str:
    with pytest.raises((BadInput, RankFailed)) as error:
        Recorded(kind).fingerprint(on_rank(1, change))
    return str(error.value)


def test_parameters_in_no_table_are_an_error_by_pattern() -> None:
    def add(model: torch.nn.Module) -> None:
        for layer in (0, 1):
            attention = model.get_submodule(f"model.layers.{layer}.self_attn")
            attention.register_parameter("extra", torch.nn.Parameter(torch.ones(2)))

    text = refused(add)
    assert "2 parameters of the engine's model are in no table: 'model.layers.*.self_attn.extra' (2)." in text


QKV, EXPERTS = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.experts.routed_experts"


def empty(model: torch.nn.Module) -> None:
    model.get_parameter(f"{QKV}.weight").data = torch.empty(0)


def pack(model: torch.nn.Module) -> None:
    parameter = model.get_parameter(f"{EXPERTS}.w13_weight")
    parameter.data = parameter.data.reshape(8, 2, 8, -1)


def mark(model: torch.nn.Module) -> None:
    model.get_submodule(QKV).cpu_linear = torch.nn.functional.linear


def set_up_kernel(model: torch.nn.Module, backend: str = "FLASHINFER_CUTLASS") -> None:
    method = model.get_submodule(EXPERTS).quant_method
    method.moe_kernel, method.unquantized_backend = object(), SimpleNamespace(name=backend)


def change_rows(model: torch.nn.Module) -> None:
    parameter = model.get_parameter(f"{QKV}.weight")
    parameter.data = parameter.data[:-1]


@pytest.mark.parametrize(
    ("change", "name", "by"),
    [
        (empty, f"{QKV}.weight", "UnquantizedLinearMethod"),
        (pack, f"{EXPERTS}.w13_weight", "the backend CPU"),
        (mark, f"{QKV}.weight", "UnquantizedLinearMethod"),
        (set_up_kernel, f"{EXPERTS}.w13_weight", "the backend FLASHINFER_CUTLASS"),
        (change_rows, f"{QKV}.weight", "UnquantizedLinearMethod"),
    ],
)
def test_what_was_changed_after_loading_is_refused(
    change: Callable[[torch.nn.Module], object], name: str, by: str
) -> None:
    text = refused(change)
    assert f"'{name}', of shape [" in text
    assert f"is not as vLLM's loader fills it, or {by} may have changed it since" in text
    assert "after load_weights and before process_weights_after_loading" in text


def test_a_kernel_that_takes_experts_as_they_were_loaded_is_no_obstacle() -> None:
    recorded = Recorded("qwen3_moe")
    found = recorded.fingerprint(lambda rank, model: set_up_kernel(model, "TRITON"))
    assert holdfast.same(found, holdfast.fingerprint(recorded.tensors)).same


def test_quantized_parameters_and_moving_experts_are_refused() -> None:
    def quantize(model: torch.nn.Module) -> None:
        model.get_submodule(QKV).quant_method = type("Fp8LinearMethod", (), {})()

    def balance(model: torch.nn.Module) -> None:
        model.get_submodule(EXPERTS).moe_config.moe_parallel_config.enable_eplb = True

    def lose_scales(model: torch.nn.Module) -> None:
        parameter = model.get_parameter(f"{QKV}.weight")
        parameter.data = parameter.data.to(torch.float8_e4m3fn)

    assert f"The engine holds '{QKV}.weight' by Fp8LinearMethod" in refused(quantize)
    assert "are moved between ranks while the engine runs (enable_eplb)" in refused(balance)
    assert f"'{QKV}.weight', of shape" in refused(lose_scales)


def test_a_model_that_no_table_describes_is_refused() -> None:
    recorded = Recorded("llama")
    model, job = recorded.model(0), holdfast.Job(no_dist=True)
    with pytest.raises(BadInput, match="How vLLM holds a model of the type 'gemma' is in no table"):
        holdfast.engine.fingerprint(model, config={"model_type": "gemma"}, job=job)
    del model.config
    with pytest.raises(BadInput, match="has no config that says which model it is"):
        holdfast.engine.fingerprint(model, job=job)
    assert "gemma" in families()


def test_a_rank_that_vllm_does_not_tell_must_be_given() -> None:
    with pytest.raises(BadInput, match=r"give tp=\(rank, size\)"):
        holdfast.engine.fingerprint(Recorded("gpt_oss").model(0), job=holdfast.Job(no_dist=True))


# -- the trainer's side ------------------------------------------------------------------------------------


def test_a_trainer_has_the_engines_numbers_whatever_its_names(tmp_path: Path) -> None:
    recorded = Recorded("qwen3_moe")
    folder, found = recorded.publish(tmp_path / "model"), recorded.fingerprint()
    t = recorded.tensors
    # As megatron-core has them, filled by Holdfast's load, with a padded vocabulary.
    megatron = {
        "embedding.word_embeddings.weight": torch.zeros(128, 64, dtype=torch.bfloat16),
        "output_layer.weight": torch.zeros(128, 64, dtype=torch.bfloat16),
        "decoder.final_layernorm.weight": torch.zeros(64, dtype=torch.bfloat16),
    }
    shapes = {
        "self_attention.linear_qkv.weight": (256, 64),
        "self_attention.linear_qkv.layer_norm_weight": (64,),
        "self_attention.linear_proj.weight": (64, 128),
        "self_attention.q_layernorm.weight": (32,),
        "self_attention.k_layernorm.weight": (32,),
        "pre_mlp_layernorm.weight": (64,),
        "mlp.router.weight": (8, 64),
        "mlp.experts.experts.linear_fc1.weight": (8, 64, 64),
        "mlp.experts.experts.linear_fc2.weight": (8, 64, 32),
    }
    for layer in range(2):
        for name, shape in shapes.items():
            megatron[f"decoder.layers.{layer}.{name}"] = torch.zeros(shape, dtype=torch.bfloat16)
    holdfast.load(megatron, folder, strict=False)
    # As transformers 5 has them: all experts of a layer in one tensor.
    fused = {name: tensor for name, tensor in t.items() if ".experts." not in name}
    for layer in range(2):
        base = f"model.layers.{layer}.mlp.experts"
        gate_up = [
            torch.cat([t[f"{base}.{e}.{part}_proj.weight"] for part in ("gate", "up")]) for e in range(8)
        ]
        fused[f"{base}.gate_up_proj"] = torch.stack(gate_up)
        fused[f"{base}.down_proj"] = torch.stack([t[f"{base}.{e}.down_proj.weight"] for e in range(8)])
    for state in (megatron, fused, t):
        for published in (folder, recorded.config):
            assert holdfast.same(found, holdfast.fingerprint(state, published=published)).same
    megatron["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"][3] *= 2
    verdict = holdfast.same(found, holdfast.fingerprint(megatron, published=folder))
    assert [one.name for one in verdict.different] == [
        f"model.layers.1.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up")
    ]


def test_elements_that_are_computed_have_no_published_fingerprint() -> None:
    recorded = Recorded("qwen3_next")
    state = {"decoder.layers.0.self_attention.out_norm.weight": torch.zeros(16)}
    with pytest.raises(BadInput, match="it has no fingerprint under that name"):
        holdfast.fingerprint(state, published=recorded.config)
    with pytest.raises(BadInput, match=r"There is no .*config\.json"):
        holdfast.fingerprint(state, published=RECORDED)


def test_an_engine_and_a_trainer_are_told_apart() -> None:
    recorded = Recorded("qwen3_moe")
    trainer = holdfast.fingerprint(recorded.tensors, published=recorded.config)
    engine = {name: EngineFingerprint(one.dtype, one.shape, one.value) for name, one in trainer.items()}
    engine.pop("model.norm.weight")
    texts = [str(holdfast.same(*sides)) for sides in ((engine, trainer), (trainer, engine))]
    assert "only in the engine: 0; only in the live state: 1" in texts[0]
    assert "only in the live state: 1; only in the engine: 0" in texts[1]


def test_a_configuration_that_is_no_dict_is_refused() -> None:
    recorded = Recorded("llama")
    with pytest.raises(BadInput, match=r"config= is of type str.* content of the model's config.json"):
        holdfast.engine.fingerprint(recorded.model(0), config="llama", tp=(0, 1))  # type: ignore[arg-type]
    config = SimpleNamespace(to_dict=lambda: recorded.config)  # as transformers' are
    with pytest.raises(BadInput, match=r"published= is of type SimpleNamespace.* to_dict"):
        holdfast.fingerprint(recorded.tensors, published=config)  # type: ignore[arg-type]


def test_an_output_that_differs_from_its_embedding_is_told() -> None:
    recorded = Recorded("llama")
    tied = {**recorded.config, "tie_word_embeddings": True}
    state = {**recorded.tensors, "lm_head.weight": recorded.tensors["model.embed_tokens.weight"].clone()}
    assert "lm_head.weight" not in holdfast.fingerprint(state, published=tied)
    state["lm_head.weight"][3, 1] += 1
    with pytest.raises(ReplicaMismatch, match=r"Rank 0 holds 'model\.embed_tokens\.weight' twice") as error:
        holdfast.fingerprint(state, published=tied)
    assert "tie_word_embeddings set to false" in error.value.hint
    assert "lm_head.weight" in holdfast.fingerprint(state, published={**tied, "tie_word_embeddings": False})


def test_the_part_of_a_state_that_is_the_model_gets_published_names() -> None:
    recorded = Recorded("qwen3_moe")
    take = partial(holdfast.fingerprint, published=recorded.config)
    alone = take(recorded.tensors)
    optim = {"state": {name: {"exp_avg": tensor} for name, tensor in recorded.tensors.items()}}
    assert take({"model": recorded.tensors, "optim": optim}) == alone
    assert take({"all": {"model": recorded.tensors}}) == alone
    both = {"model": recorded.tensors, "average": recorded.tensors}
    with pytest.raises(BadInput, match="several models whose names fit: 'average', 'model'"):
        take(both)
    assert take(both, include=["average"]) == alone
    with pytest.raises(BadInput, match="No weight of the state has a name of the family 'qwen3_moe'"):
        take({"model": {"weight": torch.ones(3)}})
