"""Published tensors that nothing uses, and tensors of a model that no table names, are told by pattern and
number, and are an error unless they are allowed."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import holdfast
from holdfast._core.layout.tensor import by_pattern, counted
from holdfast._core.loading.job import run_load
from holdfast._core.loading.request import LoadRequest
from holdfast._core.protocol.call import begin_call
from holdfast._core.state.flatten import flatten
from holdfast._core.store.local import open_store
from holdfast._models.huggingface.export import run_export
from holdfast._models.views.hugging_face import HuggingFaceFolder
from holdfast._tools.cli import cli
from holdfast.errors import BadInput, LoadFailed, MissingTensors
from holdfast.huggingface import export, import_
from tests.frameworks.huggingface.models import TINY, edit_config, publish, rewrite, weights

pytest.importorskip("transformers")
ALONE = holdfast.Job(no_dist=True, timeout=60, stall_timeout=30)
STRANGE = {f"model.layers.{layer}.self_attn.gate.weight": torch.ones(2) for layer in range(3)}
SAID = "'model.layers.*.self_attn.gate.weight' (3)"
FURTHER = tuple(f"model.layers.4.{name}.weight" for name in ("enorm", "hnorm", "eh_proj"))
COPY = "model.layers.4.embed_tokens.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM 4.5, with layers that predict further tokens, which transformers does not write."""
    home = tmp_path_factory.mktemp("coverage") / "model"
    publish(TINY["glm4_moe"], home)
    rewrite(home, weights(home) | {name: torch.ones(2) for name in (*FURTHER, COPY)})
    return home


def changed(folder: Path, out: Path, more: dict[str, torch.Tensor], less: tuple[str, ...] = ()) -> Path:
    shutil.copytree(folder, out)
    kept = {name: value for name, value in weights(folder).items() if name not in less}
    rewrite(out, kept | more)
    return out


def test_names_are_told_by_pattern_and_number() -> None:
    names = [f"model.layers.{layer}.experts.{expert}.w" for layer in range(3) for expert in range(20)]
    names += ["model.layers.7.norm", "x2.y"]
    assert {pattern: len(same) for pattern, same in by_pattern(names).items()} == {
        "model.layers.*.experts.*.w": 60,
        "model.layers.7.norm": 1,
        "x2.y": 1,
    }
    assert counted(names) == "'model.layers.*.experts.*.w' (60); 'model.layers.7.norm'; 'x2.y'"
    assert counted(names, most=1) == "'model.layers.*.experts.*.w' (60); and more"


def test_an_import_refuses_what_no_table_names(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import_(folder, tmp_path / "whole", job=ALONE)
    more = changed(folder, tmp_path / "more", STRANGE)
    with pytest.raises(BadInput, match="3 weights that the family 'glm4_moe' does not name") as told:
        import_(more, tmp_path / "out", job=ALONE)
    assert SAID in str(told.value)
    assert "strict=False (--unnamed)" in str(told.value)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
    with caplog.at_level(logging.WARNING, "holdfast"):
        report = import_(more, tmp_path / "out", strict=False, job=ALONE)
    assert report.tensors == len(weights(more))
    assert SAID in caplog.text
    said = CliRunner().invoke(cli, ["import", "hf", str(more), str(tmp_path / "other")])
    assert said.exit_code == 2
    assert SAID in said.output
    said = CliRunner().invoke(cli, ["import", "hf", str(more), str(tmp_path / "other"), "--unnamed"])
    assert said.exit_code == 0
    edit_config(more, model_type="unheard_of")
    assert import_(more, tmp_path / "unknown", job=ALONE).tensors == len(weights(more))


def test_of_a_model_around_a_known_one_only_names_of_that_count(folder: Path, tmp_path: Path) -> None:
    """Until the model around it has a table."""
    more = changed(folder, tmp_path / "more", {**STRANGE, "vision.patch.weight": torch.ones(2)})
    config = json.loads((more / "config.json").read_text())
    for outer, expected in (("unheard_of", {*STRANGE}), ("llava", {*STRANGE, "vision.patch.weight"})):
        (more / "config.json").write_text(json.dumps({"model_type": outer, "text_config": config}))
        found = HuggingFaceFolder.at(open_store(more))
        assert found is not None
        assert {*found.unnamed(found.names())} == expected


def test_the_command_tells_of_a_folder(folder: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(cli, ["models", "--unnamed", str(folder)])
    assert said.exit_code == 0
    total = len(weights(folder))
    assert said.output == f"The table 'glm4_moe' names all {total} tensors.\n"
    more = changed(folder, tmp_path / "more", STRANGE)
    said = CliRunner().invoke(cli, ["models", "--unnamed", str(more)])
    assert f"The table 'glm4_moe' does not name 3 of {total + 3} tensors." in said.output
    said = CliRunner().invoke(cli, ["models", "--unnamed", str(more), "--json"])
    assert said.exit_code == 1
    assert json.loads(said.output) == {
        "family": "glm4_moe",
        "tensors": total + 3,
        "unnamed": {"model.layers.*.self_attn.gate.weight": 3},
    }
    assert (
        "model.layers.*.self_attn.gate.weight        3"
        in CliRunner().invoke(cli, ["models", "--unnamed", str(more)]).output
    )
    assert CliRunner().invoke(cli, ["models", "--unnamed", str(tmp_path)]).exit_code == 2


def test_an_export_tells_both_sides_by_pattern(folder: Path, tmp_path: Path) -> None:
    state, experts = weights(folder), "model.layers.2.mlp.experts."
    holdfast.save(state | STRANGE, tmp_path / "strange", job=ALONE)
    with pytest.raises(BadInput, match="holds 3 weights that the family 'glm4_moe' has no place for") as told:
        export(tmp_path / "strange", tmp_path / "out", like=folder)
    assert SAID in str(told.value)
    less = {name: value for name, value in state.items() if not name.startswith(experts)}
    holdfast.save(less, tmp_path / "less", job=ALONE)
    with pytest.raises(MissingTensors, match="has nothing for 24 tensors") as told:
        export(tmp_path / "less", tmp_path / "out", like=folder)
    assert "'model.layers.2.mlp.experts.*.gate_proj.weight' (8)" in str(told.value).replace(
        "layers.*", "layers.2"
    )
    assert len(export(tmp_path / "less", tmp_path / "out", like=folder, strict=False).missing) == 24


def test_in_a_framework_further_layers_are_exported_whole_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    """As Model-Optimizer 2427 lost some; copies of the embedding count for nothing."""
    state = weights(folder)

    def exported(name: str, without: tuple[str, ...]) -> tuple[str, ...]:
        less = {key: value for key, value in state.items() if key not in without}
        holdfast.save(less, tmp_path / name, job=ALONE)
        stores = open_store(tmp_path / name), open_store(folder), open_store(tmp_path / f"{name} out")
        return run_export(*stores, begin_call(ALONE), in_framework=True).missing

    assert {*exported("none", (*FURTHER, COPY))} == {*FURTHER, COPY}
    assert exported("all", (COPY,)) == (COPY,)
    with pytest.raises(MissingTensors, match=r"has nothing for 1 tensor .*layers\.4\.hnorm"):
        exported("some", ("model.layers.4.hnorm.weight", COPY))


def test_a_load_under_install_takes_further_layers_whole_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    """As AReaL 1403 lost some: the same predicates, on the names that a framework's model asks for."""
    found = HuggingFaceFolder.at(open_store(folder))
    assert found is not None
    view = found.view

    def loaded(without: tuple[str, ...]) -> tuple[str, ...]:
        state = {key: torch.zeros_like(value) for key, value in weights(folder).items() if key not in without}
        request = LoadRequest(
            store=open_store(folder),
            collect=lambda rank: flatten(state, rank),
            call=begin_call(ALONE),
            may_be_left=lambda name: view.predicts_further(name) or view.is_unused(name),
            left_together=view.is_predictor,
        )
        return run_load(request).unasked

    assert {*loaded((*FURTHER, COPY))} == {*FURTHER, COPY}
    assert loaded((COPY,)) == (COPY,)
    with pytest.raises(
        LoadFailed, match=r"No rank asks for 2 weights of .*'model\.layers\.4\.enorm\.weight'"
    ):
        loaded((*FURTHER[:2], COPY))
    with pytest.raises(LoadFailed, match=r"No rank asks for 1 weight of .*'model\.norm\.weight'"):
        loaded(("model.norm.weight", *FURTHER, COPY))
