"""Published models as Holdfast checkpoints: the same tensors, with digests, and loaded in any layout."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import holdfast
from holdfast._tools.cli import cli
from holdfast.errors import BadInput, CorruptCheckpoint, MissingTensors, NotCommitted
from holdfast.huggingface import export, fetch, import_
from tests.frameworks.huggingface import jobs
from tests.frameworks.huggingface.models import TINY, edit_config, publish, rewrite, weights
from tests.frameworks.megatron.models import Layout
from tests.support.processes import ProcessWorld
from tests.support.threads import on_ranks

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("import") / "model"
    publish(TINY["qwen3_moe"], home)
    (home / "tokenizer.json").write_text('{"words": []}')
    return home


def run(*words: object) -> tuple[int, str]:
    said = CliRunner().invoke(cli, [str(word) for word in words])
    return said.exit_code, said.output


def test_every_byte_is_there_with_digests(folder: Path, tmp_path: Path) -> None:
    code, said = run("import", "hf", folder, tmp_path / "out", "--step", 7, "--fingerprint")
    assert code == 0, said
    state = {name: torch.empty_like(value) for name, value in weights(folder).items()}
    assert holdfast.load(state, tmp_path / "out", job=holdfast.Job(no_dist=True)).step == 7
    assert all(torch.equal(value, state[name]) for name, value in weights(folder).items())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"words": []}'
    assert run("verify", tmp_path / "out")[0] == 0
    assert holdfast.same(tmp_path / "out", folder).same
    (file,) = (tmp_path / "out" / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert run("verify", tmp_path / "out")[0] == 1
    with pytest.raises(CorruptCheckpoint):
        holdfast.load(state, tmp_path / "out", job=holdfast.Job(no_dist=True))


def test_it_loads_in_any_layout_as_the_folder_does(
    folder: Path, tmp_path: Path, mcore_world: ProcessWorld
) -> None:
    import_(folder, tmp_path / "out", job=holdfast.Job(no_dist=True))
    layout = Layout(tp=2, pp=2, ep=2)
    mcore_world.run(
        jobs.load_and_save, "qwen3_moe", str(tmp_path / "out"), layout, str(tmp_path / "step"), timeout=120
    )
    assert holdfast.same(tmp_path / "step", folder).same
    assert holdfast.same(tmp_path / "step", tmp_path / "out").same
    report = fetch(tmp_path / "out", [3], "world=8,tp=2,pp=2,ep=2", tmp_path / "slice")
    assert 0 < report.bytes < report.bytes_in_all / 2


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral"])
def test_transformers_modules_are_filled_from_it(name: str, tmp_path: Path) -> None:
    import transformers

    publish(TINY[name], tmp_path / "model")
    import_(tmp_path / "model", tmp_path / "out", job=holdfast.Job(no_dist=True))
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ours = transformers.AutoModelForCausalLM.from_config(TINY[name].configuration()).float()
    holdfast.load(ours.state_dict(), tmp_path / "out", job=holdfast.Job(no_dist=True))
    for key, value in stock.state_dict().items():
        assert torch.equal(value, ours.state_dict()[key]), key


def test_ranks_write_equal_parts(folder: Path, tmp_path: Path) -> None:
    reports = on_ranks(
        3,
        lambda roster: import_(folder, tmp_path / "out", job=holdfast.Job(roster=roster, timeout=60)),
    )
    written = [report.bytes_written for report in reports]
    assert max(written) < 1.5 * min(written)
    assert holdfast.same(tmp_path / "out", folder).same


def test_ranks_that_see_two_versions_are_told(folder: Path, tmp_path: Path) -> None:
    """Of the same names and sizes: the header of one says otherwise."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = weights(other)
    rewrite(other, tensors)

    def run(roster: Any) -> Any:
        source = [folder, other][roster.rank]
        return import_(
            source, tmp_path / "out", job=holdfast.Job(roster=roster, timeout=30, stall_timeout=10)
        )

    with pytest.raises(BadInput, match="Rank 1 sees another version of the model than rank 0"):
        on_ranks(2, run)
    assert not (tmp_path / "out").exists()


def test_files_of_others_are_not_replaced(folder: Path, tmp_path: Path) -> None:
    import_(folder, tmp_path / "step", job=holdfast.Job(no_dist=True))
    for name, convert in {
        "import": lambda out: import_(folder, out, job=holdfast.Job(no_dist=True)),
        "export": lambda out: export(tmp_path / "step", out, like=folder),
    }.items():
        out = tmp_path / name
        out.mkdir()
        (out / "tokenizer.json").write_text("mine")
        with pytest.raises(BadInput, match=r"holds another tokenizer\.json than this call writes"):
            convert(out)
        assert (out / "tokenizer.json").read_text() == "mine"
        (out / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        convert(out)


def test_quantised_elements_are_not_exported_without_their_configuration(tmp_path: Path) -> None:
    publish(TINY["llama"], tmp_path / "model")
    tensors = weights(tmp_path / "model")
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(tmp_path / "model", {**tensors, name: tensors[name].to(torch.float8_e4m3fn)})
    edit_config(tmp_path / "model", quantization_config={"quant_method": "compressed-tensors"})
    import_(tmp_path / "model", tmp_path / "step", job=holdfast.Job(no_dist=True))
    with pytest.raises(BadInput, match="is quantized: such weights are not exported"):
        export(tmp_path / "step", tmp_path / "out", like=tmp_path / "model")


def test_columns_are_stored_as_panels_if_asked_for(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"wide": torch.randn(600, 4096), "point": torch.tensor(3.0)}
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    import_(
        tmp_path / "model",
        tmp_path / "out",
        job=holdfast.Job(no_dist=True, options=holdfast.Options(columns=("wide",))),
    )
    part = holdfast.Shard(torch.empty(600, 512), (600, 4096), (0, 1024))
    report = holdfast.load({"wide": part}, tmp_path / "out", job=holdfast.Job(no_dist=True))
    assert torch.equal(part.tensor, tensors["wide"][:, 1024:1536])
    assert report.bytes_read < tensors["wide"].nbytes / 4
    assert holdfast.same(tmp_path / "out", tmp_path / "model").same


@pytest.mark.parametrize("share", [0.0, 0.6, 0.999])
def test_an_import_that_was_killed_is_no_checkpoint_and_is_done_again(
    folder: Path, tmp_path: Path, share: float
) -> None:
    out = tmp_path / "out"
    with ProcessWorld(1) as world:
        world.start(jobs.import_until, str(folder), str(out), share)
        (killed,) = world.collect(60)
    assert killed.died == -signal.SIGKILL
    with pytest.raises(NotCommitted):
        holdfast.load({"x": torch.ones(1)}, out, job=holdfast.Job(no_dist=True))
    import_(folder, out, job=holdfast.Job(no_dist=True))
    assert holdfast.same(out, folder).same


def test_bad_folders_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no folder of a published model"):
        import_(tmp_path, tmp_path / "out", job=holdfast.Job(no_dist=True))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.doc").write_text("")
    with pytest.raises(BadInput, match=r"holds 'notes\.doc'"):
        import_(folder, tmp_path / "full", job=holdfast.Job(no_dist=True))
    import_(folder, tmp_path / "out", job=holdfast.Job(no_dist=True))
    with pytest.raises(
        BadInput, match=f"phase 'entered': {tmp_path / 'out'} is a Holdfast checkpoint already"
    ):
        import_(tmp_path / "out", tmp_path / "again", job=holdfast.Job(no_dist=True))
    with pytest.raises(BadInput, match="holds a checkpoint already"):
        import_(folder, tmp_path / "out", step=7, job=holdfast.Job(no_dist=True))
    shutil.copytree(folder, tmp_path / "cut")
    path = max((tmp_path / "cut").glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(CorruptCheckpoint, match=path.name):
        import_(tmp_path / "cut", tmp_path / "other", job=holdfast.Job(no_dist=True))
    assert not (tmp_path / "other" / "index.safetensors").exists()
    shutil.copytree(folder, tmp_path / "mixed")
    index = tmp_path / "mixed" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = list(content["weight_map"])
    content["weight_map"][names[0]] = content["weight_map"][names[-1]]
    index.write_text(json.dumps(content))
    with pytest.raises(CorruptCheckpoint, match="says is in"):
        import_(tmp_path / "mixed", tmp_path / "other", job=holdfast.Job(no_dist=True))


def test_it_is_exported_as_it_was(folder: Path, tmp_path: Path) -> None:
    import_(folder, tmp_path / "out", job=holdfast.Job(no_dist=True))
    export(tmp_path / "out", tmp_path / "again", like=folder)
    before, after = weights(folder), weights(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_weights_of_transformers_modules_are_exported(folder: Path, tmp_path: Path) -> None:
    """Of which some have published names, and some are fused."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    holdfast.save(model.state_dict(), tmp_path / "step", job=holdfast.Job(no_dist=True))
    export(tmp_path / "step", tmp_path / "again", like=folder)
    assert holdfast.same(tmp_path / "again", folder).same
    holdfast.save({"model": model}, tmp_path / "prefix", job=holdfast.Job(no_dist=True))
    (tmp_path / "config").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "config")
    for number, source in enumerate(("step", "prefix")):  # by the table alone
        out = tmp_path / f"by config {number}"
        export(tmp_path / source, out, like=tmp_path / "config", strict=False, dtype=torch.bfloat16)
        assert holdfast.same(out, folder).same


def test_a_model_under_a_prefix_is_exported_and_compared(folder: Path, tmp_path: Path) -> None:
    """As the pages save it, beside an optimizer; other models and weights are told."""
    import transformers

    alone = holdfast.Job(no_dist=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model_state, optim_state = holdfast.get_state_dict(model, torch.optim.AdamW(model.parameters()))
    state = {"model": model_state, "optim": optim_state, "head": {"weight": torch.ones(3)}}
    holdfast.save(state, tmp_path / "run", job=alone)
    report = export(tmp_path / "run", tmp_path / "again", like=folder)
    assert (report.prefix, report.left_out) == ("model.", ("head.weight",))
    assert holdfast.same(tmp_path / "again", folder).same
    found = holdfast.same(tmp_path / "run", folder)
    assert (found.only_a, found.only_b, found.different) == (("head.weight",), (), ())
    assert (found.prefix_a, found.prefix_b) == ("model.", "")
    for include in (["model"], ["model.*"], ["lm_head.weight"]):
        assert holdfast.same(folder, tmp_path / "run", include=include).same
    said = CliRunner().invoke(cli, ["same", str(tmp_path / "run"), str(folder), "--exclude", "head"])
    assert said.exit_code == 0
    assert f"Names in {tmp_path / 'run'} begin with 'model.'; they are compared and listed without it." in (
        said.output
    )

    average = {name: value + 1 for name, value in model_state.items()}
    holdfast.save({"model": model_state, "average": average}, tmp_path / "two", job=alone)
    with pytest.raises(
        BadInput, match=r"several models whose names fit: 'average', 'model'.*--include model"
    ):
        holdfast.same(tmp_path / "two", folder)
    assert holdfast.same(tmp_path / "two", folder, include=["model"]).same
    assert len(holdfast.same(tmp_path / "two", folder, include=["average"]).different) == len(average)
    arguments = ["export", "hf", str(tmp_path / "two"), str(tmp_path / "out"), "--like", str(folder)]
    said = CliRunner().invoke(cli, arguments)
    assert said.exit_code == 2
    assert "several models whose names fit: 'average', 'model'" in said.output
    said = CliRunner().invoke(cli, [*arguments, "--prefix", "model"])
    assert said.exit_code == 0
    assert "Names in the checkpoint begin with 'model.'; they are exported without it." in said.output
    assert "No part of the model, left out: average." in said.output
    assert holdfast.same(tmp_path / "out", folder).same
    with pytest.raises(BadInput, match="holds no weight under 'modl'"):
        export(tmp_path / "two", tmp_path / "none", like=folder, prefix="modl")
    with pytest.raises(MissingTensors, match="Load the part of the state under 'model' alone"):
        holdfast.load({"model": model}, folder, job=alone)
    inner = model.model.state_dict()
    with pytest.raises(MissingTensors, match=r"Load \{'model': state\}: \d+ of these \d+ names fit so"):
        holdfast.load(inner, folder, job=alone)
    assert holdfast.load({"model": inner}, folder, job=alone).tensors == len(inner)


def test_scales_are_not_exported_as_weights(tmp_path: Path) -> None:
    publish(TINY["qwen3_moe"], tmp_path / "model")
    tensors = weights(tmp_path / "model")
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    rewrite(tmp_path / "model", tensors)
    import_(tmp_path / "model", tmp_path / "out", job=holdfast.Job(no_dist=True))
    with pytest.raises(
        BadInput, match=r"has no place for: 'model\.layers\.0\.mlp\.experts\.0\.up_proj\.weight_scale"
    ):
        export(tmp_path / "out", tmp_path / "again", like=tmp_path / "model")
