"""What vLLM's own loader puts into vLLM's own models is found there, and so is each fault, with its rank.

`make engines` runs these, with a Python that has vLLM (`ENGINES`). Without it, they are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.engines.models import LAYOUTS, SETTINGS

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("ENGINES", "")
EVERY = {"healthy", "healthy again", "page", "processed", "stale layer", "a norm left out"}

pytestmark = pytest.mark.skipif(not PYTHON, reason="needs vLLM in a Python of its own: make engines")

Said = list[dict[str, object]]


def check(said: Said, layout: str) -> None:
    """Assert that the healthy model is the same, and that of each fault the right rank is told."""
    ranks, _ = LAYOUTS[layout]
    assert Counter(str(one["case"]) for one in said).keys() >= EVERY
    for one in said:
        case = one["case"]
        if case == "processed":
            assert "before process_weights_after_loading" in str(one["error"])
            continue
        if case == "page":
            assert "does not have the trainer's weights: different: 1 tensor;" in str(one["error"])
            assert f"self_attn.o_proj.weight' on rank {ranks - 1}" in str(one["error"])
            continue
        assert "error" not in one, one
        assert one["only"] == [[], []]
        if str(case).startswith("healthy"):
            assert one["same"], one
            assert one["by_whole"] == {}
            continue
        different, by_whole = one["different"], one["by_whole"]
        assert isinstance(different, dict)
        assert isinstance(by_whole, dict)
        assert different, one
        assert different.keys() == by_whole.keys()
        for name, (wrong, surely) in different.items():
            assert (wrong, surely) == ([one["victim"]], True), (case, name)
        # By fingerprints of whole tensors alone: the rank, or all that share the tensor.
        for name, (wrong, surely) in by_whole.items():
            assert one["victim"] in wrong, (case, name)
            assert not surely or wrong == [one["victim"]], (case, name)
    victims = {(one["case"], one["victim"]) for one in said if "victim" in one}
    assert {victim for _, victim in victims} == {0, ranks // 2, ranks - 1}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SETTINGS)
def test_what_the_loader_fills_is_found_and_each_fault_with_its_rank(
    kind: str, layout: str, tmp_path: Path
) -> None:
    if LAYOUTS[layout][1] and not any("expert" in key for key in SETTINGS[kind]):
        pytest.skip("has no experts")
    command = [PYTHON, "-m", "tests.engines.ranks", kind, layout, str(tmp_path)]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, **paths}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    check([json.loads(line) for line in (tmp_path / "said").read_text().splitlines()], layout)
