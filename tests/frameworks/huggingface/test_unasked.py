"""Weights of a published model that no rank asks for: every load tells of them, and fails where it is asked to."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import huggingface
from tests.frameworks.huggingface import jobs
from tests.frameworks.huggingface.models import TINY, publish, rewrite, weights
from tests.frameworks.megatron.models import Layout
from tests.support.processes import ProcessWorld
from tests.support.threads import on_ranks

pytest.importorskip("transformers")
BIAS, OUTPUT, EMBEDDING = (
    "model.layers.1.self_attn.q_proj.bias",
    "lm_head.weight",
    "model.embed_tokens.weight",
)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied") / "model"
    publish(TINY["qwen3 tied"], folder)
    return folder


def with_tensors(folder: Path, out: Path, **more: torch.Tensor) -> Path:
    shutil.copytree(folder, out)
    rewrite(out, {**weights(folder), **{name.replace("__", "."): value for name, value in more.items()}})
    return out


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in weights(folder).items()}


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """The lines of the log so far."""
    with caplog.at_level(logging.WARNING, "holdfast"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "holdfast"]


def test_what_is_not_asked_for_is_told(tied: Path, tmp_path: Path, told: Any) -> None:
    assert holdfast.load(state_of(tied), tied, job=holdfast.Job(no_dist=True)).unasked == ()
    assert told() == []
    more = with_tensors(tied, tmp_path / "more", **{BIAS: torch.ones(32)})
    assert holdfast.load(state_of(tied), more, job=holdfast.Job(no_dist=True)).unasked == (BIAS,)
    (line,) = told()
    assert line == (
        f"1 of the {len(weights(more))} names in {more} were not loaded, because no rank asks for them: {BIAS!r}."
    )
    huggingface.import_(more, tmp_path / "imported", job=holdfast.Job(no_dist=True))
    assert holdfast.load(state_of(tied), tmp_path / "imported", job=holdfast.Job(no_dist=True)).unasked == (
        BIAS,
    )
    huggingface.fetch(more, "0", "world=1", tmp_path / "fetched")
    assert holdfast.load(state_of(tied), tmp_path / "fetched", job=holdfast.Job(no_dist=True)).unasked == (
        BIAS,
    )
    holdfast.save(weights(more), tmp_path / "saved", job=holdfast.Job(no_dist=True))
    assert holdfast.load(state_of(tied), tmp_path / "saved", job=holdfast.Job(no_dist=True)).unasked == (
        BIAS,
    )


def test_an_output_beside_a_tied_embedding_is_told_of_if_it_is_another(
    tied: Path, tmp_path: Path, told: Any
) -> None:
    """transformers takes it then, and not the embedding."""
    embedding = weights(tied)[EMBEDDING]
    same = with_tensors(tied, tmp_path / "same", **{OUTPUT: embedding.clone()})
    assert holdfast.load(state_of(tied), same, job=holdfast.Job(no_dist=True)).unasked == ()
    for name, output in (("other", embedding + 1), ("shorter", embedding[:50].clone())):
        other = with_tensors(tied, tmp_path / name, **{OUTPUT: output})
        assert holdfast.load(state_of(tied), other, job=holdfast.Job(no_dist=True)).unasked == (OUTPUT,)
    assert len(told()) == 2


def test_scales_and_constants_go_with_other_tensors(tied: Path, tmp_path: Path, told: Any) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    eight = {name: weights(tied)[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    more = with_tensors(
        tied, tmp_path / "more", **eight, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    )
    assert holdfast.load(state_of(tied), more, job=holdfast.Job(no_dist=True)).unasked == ()
    assert told() == []


def test_what_one_rank_asks_for_is_asked_for(tied: Path, tmp_path: Path, told: Any) -> None:
    more = with_tensors(tied, tmp_path / "more", **{BIAS: torch.ones(32)})
    names = sorted(weights(tied))

    def job(roster: Any) -> Any:
        mine = {name: value for name, value in state_of(tied).items() if name in names[roster.rank :: 3]}
        return holdfast.load(
            mine, more, job=holdfast.Job(roster=roster, timeout=60, stall_timeout=20)
        ).unasked

    assert on_ranks(3, job) == [(BIAS,)] * 3
    assert len(told()) == 1


LAYOUT = Layout(pp=2)


def test_strict_has_the_meaning_that_it_has_for_checkpoints(tied: Path, tmp_path: Path) -> None:
    folder = str(with_tensors(tied, tmp_path / "more", **{BIAS: torch.ones(32)}))
    with ProcessWorld(2) as world:

        def said(folder: str, strict: str) -> Any:
            return world.run(jobs.load_strictly, "qwen3 tied", folder, LAYOUT, strict, timeout=100)

        assert said(str(tied), "raise_all") == [("loaded", None)] * 2
        assert said(str(tied), "return_all") == [("loaded", (set(), set()))] * 2
        assert said(folder, "assume_ok_unexpected") == [("loaded", None)] * 2
        assert said(folder, "return_all") == [("loaded", ({BIAS}, set()))] * 2
        for text, _ in said(folder, "raise_all"):
            assert text.startswith("LoadFailed: No rank asks for 1 weight of ")
            assert BIAS in text
        for text, _ in said(str(tied), "raise_unexpected"):
            assert "1 are asked for and not in the checkpoint: 'decoder.more'" in text
