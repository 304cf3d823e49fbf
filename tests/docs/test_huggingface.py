"""docs/huggingface.md and docs/model.md say what the tables say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from holdfast._models.views.mapping import WAYS
from holdfast.huggingface import families
from tests.docs.pages import table, text
from tests.frameworks.huggingface.hub_models import HUB
from tests.frameworks.huggingface.models import TINY, Tiny
from tests.frameworks.huggingface.test_converters import CONVERTED
from tests.frameworks.huggingface.test_modules import FILLED

PAGE, HOW = "docs/huggingface.md", "docs/model.md"


def verified() -> dict[str, str]:
    """How each model type is tested, by the tests' own lists."""
    transformers = pytest.importorskip("transformers")

    def types(tiny: Tiny) -> set[str]:
        if tiny.kind:
            return {tiny.kind}
        return {getattr(transformers, tiny.config).model_type} | ({tiny.text} if tiny.text else set())

    how = dict.fromkeys(
        sorted({kind for tiny in CONVERTED.values() for kind in types(tiny)}), "converter, module"
    )
    how |= dict.fromkeys({tiny.kind for tiny in CONVERTED.values() if tiny.kind}, "converter")
    how |= dict.fromkeys({kind for tiny in FILLED.values() for kind in types(tiny)}, "module")
    how |= dict.fromkeys({kind for tiny in TINY.values() for kind in types(tiny)}, "logits, back, module")
    how |= dict.fromkeys({kind for model in HUB.values() for kind in model.types()}, "converter")
    alike = {"kimi_k2": "as deepseek_v3", "deepseek_v32": "as glm_moe_dsa", "exaone4_5_text": "as exaone4"}
    return {**how, **alike, "gpt_oss": "experts", "qwen3_omni_moe": "thinker"}


def test_the_table_of_families() -> None:
    """A type that no test verifies is not listed, and so not in the package."""
    rows = {row[0].strip("`"): tuple(row[1:]) for row in table(text(PAGE), "families")}
    known, how = families(), verified()
    assert rows == {kind: (known[kind], how.get(kind, "nothing")) for kind in known}
    assert how.keys() == known.keys()
    assert len(rows) >= 45


def test_the_table_of_ways() -> None:
    rows = {row[0].strip("`"): row[1] for row in table(text(HOW), "ways")}
    assert rows == {name: " ".join((way.__doc__ or "").split()) for name, way in WAYS.items()}


def test_the_example_is_a_table_of_the_package() -> None:
    example = text(HOW).split("\n## What is in a table")[1].split("```toml")[1].split("```")[0]
    path = Path(__file__).parents[2] / "src/holdfast/_models/views/families/mixtral.toml"
    whole = tomllib.loads(path.read_text(encoding="utf-8"))
    for key, value in tomllib.loads(example).items():
        assert whole[key] == value
