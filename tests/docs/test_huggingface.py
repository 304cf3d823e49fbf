"""docs/huggingface.md and docs/model.md say what the tables say."""

from __future__ import annotations

import tomllib
from pathlib import Path

from holdfast._models.views.mapping import WAYS
from holdfast.huggingface import families
from tests.docs.pages import table, text

PAGE, HOW = "docs/huggingface.md", "docs/model.md"


def test_the_table_of_families() -> None:
    rows = {row[0].strip("`"): row[1] for row in table(text(PAGE), "families")}
    assert rows == families()


def test_the_table_of_ways() -> None:
    rows = {row[0].strip("`"): row[1] for row in table(text(HOW), "ways")}
    assert rows == {name: " ".join((way.__doc__ or "").split()) for name, way in WAYS.items()}


def test_the_example_is_a_table_of_the_package() -> None:
    example = text(HOW).split("\n## What is in a table")[1].split("```toml")[1].split("```")[0]
    path = Path(__file__).parents[2] / "src/holdfast/_models/views/families/mixtral.toml"
    whole = tomllib.loads(path.read_text(encoding="utf-8"))
    for key, value in tomllib.loads(example).items():
        assert whole[key] == value
