"""Every public call takes a store of a user's own class in place of a path."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast._core.background.queue import queue_of_this_thread
from holdfast._core.existing.reindex import reindex
from holdfast._core.roster.memory import MemoryRoster
from holdfast._tools.checkpoints.inspect import describe
from holdfast._tools.checkpoints.prune import prune
from holdfast._tools.checkpoints.verify import verify
from holdfast.errors import BadInput
from holdfast.testing import MemoryStore
from tests.support.threads import on_ranks


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((300,), value)}


def loaded(store: MemoryStore) -> float:
    found = state(-1.0)
    holdfast.load(found, store, job=holdfast.Job(no_dist=True))
    assert (found["w"] == found["w"][0]).all()
    return float(found["w"][0])


def test_a_save_and_a_load_take_a_store() -> None:
    store = MemoryStore()
    report = holdfast.save(state(1.0), store, job=holdfast.Job(no_dist=True))
    assert report.path == store.url
    assert loaded(store) == 1.0


@pytest.mark.parametrize("budget", [None, 1024])
def test_an_asynchronous_save_into_a_store_is_written_by_this_process(budget: int | None) -> None:
    queue_of_this_thread().release()
    store, changing = MemoryStore(), {**state(2.0), "more": torch.ones(200)}
    pending = holdfast.async_save(
        changing,
        store,
        job=holdfast.Job(no_dist=True, options=holdfast.Options(host_memory_budget=budget and budget * 2)),
    )
    changing["w"].fill_(7.0)
    pending.committed(60)
    assert loaded(store) == 2.0
    assert queue_of_this_thread().writer.pid is None, "its process could not reach the store"


def test_a_run_of_checkpoints_takes_a_store() -> None:
    store = MemoryStore()
    assert holdfast.latest(store) is None
    with holdfast.Checkpoints(store, keep=2, job=holdfast.Job(no_dist=True)) as run:
        for step in range(4):
            run.save(step, state(float(step)))
    assert run.steps() == [2, 3]
    assert holdfast.latest(store) == store.child("step-00000003").url
    assert store.child("step-00000003").url.endswith("/"), "a step's number is not taken from its url"
    found = state(-1.0)
    with holdfast.Checkpoints(store, job=holdfast.Job(no_dist=True)) as run:
        assert run.restore(found) == 3
    assert (found["w"] == 3.0).all()


def test_the_commands_take_a_store() -> None:
    run = MemoryStore()
    for step in (1, 2):
        holdfast.save(
            state(float(step)), run.child(f"step-{step}"), step=step, job=holdfast.Job(no_dist=True)
        )
    assert verify(run).whole
    assert describe(run.child("step-2")).path == run.child("step-2").url
    assert holdfast.same(run.child("step-1"), run.child("step-1")).same
    assert not holdfast.same(run.child("step-1"), run).same
    run.child("step-2").delete("index.safetensors")
    reindex(run.child("step-2"))
    assert loaded(run.child("step-2")) == 2.0
    prune(run, older_than=0.0)
    assert loaded(run.child("step-1")) == 1.0


def test_two_stores_are_two_places() -> None:
    """Each has a url of its own, by which ranks meet and a run folder has an owner."""
    first, second = MemoryStore(), MemoryStore()
    for store in (first, second):
        with holdfast.Checkpoints(store, job=holdfast.Job(no_dist=True)) as run:
            run.save(1, state(1.0))
    assert sorted(first.files) != []
    assert [name.split("/")[0] for name in second.files] == [name.split("/")[0] for name in first.files]


def test_ranks_share_a_store() -> None:
    store = MemoryStore()

    def job(roster: MemoryRoster) -> int | None:
        shard = holdfast.Shard(torch.full((1, 3), float(roster.rank)), (2, 3), (roster.rank, 0))
        with holdfast.Checkpoints(
            store,
            job=holdfast.Job(roster=roster, timeout=60),
        ) as run:
            run.save(5, {"w": shard})
        blank = {"w": torch.zeros(2, 3)}
        with holdfast.Checkpoints(
            store,
            job=holdfast.Job(roster=roster, timeout=60),
        ) as run:
            step = run.restore(blank)
        assert blank["w"].tolist() == [[0.0] * 3, [1.0] * 3]
        return step

    assert on_ranks(2, job) == [5, 5]


@pytest.mark.parametrize("place", [3, object()])
def test_what_is_no_place_is_one_sentence(place: object) -> None:
    with pytest.raises(BadInput, match="The path is of type"):
        holdfast.save(state(1.0), place, job=holdfast.Job(no_dist=True))  # type: ignore[arg-type]
