"""Adapters in and out, merged and not, against PEFT's own merge and PEFT's own names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import holdfast
import tests.frameworks.megatron.preload  # noqa: F401 (imports megatron-core without its warnings)
from holdfast._tools.cli import cli
from holdfast.errors import BadInput, HoldfastError, MissingTensors
from holdfast.huggingface import export, export_adapter, import_, merged
from tests.frameworks.huggingface import jobs
from tests.frameworks.huggingface.adapters import (
    EXPERTS,
    LINEAR,
    base_model,
    merge_by_peft,
    wrapped,
    write_adapter,
)
from tests.frameworks.huggingface.models import TINY, edit_config, publish, weights
from tests.frameworks.megatron.models import Layout
from tests.support.processes import ProcessWorld
from tests.support.third_parties import needs

pytest.importorskip("transformers")
pytestmark = [needs("peft"), pytest.mark.filterwarnings("ignore::UserWarning")]
ALONE = holdfast.Job(no_dist=True)
Q = "model.layers.0.self_attn.q_proj.weight"
BY_RANK = {
    "use_rslora": True,
    "rank_pattern": {"q_proj": 2, "layers.1.self_attn.k_proj": 3},
    "alpha_pattern": {"v_proj": 5},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {"target_modules": LINEAR, "lora_alpha": 7}),
    "ranks by pattern": ("qwen3", {"target_modules": LINEAR, **BY_RANK}),
    "DoRA and biases": ("qwen2", {"target_modules": ["q_proj", "o_proj"], "use_dora": True, "bias": "all"}),
    "biases of LoRA": ("qwen2", {"target_modules": ["q_proj"], "lora_bias": True}),
    "embedding and output": (
        "llama",
        {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "experts": ("qwen3_moe", {"target_modules": ["q_proj"], **EXPERTS, "modules_to_save": ["gate"]}),
    "experts of Mixtral": ("mixtral", {"target_modules": ["q_proj", "v_proj"], **EXPERTS}),
}
Folders = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Makes the base model and the adapter of a case, each once."""
    home = tmp_path_factory.mktemp("adapters")

    def make(case: str) -> tuple[Path, Path]:
        kind, settings = CASES[case]
        base, adapter = home / kind, home / case.replace(" ", "-")
        if not base.exists():
            publish(TINY[kind], base)
        if not adapter.exists():
            write_adapter(base, adapter, **settings)
        return base, adapter

    return make


def unlike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [key for key, value in one.items() if not torch.equal(value, other[key])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_merged_bits_are_pefts(case: str, dtype: torch.dtype, folders: Folders) -> None:
    base, adapter = folders(case)
    before = base_model(base, dtype).state_dict()
    ours = {key: torch.full_like(value, 7) for key, value in before.items()}
    report = holdfast.load(ours, merged(base, adapter), cast=True, job=ALONE)
    right = merge_by_peft(base_model(base, dtype), adapter).state_dict()
    assert unlike(ours, right) == []
    assert report.unasked == ()
    assert len(unlike(ours, before)) >= 4  # a merge that does nothing would pass, too


@pytest.mark.parametrize("case", [pytest.param("dense", marks=pytest.mark.soak), "experts"])
def test_every_layout_has_the_merged_bits(
    case: str, folders: Folders, mcore_world: ProcessWorld, tmp_path: Path
) -> None:
    """In megatron-core's fused tensors, cut over eight ranks."""
    base, adapter = folders(case)
    layout = Layout(tp=2, pp=2, ep=2) if case == "experts" else Layout(tp=4, pp=2)
    once, run, kind = tmp_path / "once", tmp_path / "step", CASES[case][0]
    merge_by_peft(base_model(base), adapter).save_pretrained(once)
    mcore_world.run(jobs.load_and_save, kind, str(base), layout, str(run), True, str(adapter), timeout=120)
    assert holdfast.same(run, once).same
    assert holdfast.same(run, merged(base, adapter)).same
    report = export(run, tmp_path / "out", like=base)
    assert report.missing == ()
    assert unlike(weights(tmp_path / "out"), weights(once)) == []
    again = holdfast.same(run, merged(once, adapter))
    assert not again.same
    assert f"{run} holds the base model without the adapter" in again.merge


def test_a_part_has_the_bits_of_the_whole(tmp_path: Path) -> None:
    """A product is computed in tiles; a matrix product of another cut would round otherwise."""
    rows, columns, rank = 300, 2100, 8
    torch.manual_seed(2)
    base, a, b = torch.randn(rows, columns), torch.randn(rank, columns), torch.randn(rows, rank)
    magnitude = torch.rand(rows) + 1
    (tmp_path / "base").mkdir()
    save_file({"w.weight": base}, tmp_path / "base" / "model.safetensors")
    for name, more in (("lora", {}), ("dora", {"use_dora": True})):
        folder = tmp_path / name
        folder.mkdir()
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 12, **more}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        tensors = {"base_model.model.w.lora_A.weight": a, "base_model.model.w.lora_B.weight": b}
        if more:
            tensors["base_model.model.w.lora_magnitude_vector"] = magnitude
        save_file(tensors, folder / "adapter_model.safetensors")
        right = base + (b @ a) * 1.5
        if more:
            right = (magnitude / torch.linalg.norm(right, dim=1)).view(-1, 1) * right
        for low, high, left, end in (
            (0, 300, 0, 2100),
            (7, 8, 0, 2100),
            (100, 299, 1000, 1101),
            (1, 300, 9, 10),
        ):
            local = torch.zeros(high - low, end - left)
            shard = holdfast.Shard(local, (rows, columns), (low, left))
            holdfast.load({"w.weight": shard}, merged(tmp_path / "base", folder), job=ALONE)
            assert torch.equal(local, right[low:high, left:end]), (name, low, high, left, end)


@pytest.mark.parametrize("case", ["DoRA and biases", "embedding and output", "experts"])
def test_a_model_that_peft_has_wrapped_is_filled_and_not_merged(case: str, folders: Folders) -> None:
    base, adapter = folders(case)
    model = wrapped(base, adapter)
    right = {key: value.clone() for key, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data.fill_(7)
    report = holdfast.load(model.state_dict(), merged(base, adapter), job=ALONE)
    assert unlike(model.state_dict(), right) == []
    assert report.unasked == ()
    some = {key: value for key, value in model.state_dict().items() if "q_proj" not in key}
    report = holdfast.load(some, merged(base, adapter), job=ALONE)
    assert f"base_model.model.{Q}".replace("weight", "lora_A.weight") in report.unasked


@pytest.mark.wide
def test_same_tells_what_became_of_a_merge(folders: Folders, tmp_path: Path) -> None:
    base, adapter = folders("dense")
    for dtype in (torch.float32, torch.bfloat16):
        places = {name: tmp_path / f"{name}-{dtype}" for name in ("none", "once", "twice", "partly")}
        model = base_model(base, dtype)
        model.save_pretrained(places["none"])
        model = merge_by_peft(model, adapter)
        model.save_pretrained(places["once"])
        partly = base_model(places["once"], dtype)
        partly.load_state_dict({Q: base_model(base, dtype).state_dict()[Q]}, strict=False)
        partly.save_pretrained(places["partly"])
        merge_by_peft(model, adapter).save_pretrained(places["twice"])
        told = {
            name: [holdfast.same(*pair) for pair in ((place, other), (other, place))]
            for other in [merged(base, adapter)]
            for name, place in places.items()
        }
        assert all(one.same and one.merge == "" for one in told["once"])
        all_of_it = "(28 of the 28 tensors that the adapter is for)"
        for name, words in (
            ("none", f"holds the base model without the adapter {all_of_it}"),
            ("twice", f"holds the adapter twice {all_of_it}"),
            (
                "partly",
                "holds the base model without the adapter (1 of the 28 tensors that the adapter is for)",
            ),
        ):
            assert [one.merge for one in told[name]] == [f"{places[name]} {words}"] * 2
            assert words in str(told[name][0])
        state = base_model(places["twice"], dtype).state_dict()
        live = holdfast.same(holdfast.fingerprint(state, job=ALONE), merged(base, adapter))
        assert live.merge == f"the live state holds the adapter twice {all_of_it}"
        # One element more, and nothing is proven of that tensor.
        state[Q][1, 2] += 1
        holdfast.save(state, tmp_path / f"spoiled-{dtype}", job=ALONE)
        spoiled = holdfast.same(tmp_path / f"spoiled-{dtype}", merged(base, adapter), where=True)
        assert "(27 of the 28 tensors" in spoiled.merge
        assert [one.adapter for one in spoiled.different if one.name == Q] == [""]


def test_a_second_merge_of_dora_is_not_claimed(folders: Folders, tmp_path: Path) -> None:
    base, adapter = folders("DoRA and biases")
    merge_by_peft(merge_by_peft(base_model(base), adapter), adapter).save_pretrained(tmp_path / "twice")
    told = holdfast.same(tmp_path / "twice", merged(base, adapter))
    assert not told.same
    assert told.merge == ""


def test_commands_import_compare_and_export(folders: Folders, tmp_path: Path) -> None:
    base, adapter = folders("experts")
    step, out = tmp_path / "step", tmp_path / "out"

    def run(*words: object) -> tuple[int, str]:
        result = CliRunner().invoke(cli, [*map(str, words)])
        return result.exit_code, result.output

    assert run("import", "hf", base, step, "--adapter", adapter, "--fingerprint")[0] == 0
    assert run("same", step, base, "--adapter", adapter)[0] == 0
    code, said = run("same", base, base, "--adapter", adapter)
    assert code == 1
    assert f"{base} holds the base model without the adapter" in said
    assert run("export", "hf", step, out, "--like", base)[0] == 0
    merge_by_peft(base_model(base), adapter).save_pretrained(tmp_path / "right")
    assert unlike(weights(out), weights(tmp_path / "right")) == []
    # The same elements from an import of the base model, without a second merge of fingerprints.
    import_(
        base, tmp_path / "base", job=holdfast.Job(no_dist=True, options=holdfast.Options(fingerprint=True))
    )
    assert holdfast.same(step, merged(tmp_path / "base", adapter)).same
    # Another adapter with the same header is another import.
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    tensors = load_file(other / "adapter_model.safetensors")
    save_file({key: value * 2 for key, value in tensors.items()}, other / "adapter_model.safetensors")
    with pytest.raises(BadInput, match="holds a checkpoint already"):
        import_(merged(base, other), step, job=ALONE)
    assert run("import", "zero", base, step, "--adapter", adapter)[0] == 2


@pytest.mark.wide
def test_an_adapter_is_exported_from_a_checkpoint_of_sharded_ranks(folders: Folders, tmp_path: Path) -> None:
    base, adapter = folders("dense")
    with ProcessWorld(2) as world:
        wrong = world.run(
            jobs.save_sharded_adapter, str(base), str(adapter), str(tmp_path / "step"), timeout=120
        )
    assert wrong == [[], []]
    out = tmp_path / "out"
    words = ["export", "adapter", str(tmp_path / "step"), str(out), "--like", str(adapter)]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, out))
    assert unlike(after, {key: value * 2 for key, value in before.items()}) == []
    right = merge_by_peft(base_model(base), out).state_dict()
    ours = {key: torch.zeros_like(value) for key, value in right.items()}
    holdfast.load(ours, merged(base, out), job=ALONE)
    assert unlike(ours, right) == []


@pytest.mark.parametrize("case", ["DoRA and biases", "embedding and output", "experts"])
def test_an_exported_adapter_is_what_peft_writes(case: str, folders: Folders, tmp_path: Path) -> None:
    base, adapter = folders(case)
    state = {"model": wrapped(base, adapter).state_dict(), "optimizer": {"base_model.model.x": torch.ones(2)}}
    holdfast.save(state, tmp_path / "step", job=ALONE)
    export_adapter(tmp_path / "step", tmp_path / "out", like=adapter)
    before, after = (
        load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "out")
    )
    # PEFT also saves the base model's embedding beside an adapter of it.
    copied = {key for key in before if key.endswith("embed_tokens.base_layer.weight")}
    assert unlike(after, {key: value for key, value in before.items() if key not in copied}) == []
    right, ours = (
        merge_by_peft(base_model(base), folder).state_dict() for folder in (adapter, tmp_path / "out")
    )
    assert unlike(ours, right) == []


def test_half_an_adapter_is_not_exported(folders: Folders, tmp_path: Path) -> None:
    base, adapter = folders("dense")
    state = wrapped(base, adapter).state_dict()
    gone = f"base_model.model.{Q}".replace("weight", "lora_B.default.weight")
    holdfast.save({key: value for key, value in state.items() if key != gone}, tmp_path / "half", job=ALONE)
    holdfast.save(
        {key: value for key, value in state.items() if "layers.0" not in key}, tmp_path / "less", job=ALONE
    )
    holdfast.save(base_model(base).state_dict(), tmp_path / "none", job=ALONE)
    other = tmp_path / "config"
    other.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    for source, like, error, words in (
        ("half", adapter, MissingTensors, "the adapter is not all there"),
        ("less", adapter, MissingTensors, "has nothing for 14 tensors"),
        ("none", adapter, BadInput, "holds no matrices of an adapter 'default'"),
        ("less", other, BadInput, "says that its rank is 5"),
    ):
        with pytest.raises(error, match=words):
            export_adapter(tmp_path / source, tmp_path / "out", like=like)
    assert not (tmp_path / "out").exists()


def set_config(**said: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, **said}))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return rewrite


def pickle_it(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


A = f"base_model.model.{Q}".replace("weight", "lora_A.weight")
B = A.replace("lora_A", "lora_B")
SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    **{
        method: (set_config(peft_type=method), f"is of {name}, which Holdfast does not read")
        for method, name in (
            ("LOHA", "LoHa"),
            ("LOKR", "LoKr"),
            ("ADALORA", "AdaLoRA"),
            ("VERA", "VeRA"),
            ("OFT", "OFT"),
            ("IA3", "IA3"),
            ("PROMPT_TUNING", "prompt tuning"),
            ("NEW_METHOD", "NEW_METHOD"),
        )
    },
    "PiSSA": (
        set_config(init_lora_weights="pissa_niter_4"),
        "the base model's weights were changed, too",
    ),
    "inputs along rows": (set_config(fan_in_fan_out=True), "says fan_in_fan_out"),
    "a variant": (set_config(use_qalora=True), "says use_qalora=True, a variant of LoRA"),
    "trained words": (set_config(trainable_token_indices=[1]), "says trainable_token_indices"),
    "another rank": (set_config(r=3), "says that their rank is 3"),
    "a bad pattern": (set_config(rank_pattern={"(": 3}), "invalid pattern"),
    "no rank": (set_config(r="many"), "r is 'many', which is no number above 0"),
    "DoRA without norms": (set_config(use_dora=True), "lacks a lora_magnitude_vector"),
    "pickled": (pickle_it, r"pickled \(adapter_model.bin\)"),
    "no configuration": (
        lambda folder: (folder / "adapter_config.json").unlink(),
        "is no folder of an adapter",
    ),
    "no tensors": (change_tensors(lambda tensors: tensors.clear()), "does not hold any matrices"),
    "half a pair": (change_tensors(lambda tensors: tensors.pop(B)), "does not hold two matrices"),
    "another module": (
        change_tensors(
            lambda tensors: tensors.update(
                {A.replace("q_", "w_"): tensors.pop(A), B.replace("q_", "w_"): tensors.pop(B)}
            )
        ),
        "which fit none of its parameters|does not have",
    ),
    "another shape": (
        change_tensors(lambda tensors: tensors.update({B: torch.ones(40, 4)})),
        r"with shape \[40, 32\], and .* with shape \[32, 32\]",
    ),
    "resized words": (
        change_tensors(
            lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.ones(101, 32)})
        ),
        "resized",
    ),
    "names of another library": (
        change_tensors(lambda tensors: tensors.update({"lora_unet_down": torch.ones(2)})),
        "which is no name of LoRA's",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_not_read_is_named_and_nothing_is_changed(
    case: str, folders: Folders, tmp_path: Path
) -> None:
    base, whole = folders("dense")
    spoil, words = SPOILED[case]
    adapter = tmp_path / "adapter"
    shutil.copytree(whole, adapter)
    spoil(adapter)
    state = {Q: torch.full((32, 32), 7.0)}
    with pytest.raises(HoldfastError, match=words) as caught:
        holdfast.load(state, merged(base, adapter), job=ALONE)
    assert "\n" not in str(caught.value)
    assert (state[Q] == 7).all()


def test_layers_that_an_adapter_lacks_are_told(
    folders: Folders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PEFT merges what there is; so does a load, which says what is not there."""
    base, whole = folders("dense")
    half = tmp_path / "half"
    shutil.copytree(whole, half)
    second = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
    change_tensors(lambda tensors: [tensors.pop(second.format(one)) for one in "AB"])(half)
    for adapter, told in ((whole, False), (half, True)):
        caplog.clear()
        holdfast.load({Q: torch.zeros(32, 32)}, merged(base, adapter), job=ALONE)
        assert (
            "no matrices for 1 module" in caplog.text and "layers.1.self_attn.q_proj'" in caplog.text
        ) == told
    set_config(layers_to_transform=[0])(half)
    caplog.clear()
    holdfast.load({Q: torch.zeros(32, 32)}, merged(base, half), job=ALONE)
    assert "no matrices" not in caplog.text


def test_a_second_adapter_is_refused_and_does_not_take_the_place_of_the_first(folders: Folders) -> None:
    base, adapter = folders("dense")
    with pytest.raises(BadInput, match="merged into it already, and a folder takes one adapter"):
        merged(merged(base, adapter), adapter)


def test_a_base_model_that_is_quantized_or_tied_is_told(folders: Folders, tmp_path: Path) -> None:
    base, adapter = folders("embedding and output")
    tied = tmp_path / "tied"
    shutil.copytree(base, tied)
    edit_config(tied, tie_word_embeddings=True)
    with pytest.raises(BadInput, match="ties them: which of the two"):
        holdfast.load({Q: torch.zeros(32, 32)}, merged(tied, adapter), job=ALONE)
    base, adapter = folders("dense")
    packed = tmp_path / "packed"
    shutil.copytree(base, packed)
    edit_config(packed, quantization_config={"quant_method": "gptq"})
    with pytest.raises(BadInput, match="quantized by gptq"):
        holdfast.load({Q: torch.zeros(32, 32)}, merged(packed, adapter), job=ALONE)


def test_a_base_model_in_8_bits_is_multiplied_by_its_scales_first(folders: Folders, tmp_path: Path) -> None:
    base, adapter = folders("dense")
    eight, plain = tmp_path / "eight", tmp_path / "plain"
    for folder in (eight, plain):
        folder.mkdir()
        shutil.copy(base / "config.json", folder)
    tensors = weights(base)
    small = tensors[Q].to(torch.float8_e4m3fn)
    scaled = {**tensors, Q: small, f"{Q}_scale_inv": torch.tensor([[0.5]])}
    save_file(scaled, eight / "model.safetensors")
    save_file({**tensors, Q: small.float() * 0.5}, plain / "model.safetensors")
    right = merge_by_peft(base_model(plain), adapter).state_dict()[Q]
    state = {Q: torch.zeros(32, 32)}
    holdfast.load(state, merged(eight, adapter), job=ALONE)
    assert torch.equal(state[Q], right)
    with pytest.raises(BadInput, match="in which an adapter is not merged"):
        import_(merged(eight, adapter), tmp_path / "step", job=ALONE)


def test_names_of_megatron_bridges_lora_are_refused(folders: Folders) -> None:
    base, adapter = folders("dense")
    name = "decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight"
    with pytest.raises(BadInput, match="Megatron-Bridge's LoRA has wrapped"):
        holdfast.load({name: torch.zeros(4, 32)}, merged(base, adapter), job=ALONE)
