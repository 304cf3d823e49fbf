"""Tables from outside of the package: where they are found, and what is checked when one is read."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from holdfast._core.layout.box import whole
from holdfast._models.views import family, tables
from holdfast._models.views.family import view_of
from holdfast._tools.cli import cli
from holdfast.errors import BadInput, ShapeMismatch
from holdfast.huggingface import families, mapping_of, register

PLAIN = 'about = "Ours"\nmodel_types = ["ours"]\nextends = "decoder"\n'
LAYERS = '["decoder.layers.{layer}.*"]\n'
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is known to it alone."""
    monkeypatch.setattr(tables, "_registered", {})
    forget()
    yield
    forget()


def forget() -> None:
    tables.by_model_type.cache_clear()
    family.family_of.cache_clear()


def written(folder: Path, text: str, name: str = "ours.toml") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_one_is_registered(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no table for the model type 'ours'.*docs/model.md"):
        mapping_of("ours", QKV)
    path = written(tmp_path, PLAIN)
    assert register(path) == ("ours",)
    assert families()["ours"] == "Ours"
    assert "model.layers.0.self_attn.q_proj.weight" in mapping_of("ours", QKV)
    written(tmp_path, PLAIN + LAYERS + '"self_attention.linear_qkv.weight" = "attention.wqkv"\n')
    assert register(str(path)) == ("ours",)  # again, after it was edited
    assert mapping_of("ours", QKV).endswith("is model.layers.0.attention.wqkv")


def test_it_replaces_a_table_of_the_package(tmp_path: Path) -> None:
    assert "wide" not in mapping_of("qwen3", QKV)
    text = 'model_types = ["qwen3"]\nextends = "qwen3"\n' + LAYERS
    register(written(tmp_path, text + '"self_attention.linear_qkv.weight" = "wide"\n', "qwen3.toml"))
    assert mapping_of("qwen3", QKV).endswith("is model.layers.0.wide")
    assert "wide" not in mapping_of("qwen2", QKV)


def test_folders_and_packages_bring_some_and_the_command_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two folders, the second of which extends what is beside it, and a package that is installed."""
    written(tmp_path / "one", PLAIN)
    written(tmp_path / "two", LAYERS + '"mlp.router.weight" = "route"\n', "base.toml")
    text = 'model_types = ["theirs"]\nextends = ["decoder", "base"]\n'
    written(tmp_path / "two", text, "theirs.toml")
    written(tmp_path / "acme_models", PLAIN.replace("ours", "acme").replace("Ours", "Of Acme"))
    (tmp_path / "acme_models" / "__init__.py").touch()
    info = tmp_path / "acme-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[holdfast.models]\nacme = acme_models\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOLDFAST_MODELS", f"{tmp_path / 'one'}:{tmp_path / 'two'}")
    forget()
    try:
        assert mapping_of("theirs", "decoder.layers.0.mlp.router.weight").endswith("is model.layers.0.route")
        register(written(tmp_path, PLAIN.replace("Ours", "Ours, in this process")))
        done = CliRunner().invoke(cli, ["models", "--json"])
        found = {row["model_type"]: row for row in json.loads(done.output)}
        assert found["ours"] == {
            "model_type": "ours",
            "models": "Ours, in this process",
            "from": "register",
            "file": str(tmp_path / "ours.toml"),
        }
        assert found["theirs"]["from"] == f"HOLDFAST_MODELS={tmp_path / 'two'}"
        assert found["acme"]["from"] == "holdfast.models: acme"
        assert found["qwen3_moe"] == {
            "model_type": "qwen3_moe",
            "models": "Qwen 3 with experts: 30B-A3B, 235B-A22B",
            "from": "holdfast",
            "file": "families/qwen3_moe.toml",
        }
        rows = [line.split() for line in CliRunner().invoke(cli, ["models"]).output.split("\n")]
        assert ["acme", "Of", "Acme", "holdfast.models:", "acme"] in rows
    finally:
        sys.modules.pop("acme_models", None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("about = ours", r"ours.toml is no TOML: .*line 1.* need quotes"),
        ('model_type = "ours"', r"line 1: 'model_type' is no key of a table.*nearest is 'model_types'"),
        ('model_types = "ours"', r"line 1: 'model_types' is no list of texts.*Write model_types = \["),
        ('about = "Ours"', r"has no model_types.*Write model_types"),
        ('model_types = ["ours"]\nextends = "decodr"', r"line 2: there is no table 'decodr'.*'decoder'"),
        (PLAIN.replace('"decoder"', '"ours"'), r"line 3: there is no table 'ours'"),
        (PLAIN + '["decoder.layers"]\n', r"line 4: the section 'decoder.layers' does not end with \*"),
        (PLAIN + LAYERS + '"mlp.x" = 3\n', r"line 5: 'mlp.x' is no text"),
        (PLAIN + LAYERS + '"mlp.x" = "gruped(a, b, c)"\n', r"line 5, 'mlp.x': .* Write a name, or one of"),
        (PLAIN + LAYERS + '"mlp.x" = "grouped(a, b)"\n', r"line 5, 'mlp.x': grouped takes 3 names, not 2"),
        (PLAIN + LAYERS + '"mlp.x" = "concat(a)"\n', r"line 5, 'mlp.x': concat takes several names, not 1"),
        (PLAIN + LAYERS + '"mlp.x" = "lowered(a, b)"\n', r"lowered takes one name, not 2"),
        (PLAIN + LAYERS + '"x.{expert}.y" = "a"\n', r"line 5, .* has \{expert\}, and 'a' has not: all of"),
        (PLAIN + LAYERS + '"mlp.x" = "a.{expert}"\n', r"line 5, .*'a.\{expert\}' has \{expert\}, and our"),
        (PLAIN + LAYERS + '"x.{head}" = "a"\n', r"line 5, .*has \{head\}.*Write \{layer\} or \{expert\}"),
        (PLAIN + '["other.{layer}.*"]\n"mlp.x" = "a"\n', r"line 5, .*has \{layer\}, and 'a' has not"),
        (PLAIN + '["x.*"]\nwithin = "decoder.layers"\n', r"line 5: there is no section 'decoder.layers'"),
        (PLAIN + '["x.*"]\npublished = "model."\n', r"line 5: 'model.' does not end with \*"),
        ('inside = { "a" = "b" }\n' + PLAIN, r"line 1: 'inside' is no list.*Write inside = \["),
        (PLAIN + LAYERS + '"mlp.x" = "a or if flag"\n', r"line 5, 'mlp.x': '' is no entry of a table"),
        ("language_model = 1\n" + PLAIN, r"line 1: 'language_model' is no text"),
        ("layer_types = 1\n" + PLAIN, r"line 1: 'layer_types' is no table of texts"),
        ("unchanged = 1\n" + PLAIN, r"line 1: 'unchanged' is no table of texts"),
    ],
)
def test_what_is_wrong_with_a_table_is_told(text: str, words: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(BadInput, match=words) as told:
        register(path)
    assert str(told.value).startswith(str(path))
    assert "ours" not in families()


def test_the_packages_own_tables_pass_the_same_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tables.by_model_type()
    shutil.copytree(Path(tables.__file__).parent / "families", tmp_path / "copy")
    monkeypatch.setenv("HOLDFAST_MODELS", str(tmp_path / "copy"))
    forget()
    copied = tables.by_model_type()
    assert {kind: table._replace(file="", source="") for kind, table in copied.items()} == {
        kind: table._replace(file="", source="") for kind, table in own.items()
    }
    assert {table.source for table in copied.values()} == {f"HOLDFAST_MODELS={tmp_path / 'copy'}"}


def test_places_that_hold_no_tables_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="is no file"):
        register(tmp_path / "none.toml")
    first = written(tmp_path / "a", PLAIN)
    register(first)
    with pytest.raises(BadInput, match=r"both describe the model type 'ours'.*Remove it from one"):
        register(written(tmp_path / "b", PLAIN))
    assert families()["ours"] == "Ours"
    written(tmp_path / "a", 'model_types = ["more"]\nextends = "other"\n', "more.toml")
    written(tmp_path / "a", 'model_types = ["other"]\nextends = "more"\n', "other.toml")
    with pytest.raises(BadInput, match=r"'more' extends this table itself"):
        register(tmp_path / "a" / "more.toml")
    monkeypatch.setenv("HOLDFAST_MODELS", str(tmp_path / "nowhere"))
    forget()
    with pytest.raises(BadInput, match=r"HOLDFAST_MODELS in the environment names .*nowhere', which is no"):
        families()


def test_an_entry_point_without_a_module_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "acme-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[holdfast.models]\nacme = acme_lost\n")
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    with pytest.raises(BadInput, match=r"entry point 'acme' .* names the module 'acme_lost', which has no"):
        families()


@pytest.mark.parametrize(
    ("prefix", "output"),
    [
        ("model.", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("llm.base.", "llm.head.weight"),
    ],
)
@pytest.mark.parametrize("ours", ["", "language_model."])
def test_a_language_model_inside_of_another_is_found_by_its_prefixes(
    prefix: str, output: str, ours: str, tmp_path: Path
) -> None:
    """The last one is a table's, of one line beside its type."""
    kind = "wrapper" if prefix == "llm.base." else "no table has this"
    text = 'model_types = ["wrapper"]\ncontains = "text_config"\n'
    inside = 'inside = [{ "model." = "llm.base.", "lm_head." = "llm.head." }]\n'
    register(written(tmp_path, text + inside))
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 10}
    config = {"model_type": kind, "text_config": {"model_type": "qwen3", **sizes}}
    has = {f"{prefix}embed_tokens.weight", output, "vision.patch.weight"}
    view = view_of(config, "config.json", has.__contains__)

    def sources(name: str, shape: tuple[int, ...]) -> list[str]:
        assert view.knows(ours + name)
        return [segment.name for segment in view.segments(ours + name, shape, whole(shape))]

    assert sources("output_layer.weight", (12, 4)) == [output]
    assert sources("embedding.word_embeddings.weight", (12, 4)) == [f"{prefix}embed_tokens.weight"]
    names = sources("decoder.layers.self_attention.linear_qkv.weight", (2, 8, 4))
    layers = np.repeat(["0", "1"], 3)
    assert names == [
        f"{prefix}layers.{layer}.self_attn.{part}_proj.weight"
        for layer, part in zip(layers, "qkv" * 2, strict=True)
    ]
    assert not view.knows("vision_model.patch.weight")


@pytest.mark.parametrize(
    ("said", "family"), [(None, "qwen3"), ("no table has this", "qwen3"), ("llama", "llama")]
)
def test_the_type_of_a_language_model_that_its_configuration_does_not_name(
    said: str | None, family: str, tmp_path: Path
) -> None:
    register(
        written(tmp_path, 'model_types = ["wrapper"]\ncontains = "llm_config"\nlanguage_model = "qwen3"\n')
    )
    inner = {"num_hidden_layers": 2, **({"model_type": said} if said else {})}
    config = {"model_type": "wrapper", "llm_config": inner}
    assert view_of(config, "config.json").family.name == family
    assert view_of(config, "config.json", inner=False).family.name == family
    assert inner.get("model_type") == said


def test_a_part_beside_the_language_model_has_sizes_of_its_own(tmp_path: Path) -> None:
    text = 'model_types = ["wrapper"]\ncontains = "text_config"\n["tower.layers.{layer}.*"]\nsizes = "eyes"\n'
    text += 'published = "model.eyes.{layer}.*"\n"qkv.weight" = "grouped(q.weight, k.weight, v.weight)"\n'
    register(written(tmp_path, text))
    inner = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    eyes = {"depth": 3, "num_heads": 2, "num_key_value_heads": 1}
    has = {"model.language_model.embed_tokens.weight"}.__contains__
    view = view_of({"model_type": "wrapper", "text_config": inner, "eyes": eyes}, "config.json", has)
    found = list(view.segments("tower.layers.qkv.weight", (3, 8, 4), whole((3, 8, 4))))
    names = [f"model.eyes.{layer}.{part}.weight" for layer in range(3) for part in "qkv"]
    assert [segment.name for segment in found] == names
    assert [segment.box.shape[1] for segment in found] == [4, 2, 2] * 3
    assert view.names("model.eyes.1.k.weight")
    assert not view.names("model.eyes.1.o.weight")
    with pytest.raises(ShapeMismatch, match="has 2 layers, and the published model 3"):
        list(view.segments("tower.layers.qkv.weight", (2, 8, 4), whole((2, 8, 4))))
    without = view_of({"model_type": "wrapper", "text_config": inner}, "config.json", has)
    with pytest.raises(BadInput, match="does not say num_attention_heads"):
        list(without.segments("tower.layers.qkv.weight", (3, 8, 4), whole((3, 8, 4))))


def test_parts_that_have_no_other_form_stay_as_they_are(tmp_path: Path) -> None:
    text = 'model_types = ["wrapper"]\ncontains = "llm_config"\n'
    register(written(tmp_path, text + 'unchanged = { "vision_model." = "model.visual." }\n'))
    config = {"model_type": "wrapper", "llm_config": {"model_type": "qwen3", "num_hidden_layers": 1}}
    has = {"model.language_model.embed_tokens.weight", "model.visual.patch.0.weight"}
    view = view_of(config, "config.json", has.__contains__)
    (segment,) = view.segments("vision_model.patch.0.weight", (3, 4), whole((3, 4)))
    assert segment.name == "model.visual.patch.0.weight"
    assert segment.whole == (3, 4)
    with pytest.raises(BadInput, match=r"'wrapper' contains a language model.*Give the model_type of its ll"):
        mapping_of("wrapper", QKV)


def test_layers_that_predict_further_tokens_are_told_by_the_table(tmp_path: Path) -> None:
    register(written(tmp_path, 'further = ["draft."]\n' + PLAIN))
    view = view_of({"model_type": "ours", "num_hidden_layers": 4}, "config.json")
    names = (
        "draft.norm.weight",
        "model.layers.4.norm.weight",
        "mtp.norm.weight",
        "model.layers.3.norm.weight",
    )
    assert [view.predicts_further(name) for name in names] == [True, True, False, False]
