"""What is fetched for ranks is what they load, and loads on them with nothing else present."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import huggingface
from holdfast._core.layout.box import Box, union
from holdfast._core.layout.grid import Grid
from tests.frameworks.huggingface import fetch_jobs
from tests.frameworks.huggingface.models import TINY, publish, rewrite, weights
from tests.frameworks.megatron.models import VOCAB, Layout
from tests.support.processes import ProcessWorld
from tests.support.wide import wide

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

WORLD = 8
LAYOUTS = [
    ("qwen3_moe", Layout(pp=2, vpp=2, ep=4)),
    ("qwen3_moe", Layout(tp=2, ep=2, etp=2)),
    ("qwen3 tied", Layout(tp=2, pp=4)),
    ("deepseek_v3", Layout(tp=2, pp=2, ep=2)),
    ("qwen3_5_moe_text", Layout(tp=2, ep=2, etp=2)),  # its experts are one tensor
]
MORE = [
    ("qwen3_moe", Layout(tp=2, pp=2, ep=2)),
    ("qwen3_moe", Layout(tp=4, pp=2, ep=4)),
    ("qwen2", Layout(tp=2, pp=2)),
    ("mixtral", Layout(tp=1, ep=8)),
    ("glm4_moe", Layout(tp=2, ep=4)),
]
TAKEN_WHOLE = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
"""Whole on all ranks with Transformer Engine, which production has; cut without it, as in these tests."""


def grid_of(layout: Layout) -> Grid:
    return Grid(
        WORLD, tp=layout.tp, pp=layout.pp, ep=layout.ep, etp=layout.etp, cp=layout.cp, vpp=layout.vpp or 1
    )


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in {name for name, _ in [*LAYOUTS, *MORE]}:
        folders[name] = tmp_path_factory.mktemp("published") / name.replace(" ", "-")
        publish(TINY[name], folders[name])
    return folders


def boxes_for(folder: Path, rank: int, layout: Layout, vocabulary: int | None) -> dict[str, list[Box]]:
    """What a fetch takes for one rank, by name."""
    from holdfast._core.io.open_checkpoint import open_source
    from holdfast._core.layout.tensor import TensorSpec
    from holdfast._core.store.local import open_store
    from holdfast._models.huggingface.fetch import _needs_of

    with open_source(open_store(folder)) as opened:
        columns = opened.select()
        specs = {
            name: TensorSpec(name, int(columns.dtype[row]), columns.shape_of(row))
            for row, name in enumerate(columns.names)
        }
        return _needs_of(opened, specs, vocabulary or 0, False, grid_of(layout), [rank], None)[rank].boxes


def volume(boxes: list[Box]) -> int:
    return sum(box.volume for box in boxes)


@pytest.mark.parametrize(("name", "layout"), wide([*LAYOUTS, *MORE], suite=LAYOUTS[4:]), ids=str)
def test_what_is_fetched_for_a_rank_is_what_its_load_reads(
    name: str, layout: Layout, published: dict[str, Path], mcore_world: ProcessWorld
) -> None:
    """Element by element, in real layouts; `report.bytes` is of these boxes."""
    folder = published[name]
    for rank, wanted in enumerate(mcore_world.run(fetch_jobs.wanted, name, str(folder), layout, timeout=120)):
        exact = boxes_for(folder, rank, layout, VOCAB)
        assert exact.keys() == wanted.keys()
        for tensor, boxes in wanted.items():
            if not tensor.endswith(TAKEN_WHOLE):
                assert exact[tensor] == union(boxes), (rank, tensor)
            assert volume(union([*boxes, *exact[tensor]])) == volume(exact[tensor])
        report = huggingface.fetch(folder, [rank], grid_of(layout), vocabulary=VOCAB)
        assert report.bytes == 4 * sum(map(volume, exact.values())) == report.bytes_of_files
        assert report.bytes == sum(file.bytes for file in report.files)
        assert report.taken_whole == ()
        # Without saying how far the vocabulary is padded: all of that, and more of it.
        loose = boxes_for(folder, rank, layout, None)
        assert loose.keys() == exact.keys()
        for tensor, boxes in exact.items():
            assert volume(union([*boxes, *loose[tensor]])) == volume(loose[tensor])
            if "embed_tokens" not in tensor and "lm_head" not in tensor:
                assert boxes == loose[tensor]


@pytest.mark.parametrize(
    ("name", "layout"), wide([LAYOUTS[0], LAYOUTS[2], LAYOUTS[3], MORE[0]], suite=[LAYOUTS[3]]), ids=str
)
def test_hosts_load_their_own_folders_with_nothing_else_present(
    name: str, layout: Layout, published: dict[str, Path], mcore_world: ProcessWorld, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(published[name], source)
    hosts = [range(4), range(4, 8)]
    for host, ranks in enumerate(hosts):
        report = huggingface.fetch(source, ranks, grid_of(layout), tmp_path / f"host{host}")
        assert report.bytes_written == report.bytes
    before = mcore_world.run(fetch_jobs.load_local, name, [str(source)] * WORLD, layout, timeout=120)
    shutil.rmtree(source)
    mine = [str(tmp_path / f"host{rank // 4}") for rank in range(WORLD)]
    after = mcore_world.run(fetch_jobs.load_local, name, mine, layout, timeout=120)
    assert {said for said, _ in after} == {"loaded"}
    assert before == after


def test_other_ranks_are_refused_with_one_sentence(
    published: dict[str, Path], mcore_world: ProcessWorld, tmp_path: Path
) -> None:
    layout = Layout(tp=2, pp=2, ep=2)
    huggingface.fetch(published["qwen3_moe"], "0-3", grid_of(layout), tmp_path / "host0")
    folders = [str(tmp_path / "host0")] * WORLD
    for said, _ in mcore_world.run(fetch_jobs.load_local, "qwen3_moe", folders, layout, timeout=120):
        assert said.startswith("MissingTensors: ")
        assert "was made for ranks 0-3 of world=8,tp=2,pp=2,ep=2,etp=1" in said
        assert (
            "that rank 4 asks for" in said
            or "that rank 5 asks for" in said
            or "rank 6" in said
            or "7" in said
        )
        assert "\n" not in said


def test_transformers_does_not_take_it_for_a_model(published: dict[str, Path], tmp_path: Path) -> None:
    import transformers

    huggingface.fetch(published["qwen3_moe"], "0-3", "world=8,tp=2,pp=2,ep=2,etp=1", tmp_path / "out")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").model_type == "qwen3_moe"
    with pytest.raises(OSError, match=r"no file named"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert list((tmp_path / "out").glob("*.safetensors")) == []


def test_tensors_that_share_memory_in_part_are_loaded_from_what_was_fetched(
    published: dict[str, Path], tmp_path: Path
) -> None:
    """They are read again, to compare them, of a source that has gaps elsewhere."""
    folder, names = tmp_path / "model", ["model.layers.0.self_attn.k_proj.weight"]
    shutil.copytree(published["qwen3_moe"], folder)
    names.append(names[0].replace("k_proj", "v_proj"))
    tensors = weights(folder)
    rewrite(folder, tensors | {name: torch.zeros_like(tensors[name]) for name in names})
    huggingface.fetch(folder, [0], grid_of(Layout(tp=2)), tmp_path / "fetched")
    rows, columns = tensors[names[0]].shape
    memory, half = torch.ones(rows, columns), rows // 2
    parts = [memory[:half], memory[half // 2 : half // 2 + half]]
    state = {
        name: holdfast.Shard(part, (rows, columns), (0, 0)) for name, part in zip(names, parts, strict=True)
    }
    holdfast.load(state, tmp_path / "fetched")
    assert (memory[: half // 2 + half] == 0).all()
    assert (memory[half // 2 + half :] == 1).all()


TRAINED = Layout(tp=2, pp=2, ep=2)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "step"
    with ProcessWorld(WORLD) as world:
        world.run(fetch_jobs.train_and_save, TRAINED, str(folder), timeout=120)
    return folder


@pytest.mark.parametrize(
    "layout", wide([Layout(tp=2, ep=2, etp=2), Layout(pp=2, vpp=2, ep=4), TRAINED]), ids=str
)
def test_a_slice_of_a_checkpoint_resumes_a_model_and_its_optimizer(
    layout: Layout, step: Path, mcore_world: ProcessWorld, tmp_path: Path
) -> None:
    for only in (False, True):
        whole = mcore_world.run(fetch_jobs.resume, layout, [str(step)] * WORLD, only, timeout=120)
        for host in range(2):
            out = tmp_path / f"host{host} {only}"
            huggingface.fetch(step, f"{4 * host}-{4 * host + 3}", grid_of(layout), out, weights_only=only)
        mine = [str(tmp_path / f"host{rank // 4} {only}") for rank in range(WORLD)]
        found = mcore_world.run(fetch_jobs.resume, layout, mine, only, timeout=120)
        assert {said for said, _ in found} == {"loaded"}
        assert whole == found
    refused = mcore_world.run(fetch_jobs.resume, layout, mine, False, timeout=120)
    assert all("does not hold all of 'optimizer." in said for said, _ in refused)
