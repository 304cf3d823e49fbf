"""docs/watching.md: what it shows, with the real packages where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
import holdfast.events
from tests.docs.pages import blocks, text


def run(what: str) -> dict[str, Any]:
    """Run the block that names a package, then save and load; return its names."""
    (code,) = [block.code for block in blocks(text("docs/watching.md")) if what in block.code]
    space: dict[str, Any] = {"holdfast": holdfast, "torch": torch}
    ends: list[Any] = []
    subscribe = holdfast.events.subscribe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holdfast.events, "subscribe", lambda callback: ends.append(subscribe(callback)))
        exec(compile(code, "docs/watching.md", "exec"), space)
    state = {"w": torch.zeros(100)}
    try:
        holdfast.save(state, "run/step-00000007", step=7, job=holdfast.Job(no_dist=True))
        holdfast.load(state, "run/step-00000007", job=holdfast.Job(no_dist=True))
    finally:
        for end in ends:
            end()
    return space


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.filterwarnings("ignore")  # of these packages
class TestWatching:
    def test_tensorboard(self) -> None:
        pytest.importorskip("tensorboard")
        run("tensorboard")["writer"].close()
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator("logs").Reload()
        (saved,), (loaded,) = (
            events.Scalars(f"{name}/seconds") for name in ("save.committed", "load.loaded")
        )
        assert (saved.step, loaded.step) == (7, 7)
        assert 0 < saved.value < 60

    def test_wandb(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
        wandb_run = run("wandb")["run"]
        summary = dict(wandb_run.summary)
        wandb_run.finish()
        assert summary["save.committed/bytes"] >= 400
        assert list(Path("wandb").glob("offline-run-*"))

    def test_opentelemetry(self) -> None:
        pytest.importorskip("opentelemetry.sdk")
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        memory, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(memory))
        trace.set_tracer_provider(provider)
        run("opentelemetry")
        saved, loaded = memory.get_finished_spans()
        assert (saved.name, loaded.name) == ("save.committed", "load.loaded")
        assert 0 < saved.end_time - saved.start_time < 60e9
        assert str(saved.attributes["path"]).endswith("run/step-00000007")
