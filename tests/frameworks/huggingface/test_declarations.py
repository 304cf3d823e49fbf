"""What transformers 5 makes of published names, as it declares it itself, as declarations.toml has it in our
words, and as our tables give it: three times the same.

`python -m tests.frameworks.huggingface.test_declarations` writes the file by the transformers that is
installed.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from holdfast._models.views.entries import Family
from holdfast._models.views.family import families

FROZEN = Path(__file__).with_name("declarations.toml")
NEWER = {"mimo_v2_flash": "mimo_v2_flash", "minimax_m3_vl_text": "minimax_m3_vl"}
"""Types of transformers 5.24, which is newer than the tests', and the types for which it declares what it makes of them: that
was written with it."""
NOT_IN_TRANSFORMERS = {
    "kimi_k2",
    "bailing_moe_v2",
    "sarvam_moe",
    "sarvam_mla",
    "deepseek_v32",
    "exaone4_5_text",
    *NEWER,
}
"""The code is in the published folder, or in a newer transformers than the tests'."""
TABLE_OF = {
    "kimi_k2": "deepseek_v3",
    "deepseek_v32": "glm_moe_dsa",
    "bailing_moe_v2": "glm4_moe",
    "sarvam_moe": "glm4_moe",
    "sarvam_mla": "deepseek_v3",
    "glm4v_moe_text": "glm4_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "youtu": "deepseek_v3",
}
"""Types with the whole table of another one: transformers declares less for them, or for the model outside."""
BY_CODE = {"ernie4_5_vl_moe_text"}
"""Types of which transformers makes something by code of their own, that it does not declare in words that are known here."""
MADE = {
    ("MergeModulelist(dim=0)", "Concatenate(dim=1)"): "concat",
    ("MergeModulelist(dim=0)",): "same",
    ("Concatenate(dim=0)",): "concat",
}
"""Which way of ours the operations are, for one expert."""


def published_names(family: Family) -> list[str]:
    """Of what the model has that transformers loads, with numbers in the place of layers and experts."""
    names = []
    for ours in family.entries:
        found = family.find(ours)
        assert found is not None
        if not ours.startswith("mtp.") and "mtp." not in "".join(found[0].rule.names):
            names += [found[0].prefix + name for name in found[0].rule.names]
    return sorted({name.format(layer=0, expert=1) for name in names})


def declared(kind: str, family: Family) -> dict[str, str]:
    """By transformers' name of a tensor that it renames or fuses: what it is made of, by transformers."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    transforms = get_checkpoint_conversion_mapping(kind) or []
    unknown = [each for each in transforms if not isinstance(each, WeightConverter | WeightRenaming)]
    assert not unknown, f"transformers declares something new for {kind}: {unknown}"
    made: dict[str, tuple[str, dict[int, str]]] = {}
    for published in published_names(family):
        name = published
        for renaming in transforms:
            if isinstance(renaming, WeightRenaming):
                name, _ = renaming.rename_source_key(name)
        way, place = "same", 0
        for converter in transforms:
            if isinstance(converter, WeightConverter):
                name, pattern = converter.rename_source_key(name)
                if pattern is not None:
                    way = " then ".join(map(operation, converter.operations))
                    way = MADE.get(tuple(way.split(" then ")), way)
                    place = converter.source_patterns.index(pattern)
                    break
        if not name.startswith(("model.", "lm_head.")):
            name = f"model.{name}"  # names of the base model: transformers adds its prefix
        if name != published:
            made.setdefault(name, (way, {}))[1][place] = published
    return {
        named(name): f"{way}({', '.join(named(parts[place]) for place in sorted(parts))})"
        for name, (way, parts) in sorted(made.items())
    }


def operation(value: object) -> str:
    """`Concatenate(dim=1)`, whatever else the object holds."""
    dim = getattr(value, "dim", None)
    return f"{type(value).__name__}(dim={dim})" if dim is not None else repr(value)


def named(name: str) -> str:
    """With names in the place of numbers."""
    return re.sub(r"experts\.\d+", "experts.{expert}", re.sub(r"layers\.\d+", "layers.{layer}", name))


def tabled(family: Family) -> dict[str, str]:
    """The same, by our tables: their entries for names that transformers has."""
    made = {}
    for ours in family.entries:
        found = family.find(ours)
        assert found is not None
        entry, _, axes = found
        if entry.rule.layout is not None:  # transformers keeps the name, and turns the tensor or not
            continue
        if ours.startswith(("model.", "lm_head.", *filter(None, family.table.outside.values()))):
            name = ours.replace("layers.", "layers.{layer}.") if "layer" in axes else ours
            parts = ", ".join(entry.prefix + name for name in entry.rule.names)
            made[name] = f"{entry.rule.way}({parts})"
    return within(family, made)


def within(family: Family, made: dict[str, str]) -> dict[str, str]:
    """With the beginnings of names that the table has for the model inside, and without what is the same then."""
    outside = [(old, new) for old, new in family.table.outside.items() if new]
    inner = {}
    for name, how in sorted(made.items()):
        for old, new in outside:
            name = new + name.removeprefix(old) if name.startswith(old) else name
        if how != f"same({name})":
            inner[name] = how
    return inner


def frozen() -> dict[str, dict[str, str]]:
    return tomllib.loads(FROZEN.read_text(encoding="utf-8"))


def differences(here: dict[str, str], there: dict[str, str]) -> list[str]:
    return [
        f"{name}: {here.get(name, 'nothing')}, and {there.get(name, 'nothing')}"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]


@pytest.mark.parametrize("kind", sorted({*families()} - BY_CODE))
def test_our_tables_give_what_is_declared(kind: str) -> None:
    family = families()[kind]
    declared_here = within(family, frozen().get(TABLE_OF.get(kind, kind), {}))
    assert differences(tabled(family), declared_here) == []


@pytest.mark.parametrize("kind", sorted({*families()} - NOT_IN_TRANSFORMERS - BY_CODE))
def test_transformers_declares_what_is_written_here(kind: str) -> None:
    pytest.importorskip("transformers.conversion_mapping")
    from transformers import CONFIG_MAPPING

    assert kind in CONFIG_MAPPING
    assert differences(declared(kind, families()[kind]), frozen().get(kind, {})) == []


def test_types_that_transformers_does_not_have_are_still_none_of_its() -> None:
    transformers = pytest.importorskip("transformers")
    assert not NOT_IN_TRANSFORMERS & {*transformers.CONFIG_MAPPING}


def write() -> None:
    from transformers import CONFIG_MAPPING

    lines = ["# What transformers makes of published tensors: its names, where they differ. A test compares."]
    for kind in sorted({*families()} - NOT_IN_TRANSFORMERS - BY_CODE | {*NEWER}):
        if (other := NEWER.get(kind, kind)) in CONFIG_MAPPING:
            found = declared(other, families()[kind])
        else:
            found = frozen()[kind]
        lines += ["", f"[{kind}]", *(f'"{name}" = "{made}"' for name, made in found.items())] if found else []
    FROZEN.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    write()
