"""docs/model.md, followed word by word: its files are saved, and its commands are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import blocks, text
from tests.docs.shell import run_commands

MARK = "tests/docs/test_model.py"


@pytest.mark.wide
def test_the_page_is_followed_word_by_word(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    printed, failed = "", 0
    for block in blocks(text("docs/model.md")):
        if not block.elsewhere.startswith(MARK):
            continue
        if block.language != "sh":
            file = tmp_path / block.elsewhere.removeprefix(f"{MARK}: ")
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.code)
            continue
        if ", fails: " in block.elsewhere:
            with pytest.raises(AssertionError) as told:
                run_commands(block.code, tmp_path)
            assert block.elsewhere.partition(", fails: ")[2] in str(told.value)
            failed += 1
        else:
            printed += run_commands(block.code, tmp_path)
    listed = [line.split() for line in printed.split("\n")]
    assert ["seed_oss", "Seed-OSS", "HOLDFAST_MODELS=tables"] in listed
    tried = {
        words[0]: (float(words[4].strip(",")), float(words[-1]))
        for words in listed
        if words[1:2] == ["logits"]
    }
    assert tried.keys() == {"seed_oss:", "arcee:"}
    assert all(largest > 5 and difference < 1e-5 * largest for largest, difference in tried.values())
    assert "The table 'seed_oss' names all " in printed
    assert "decoder.layers.0.mlp.linear_fc1.weight is model.layers.0.mlp.gate_proj.weight" in printed
    assert ["model.layers.1.mlp.up_proj.weight", "float32", "[64,", "32]"] in [words[:4] for words in listed]
    assert failed == 1
