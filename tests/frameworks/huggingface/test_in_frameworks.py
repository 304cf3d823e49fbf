"""Published weights through the functions of frameworks, as published and after `install()`: bits, the ranks
that take part, collectives, and what is left to the framework."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast._core.protocol.job import Job
from holdfast.huggingface import export
from tests.frameworks.huggingface import framework_jobs as jobs
from tests.frameworks.huggingface.models import TINY, edit_config, publish, rewrite, weights
from tests.frameworks.megatron.models import Layout
from tests.support.processes import ProcessWorld
from tests.support.third_parties import lacks_mbridge, needs, refuses_unheard_of

pytest.importorskip("transformers")
FRAMEWORKS = {"mbridge": "mbridge", "megatron-bridge": "megatron.bridge", "mcore-bridge": "mcore_bridge"}
"""By what tests call them, the package that must be there."""


def lacks(name: str) -> str:
    """Why a framework can't be run here; "" if it can."""
    if name == "mbridge":
        return lacks_mbridge()
    package = FRAMEWORKS[name]
    return f"{package} is not there" if importlib.util.find_spec(package) is None else ""


EVERY = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(bool(lacks(name)), reason=lacks(name)),
            *[pytest.mark.wide] * (name != "megatron-bridge"),
        ],
    )
    for name in FRAMEWORKS
]
ANEW = "bridges_anew"
"""What ranks find imported that install before they import the framework."""
LAYOUT = Layout(tp=2, pp=2, ep=2)


@pytest.fixture(scope="module", params=EVERY)
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def world(framework: str) -> Iterator[ProcessWorld]:
    """Four ranks, which make a model of the framework once, and end as they began after each test."""
    with ProcessWorld(4, preload=preload_of(framework)) as shared:
        yield shared


def some(*frameworks: object) -> pytest.MarkDecorator:
    """A test of these frameworks' worlds."""
    return pytest.mark.parametrize("framework", frameworks, indirect=True, scope="module")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "model"
    publish(TINY["qwen3_moe"], folder)
    return folder


def preload_of(framework: str) -> str:
    return "mcore_bridge" if framework == "mcore-bridge" else "bridges"


def assert_same_model(folder: Path, published: Path) -> None:
    """To transformers, bit for bit."""
    import transformers

    expected, found = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict()
        for path in (published, folder)
    )
    assert expected.keys() == found.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def test_the_bits_are_stocks_and_no_collective_is_issued(
    framework: str, world: ProcessWorld, published: Path, tmp_path: Path
) -> None:
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    shutil.copytree(published, ours)  # an earlier model, in more files
    found = world.run(
        jobs.load_and_save, framework, str(published), LAYOUT, str(stock), str(ours), timeout=200
    )
    for many, differ, issued in found:
        assert many > 10
        assert differ == []
        assert issued == []
    assert_same_model(ours, published)
    assert_same_model(stock, published)
    expected, got = weights(published), weights(ours)
    assert expected.keys() == got.keys()
    assert [path.name for path in ours.glob("*.safetensors*")] == ["model.safetensors"]
    # Nothing is left of the way there, and whatever stock writes beside the weights is there.
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    beside = {path.name for path in stock.iterdir() if ".safetensors" not in path.name}
    assert beside <= {path.name for path in ours.iterdir()}


@pytest.mark.wide
@pytest.mark.parametrize("framework", EVERY)
def test_a_rank_that_does_not_come_is_named(framework: str, published: Path, tmp_path: Path) -> None:
    # The load of mcore-bridge waits for nobody.
    out = str(tmp_path / "out") if framework == "mcore-bridge" else ""
    with ProcessWorld(4, preload=preload_of(framework)) as world:
        said = {
            installs: world.run(
                jobs.go_without, framework, str(published), LAYOUT, out, 3, installs, timeout=200
            )
            for installs in (True, False)  # groups that stock has timed out in are of no more use
        }
    stock = [text for text, _ in said[False][:3]]
    assert any(text != "done" for text in stock)
    assert not any("rank 3" in text for text in stock)
    for text, took in said[True][:3]:
        assert text.startswith("RankFailed")
        assert "rank 3" in text
        assert took < jobs.JOB.timeout  # not the deadline, but the silence of rank 3


def test_what_there_is_no_table_for_is_left_to_the_framework(
    framework: str, world: ProcessWorld, published: Path, tmp_path: Path
) -> None:
    if framework == "megatron-bridge" and (why := refuses_unheard_of()):
        pytest.skip(why)
    other, out = tmp_path / "other", tmp_path / "out"
    shutil.copytree(published, other)
    edit_config(other, model_type="unheard_of")
    said = world.run(jobs.left, framework, str(published), str(other), LAYOUT, str(out), timeout=200)
    assert all(len(lines) <= 2 for lines in said)
    assert said[1] == said[2] == said[3] == []
    wanted = "left to the framework: Holdfast has no table for the model type 'unheard_of'"
    assert any(wanted in line for line in said[0])
    assert_same_model(out, published)


@some(*EVERY[:2])
def test_published_weights_that_the_model_does_not_have_are_refused(
    framework: str, world: ProcessWorld, published: Path, tmp_path: Path
) -> None:
    """But for layers that predict further tokens, of which a warning tells."""
    folders = [published]
    for name in ("model.layers.1.self_attn.q_proj.bias", "model.layers.4.mlp.gate.weight"):
        folders.append(tmp_path / name)
        shutil.copytree(published, folders[-1])
        rewrite(folders[-1], {**weights(published), name: torch.ones(32)})
    found = world.run(jobs.refused, framework, list(map(str, folders)), LAYOUT, timeout=200)
    for said, warned in found:
        assert said[0] == said[2] == "loaded"
        assert said[1].startswith("LoadFailed: No rank asks for 1 weight of ")
        assert "'model.layers.1.self_attn.q_proj.bias'" in said[1]
        assert "install(huggingface=False)" in said[1]
        assert warned == [] or any("'model.layers.4.mlp.gate.weight'" in line for line in warned)
    assert found[0][1]


def import_model(
    published: Path,
    out: Path,
    ranks: int,
    train: int,
    *,
    absent: int | None = None,
    installed: bool = True,
    whole: bool = False,
) -> list[tuple[str, list[str]]]:
    """NeMo RL's world: `train` of `ranks` ranks import a model at start-up, the others generate."""
    with ProcessWorld(ranks, preload="bridges") as world:
        return world.run(
            jobs.import_of_some,
            str(published),
            str(out),
            LAYOUT,
            train,
            absent,
            installed,
            whole,
            timeout=500,
        )


def assert_imported(found: list[tuple[str, list[str]]], out: Path, published: Path, train: int) -> None:
    assert found[:train] == [("imported", [])] * train
    assert found[train:] == [("takes no part", [])] * (len(found) - train)
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "0"
    export(out / "iter_0000000", out / "exported", like=published, job=Job(no_dist=True))
    assert_same_model(out / "exported", published)


NEMO_RL = pytest.mark.skipif(
    importlib.util.find_spec("megatron.bridge") is None, reason="needs Megatron-Bridge"
)


@pytest.mark.wide
@NEMO_RL
def test_stock_import_waits_for_ranks_that_do_not_train(published: Path, tmp_path: Path) -> None:
    found = import_model(published, tmp_path, 6, 4, installed=False)
    assert any("Timed out" in text for text, _ in found[:4]), found
    assert not any(text == "imported" or "rank 4" in text for text, _ in found[:4])
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()


@NEMO_RL
def test_an_import_is_of_the_ranks_that_train(published: Path, tmp_path: Path) -> None:
    found = import_model(published, tmp_path, 6, 4)
    assert_imported(found, tmp_path, published, 4)


@pytest.mark.wide
@NEMO_RL
def test_a_warm_up_and_a_session_that_can_not_be_agreed_are_left_out(published: Path, tmp_path: Path) -> None:
    """With all that the line adds, and nobody has said which ranks train."""
    found = import_model(published, tmp_path, 6, 4, whole=True)
    assert_imported(found, tmp_path, published, 4)


@pytest.mark.wide
@NEMO_RL
def test_a_rank_that_trains_and_does_not_import_is_named(published: Path, tmp_path: Path) -> None:
    found = import_model(published, tmp_path, 6, 4, absent=2)
    for rank in (0, 1, 3):
        assert "rank 2" in found[rank][0]
        assert "rank 4" not in found[rank][0]


@NEMO_RL
@pytest.mark.soak
def test_an_import_in_the_world_of_the_report(published: Path, tmp_path: Path) -> None:
    """24 ranks, of which 16 train."""
    found = import_model(published, tmp_path, 24, 16)
    assert_imported(found, tmp_path, published, 16)


@pytest.mark.parametrize("framework", EVERY[:2])
@needs("verl")
def test_verl_saves_and_loads_published_weights(framework: str, published: Path, tmp_path: Path) -> None:
    steps = tmp_path / "global_step_1" / "actor"
    with ProcessWorld(4, preload=ANEW) as world:
        found = world.run(jobs.through_verl, framework, str(published), LAYOUT, str(steps), None, timeout=200)
    assert found == [("saved", [])] * 4
    assert_same_model(steps / "model" / "huggingface", published)


@pytest.mark.parametrize("framework", EVERY[:2])
@needs("verl")
def test_a_rank_that_verl_misses_is_named(framework: str, published: Path, tmp_path: Path) -> None:
    with ProcessWorld(4, preload=ANEW) as world:
        found = world.run(jobs.through_verl, framework, str(published), LAYOUT, str(tmp_path), 1, timeout=200)
    for rank in (0, 2, 3):
        assert "rank 1" in found[rank][0]


@some(EVERY[0])
def test_a_critic_keeps_its_output(world: ProcessWorld, published: Path) -> None:
    found = world.run(jobs.values, str(published), LAYOUT, timeout=100)
    assert found == [([], [], 0.0)] * 4
