"""verl's day in a Ray cluster on this machine: actors that train, and actors that have no part in it.

One cluster and one set of actors for the module: imports are most of the time. So the tests build on one
another, and the order is that of a bad day.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.frameworks.megatron.models import Layout
from tests.frameworks.ray.jobs import Idle, Trainer
from tests.support.ports import HOST, held_port
from tests.support.third_parties import needs
from tests.support.waiting import ended, wait_until

ROOT = Path(__file__).parents[3]
pytestmark = [
    needs("ray", "verl", "transformers", "tensordict"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
TRAINERS, SPECTATORS, STALL = 4, 2, 6.0
LIMITS = 60.0, STALL
LIMIT = 150.0
"""Seconds that an answer may take before it counts as hung; this machine may be busy."""
START = 500.0
"""Seconds in which all must be there: four processes import torch, megatron-core and verl at once."""
ALONE = 60.0
"""Seconds that actors may take to end once nobody has a handle of them."""
ABSENT, KILLED = 1, 3


@dataclass
class Cluster:
    """The actors of a driver, and what it knows of them."""

    folder: Path
    trainers: list[Any] = field(default_factory=list)
    spectators: list[Any] = field(default_factory=list)

    def actors(self, kind: type, count: int, *args: Any) -> list[Any]:
        import ray

        remote = ray.remote(num_cpus=0)(kind)
        return [remote.remote(*([rank, *args] if args else [])) for rank in range(count)]

    def open(self, trainers: list[Any], layout: Layout) -> None:
        with held_port() as port:
            answers(trainers, "open", f"tcp://{HOST}:{port}", len(trainers), layout)

    def logs(self) -> str:
        """What the actors have written to their terminals."""
        found = (self.folder / "session_latest" / "logs").glob("worker-*.err")
        return "\n".join(path.read_text(errors="replace") for path in sorted(found))


def answers(actors: list[Any], method: str, *args: Any, limit: float = LIMIT) -> list[Any]:
    """The answers of all; the first error is raised."""
    import ray

    return list(ray.get([getattr(actor, method).remote(*args) for actor in actors], timeout=limit))


def errors(actors: list[Any], method: str, *args: Any) -> list[BaseException]:
    """What each raises; that it does not answer is no error of its own."""
    import ray

    asked = [getattr(actor, method).remote(*args) for actor in actors]
    found: list[BaseException] = []
    for reference in asked:
        with pytest.raises(ray.exceptions.RayError) as caught:
            ray.get(reference, timeout=LIMIT)
        assert not isinstance(caught.value, ray.exceptions.GetTimeoutError)
        found.append(caught.value)
    return found


def others(cluster: Cluster, rank: int) -> list[Any]:
    return [actor for number, actor in enumerate(cluster.trainers) if number != rank]


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    import ray

    folder = Path(tempfile.mkdtemp(prefix="hf-ray-", dir="/tmp"))  # names of sockets must be short
    names = ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED", "RAY_AUTH_TOKEN")
    before = {name: os.environ.get(name) for name in names}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [before["PYTHONPATH"]])])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # or Ray leaves one in the user's home
    made = Cluster(folder)
    mine = psutil.Process()
    known = {child.pid for child in mine.children(recursive=True)}
    try:
        ray.init(
            num_cpus=TRAINERS + SPECTATORS,
            include_dashboard=False,
            _temp_dir=str(folder),
            object_store_memory=100 << 20,
            log_to_driver=False,
        )
        made.spectators = made.actors(Idle, SPECTATORS)
        made.trainers = made.actors(Trainer, TRAINERS, *LIMITS)
        answers(made.trainers, "pid", limit=START)
        made.open(made.trainers, Layout(tp=2, ep=2))
        yield made
    finally:
        of_ray = [child for child in mine.children(recursive=True) if child.pid not in known]
        ray.shutdown()
        with contextlib.suppress(AssertionError):
            # Not by psutil's `wait_procs`, which opens a descriptor of a process and fails while that ends.
            wait_until(lambda: not list(filter(lives, of_ray)), ALONE)
        left = list(filter(lives, of_ray))
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})
        said = made.logs()
        shutil.rmtree(folder, ignore_errors=True)
        assert not left
        assert "Traceback" not in said, said


@pytest.mark.timeout(600)
def test_training_goes_on_from_what_was_saved_as_if_nothing_had_been(cluster: Cluster) -> None:
    first = str(cluster.folder / "step" / "first")
    answers(cluster.trainers, "steps", 1)
    answers(cluster.trainers, "save", first)
    went_on = answers(cluster.trainers, "steps", 2)
    answers(cluster.trainers, "load", first, 1)
    assert answers(cluster.trainers, "steps", 2) == went_on
    assert len(set(answers(cluster.spectators, "pid"))) == SPECTATORS


@pytest.mark.skipif(
    tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 17),
    reason="verl 0.9.1 asks for a module of asynchronous saves that megatron-core has not had since 0.17",
)
@pytest.mark.timeout(300)
def test_verls_workers_finalize_a_save_in_the_background(cluster: Cluster) -> None:
    kinds = answers(cluster.trainers, "finalizing_workers")
    assert kinds == [["ActorRolloutRefWorker", "TrainingWorker"]] * TRAINERS
    folder = cluster.folder / "step" / "background"
    answers(cluster.trainers, "save", str(folder), True)
    answers(cluster.trainers, "finalize")
    for part in ("model", "optimizer", "extra"):
        assert (folder / part / "dist_ckpt" / "index.safetensors").exists()


@pytest.mark.timeout(300)
def test_the_driver_hears_which_rank_did_not_come_and_where_it_is(cluster: Cluster) -> None:
    import ray

    late, enough = cluster.trainers[ABSENT], cluster.folder / "enough"
    folder = str(cluster.folder / "step" / "late")
    busy = late.dawdle.remote(str(enough), 2 * LIMIT)
    waits = late.save.remote(folder)
    found = errors(others(cluster, ABSENT), "save", folder)
    assert ray.wait([busy], timeout=0) == ([], [busy]), "they have heard it while it dawdles"
    enough.touch()
    for error in found:
        assert "RankFailed" in type(error).__name__
        assert f"waited for rank {ABSENT} to enter" in str(error)
        assert "MegatronCheckpointManager.save_checkpoint" in str(error)
        assert " dawdle" in str(error)  # where it is
    assert ray.get(busy, timeout=LIMIT) is None
    with pytest.raises(ray.exceptions.RayError, match=f"rank {ABSENT}"):
        ray.get(waits, timeout=LIMIT)
    answers(cluster.trainers, "save", folder)  # it is not too late for the next one


@pytest.mark.timeout(300)
def test_the_driver_hears_which_actor_was_killed(cluster: Cluster) -> None:
    import ray

    waiting = [actor.save.remote(str(cluster.folder / "killed")) for actor in others(cluster, KILLED)]
    time.sleep(0.5)
    ray.kill(cluster.trainers[KILLED])
    for reference in waiting:
        with pytest.raises(ray.exceptions.RayTaskError, match=f"rank {KILLED} ") as caught:
            ray.get(reference, timeout=LIMIT)
        assert "RankFailed" in type(caught.value).__name__
        assert ended(str(caught.value))
        assert "stall_timeout" not in str(caught.value), "it is its end that they heard of, not its silence"
    wait_until(lambda: cluster.logs().count("ends: The session ended because of rank") >= TRAINERS - 1, 30)


@pytest.mark.timeout(600)
def test_fewer_actors_resume_and_end_when_the_driver_lets_go_of_them(cluster: Cluster) -> None:
    new = cluster.actors(Trainer, 2, *LIMITS, True)
    pids = answers(new, "pid", limit=START)
    cluster.open(new, Layout(tp=2))
    answers(new, "load", str(cluster.folder / "step" / "first"), 1)
    losses = answers(new, "steps", 1)
    assert all(loss == losses[0] for loss in losses)
    del new
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), ALONE)


@pytest.mark.timeout(300)
def test_actors_answer_after_their_session_and_no_collective_of_theirs_hangs(cluster: Cluster) -> None:
    alive = others(cluster, KILLED)
    assert len(set(answers(alive, "pid"))) == TRAINERS - 1
    assert len(errors(alive[1:], "steps", 1)) == TRAINERS - 2
    # One waits for the rank that was killed, whose end gloo sees, the other for rank 0, which is not asked.
    wait_until(lambda: f"rank {ABSENT} ends with exit code" in cluster.logs())
    assert len(set(answers([alive[0], *cluster.spectators], "pid"))) == SPECTATORS + 1
