"""Node-local first: steps in local folders of hosts, and the run behind them. Real processes; a host is a folder
of its own for some ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._core.format.names import LEFT
from holdfast._core.format.names import LOCAL as LOCAL_FILE
from holdfast._core.store.local import LocalStore
from holdfast._core.store.run_folder import newest_steps, step_of
from holdfast._tools.checkpoints.verify import verify
from holdfast.errors import BadInput, DeadlineExceeded
from tests.run import tier_jobs as jobs
from tests.support.mounts import remount, tmpfs
from tests.support.processes import ProcessWorld
from tests.support.wide import wide

ALONE = holdfast.Job(no_dist=True)


class Worlds:
    """Worlds by size. One whose ranks all live serves the next start of a job, too."""

    def __init__(self) -> None:
        self._living: dict[int, ProcessWorld] = {}

    def run(self, size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        if size not in self._living:
            self._living[size] = ProcessWorld(size)
        self._living[size].start(job, *args)
        found = self._living[size].collect(60.0)
        if any(result.died or result.error for result in found):
            self._living.pop(size).close()
        return found

    def close(self) -> None:
        while self._living:
            self._living.popitem()[1].close()


class Cluster:
    """Hosts with some ranks each, and a run."""

    def __init__(self, folder: Path, worlds: Worlds, hosts: int = 2, each: int = 1) -> None:
        self.folder, self.hosts, self.each, self.worlds = folder, hosts, each, worlds
        self.run = str(folder / "run")

    def start(self, job: Callable[..., Any], *args: Any, ranks: int = 0, hosts: int = 0) -> list[Any]:
        hosts = hosts or self.hosts
        return self.worlds.run(ranks or self.each * hosts, job, self.run, str(self.folder), hosts, *args)

    def save(self, *steps: int, **how: Any) -> list[Any]:
        return [result.get() for result in self.start(jobs.save_steps, [*steps], how)]

    def save_locally(
        self, *steps: int, to: int | None = None, leaves: bool = False, anew: bool = False, **how: Any
    ) -> None:
        """Save steps that do not get durable, because all ranks are killed. to: the step to go on from.
        leaves: not before the run tells which steps it has left behind. anew: without a restore."""
        died = self.start(jobs.save_locally, [*steps], to, leaves, anew, how)
        assert {result.died for result in died} == {-9}
        jobs.hold(str(self.folder)).unlink()

    def restore(self, *, hosts: int = 0, **how: Any) -> tuple[int | None, set[str], list[str]]:
        """Restore on all ranks; return the step, where each host took it from, and what was said by any rank."""
        found = [result.get() for result in self.start(jobs.restore, how, hosts=hosts)]
        steps = {step for step, _, _, _ in found}
        assert len(steps) == 1, "all ranks restore the same step"
        [step] = steps
        assert step is None or all(right for _, right, _, _ in found), "bit for bit"
        return (
            step,
            {self.short(path) for _, _, path, _ in found},
            [line for *_, said in found for line in said],
        )

    def short(self, path: str) -> str:
        return path.removeprefix(f"{self.folder}/").split("/")[0] if path else path

    def copies(self, host: int) -> list[Path]:
        return sorted(
            path.parent for path in (self.folder / f"host-{host}").glob("*/step-*/index.safetensors")
        )


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


@pytest.fixture
def cluster(tmp_path: Path, worlds: Worlds) -> Cluster:
    return Cluster(tmp_path, worlds)


@pytest.fixture
def pairs(tmp_path: Path, worlds: Worlds) -> Cluster:
    """Two ranks on each host."""
    return Cluster(tmp_path, worlds, each=2)


LOCAL, RUN = {"host-0", "host-1"}, {"run"}


def test_a_save_is_committed_on_the_hosts_and_then_in_the_run(pairs: Cluster) -> None:
    for rank, (steps, _) in enumerate(pairs.save(1, 2)):
        assert [(pairs.short(first), pairs.short(then)) for first, then in steps] == [
            (f"host-{rank // 2}", "run")
        ] * 2
    pairs.worlds.close()  # the processes that restore are others than those that saved
    step, where, said = pairs.restore()
    assert (step, where) == (2, LOCAL)
    assert [line for line in said if "restored" in line] == [
        f"Step 2 is restored, from {pairs.copies(0)[0]} and the other local folders."
    ]
    assert [len(pairs.copies(host)) for host in (0, 1)] == [1, 1], "of durable steps the newest stays"


def test_a_host_holds_each_of_its_replicas_once(pairs: Cluster) -> None:
    pairs.save(1)
    for host in (0, 1):
        [copy] = pairs.copies(host)
        with holdfast.open(copy) as opened:
            mine = [f"mine@{rank}.{key}" for rank in (2 * host, 2 * host + 1) for key in ("rank", "step")]
            assert sorted(opened) == ["lr", *mine, "pair", "same", "shard"]
        # Three rows of each of two ranks, a part that both have, a tensor that all have.
        tensors = 2 * 3 * 5 + 64 + 11
        written = sum(path.stat().st_size for path in (copy / "data").iterdir())
        assert written < 4 * (tensors + 64) + 30_000


def test_a_copy_is_verified_as_a_part(cluster: Cluster) -> None:
    cluster.save(1)
    for host in (0, 1):
        [copy] = cluster.copies(host)
        assert verify(copy).whole
        flip(copy)
        assert not verify(copy).whole


def test_a_part_of_a_step_is_refused_by_a_load_that_needs_more(pairs: Cluster) -> None:
    pairs.save(1)
    with pytest.raises(holdfast.errors.MissingTensors, match="was made for the ranks of one host"):
        holdfast.load({"shard": torch.zeros(12, 5)}, pairs.copies(0)[0], job=ALONE)
    with pytest.raises(BadInput):  # and the folder is no run
        holdfast.latest(pairs.copies(0)[0].parent)


def test_a_step_that_did_not_get_durable_is_restored_from_the_hosts(cluster: Cluster) -> None:
    cluster.save(1)
    cluster.save_locally(2, 3)
    assert holdfast.Checkpoints(cluster.run, job=ALONE).steps() == [1]
    assert cluster.restore()[:2] == (3, LOCAL)
    # And again by a start that goes on from there and does not reach the run either.
    cluster.save_locally(4)
    assert cluster.restore()[:2] == (4, LOCAL)
    cluster.save(5)
    assert holdfast.Checkpoints(cluster.run, job=ALONE).steps() == [1, 5]
    assert [len(cluster.copies(host)) for host in (0, 1)] == [1, 1]


def test_some_names_that_are_durable_remove_no_whole_copy(cluster: Cluster) -> None:
    for result in cluster.start(jobs.save_some_names):
        result.get()
    assert holdfast.Checkpoints(cluster.run, job=ALONE).steps() == [2]
    assert [len(cluster.copies(host)) for host in (0, 1)] == [2, 2]
    assert cluster.restore(step=1)[:2] == (1, LOCAL)
    assert cluster.restore()[:2] == (1, LOCAL), "step 2 lacks names of the state"
    cluster.save(3)
    assert [len(cluster.copies(host)) for host in (0, 1)] == [1, 1]


def test_copies_of_some_names_of_earlier_starts_are_removed(cluster: Cluster) -> None:
    for step in (1, 2, 3):
        for result in cluster.start(jobs.save_same, step):
            result.get()
        assert [len(cluster.copies(host)) for host in (0, 1)] == [1, 1]


def test_before_any_step_is_durable(cluster: Cluster) -> None:
    cluster.save_locally(1, 2)
    assert cluster.restore()[:2] == (2, LOCAL)


def flip(copy: Path) -> None:
    """Change a bit of a shard in each data file that has a part of it."""
    for data in (copy / "data").iterdir():
        content = bytearray(data.read_bytes())
        size = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + size])
        for name, entry in entries.items():
            if name.startswith("shard"):
                content[8 + size + entry["data_offsets"][0]] ^= 1
        data.write_bytes(content)


def cut_short(copy: Path) -> None:
    data = next((copy / "data").iterdir())
    data.write_bytes(data.read_bytes()[:-100])


def lose_data(copy: Path) -> None:
    next((copy / "data").iterdir()).unlink()


def garble_index(copy: Path) -> None:
    index = copy / "index.safetensors"
    content = bytearray(index.read_bytes())
    content[len(content) // 2] ^= 1
    index.write_bytes(content)


def lose_index(copy: Path) -> None:
    (copy / "index.safetensors").unlink()


def lose_all(copy: Path) -> None:
    shutil.rmtree(copy.parents[1])


@pytest.mark.parametrize(
    "harm",
    [
        *(flip, lose_index, lose_all),
        *(pytest.param(harm, marks=pytest.mark.soak) for harm in (cut_short, lose_data, garble_index)),
    ],
)
def test_after_damage_on_one_host_the_newest_whole_step_is_restored(
    cluster: Cluster, harm: Callable[[Path], None]
) -> None:
    cluster.save(1)
    cluster.save_locally(2)
    harm(cluster.copies(1)[-1])
    step, where, said = cluster.restore()
    assert step == 1
    # The other copies of step 1 are unharmed, unless all of the host are gone.
    assert where == (RUN if harm is lose_all else LOCAL)
    if harm in (flip, cut_short, lose_data):
        [line] = {line for line in said if "Step 2 can't be restored from local folders" in line}
        assert f"load of {cluster.copies(1)[-1]}" in line, "a path that a user can look at"
    cluster.save(3)
    assert cluster.restore()[:2] == (3, LOCAL)


def test_a_damaged_copy_of_a_durable_step_is_passed_over_for_the_step_in_the_run(cluster: Cluster) -> None:
    cluster.save(1)
    flip(cluster.copies(0)[0])
    step, where, said = cluster.restore()
    assert (step, where) == (1, RUN)
    assert any("Step 1 can't be restored from local folders" in line for line in said)


def test_a_damaged_step_of_the_run_is_restored_from_the_hosts(pairs: Cluster) -> None:
    pairs.save(1, 2)
    flip(Path(pairs.run) / "step-00000002")
    assert pairs.restore()[:2] == (2, LOCAL)
    garble_index(Path(pairs.run) / "step-00000002")
    assert pairs.restore()[:2] == (2, LOCAL)
    pairs.start(restore_and_save, [3])
    assert not (Path(pairs.run) / LEFT).exists(), "the run has not gone back"
    assert pairs.restore()[:2] == (3, LOCAL)


def test_hosts_that_have_changed_places(cluster: Cluster) -> None:
    """Each rank finds what the ranks of the other host have saved: the durable step is restored."""
    cluster.save(1)
    cluster.save_locally(2)
    (cluster.folder / "host-0").rename(cluster.folder / "host-x")
    (cluster.folder / "host-1").rename(cluster.folder / "host-0")
    (cluster.folder / "host-x").rename(cluster.folder / "host-1")
    assert cluster.restore()[:2] == (1, RUN)


def test_a_copy_of_another_hosts_folder_is_not_taken(cluster: Cluster) -> None:
    cluster.save(1)
    cluster.save_locally(2)
    shutil.rmtree(cluster.folder / "host-1")
    shutil.copytree(cluster.folder / "host-0", cluster.folder / "host-1")
    assert cluster.restore()[:2] == (1, RUN)
    cluster.save(3)
    assert cluster.restore()[:2] == (3, LOCAL)
    assert [len(cluster.copies(host)) for host in (0, 1)] == [1, 1], "what was copied is removed"


def test_the_run_goes_on_elsewhere_and_comes_back(pairs: Cluster) -> None:
    """What the first hosts have beyond the step from which others went on is no part of the run any more."""
    pairs.save(1)
    pairs.save_locally(2, 3)
    for host in (0, 1):
        (pairs.folder / f"host-{host}").rename(pairs.folder / f"away-{host}")
    assert pairs.restore()[:2] == (1, RUN)
    pairs.start(restore_and_save, [2])
    for host in (0, 1):
        shutil.rmtree(pairs.folder / f"host-{host}")
        (pairs.folder / f"away-{host}").rename(pairs.folder / f"host-{host}")
    step, where, _ = pairs.restore()
    assert (step, where) == (2, RUN), "step 2 of the others, not step 3, nor its own step 2"


def restore_and_save(rank: int, run: str, folder: str, hosts: int, steps: list[int]) -> None:
    with jobs.checkpoints_of(rank, run, folder, hosts) as checkpoints:
        checkpoints.restore(jobs.state_of(0, rank, 4))
        for step in steps:
            checkpoints.save(step, jobs.state_of(step, rank, 4))


def test_a_start_that_goes_back_is_followed(pairs: Cluster) -> None:
    pairs.save(1)
    pairs.save_locally(5)
    [result.get() for result in pairs.start(go_back, 1, 2)]
    assert pairs.restore()[:2] == (2, LOCAL)


def go_back(rank: int, run: str, folder: str, hosts: int, to: int, step: int) -> None:
    with jobs.checkpoints_of(rank, run, folder, hosts) as checkpoints:
        assert checkpoints.restore(jobs.state_of(0, rank, 4), to) == to
        checkpoints.save(step, jobs.state_of(step, rank, 4))


@pytest.mark.parametrize(
    "leaves", [pytest.param(True, marks=pytest.mark.soak), pytest.param(False, marks=pytest.mark.wide)]
)
def test_a_start_that_went_back_is_followed_before_its_step_is_durable(pairs: Cluster, leaves: bool) -> None:
    """Killed before its durable save has noted which steps the run leaves behind, and after."""
    pairs.save(1, 2, 3)

    def save(*steps: int, to: int | None = None) -> None:
        pairs.save_locally(*steps, to=to, leaves=leaves)
        if not leaves:
            (Path(pairs.run) / LEFT).unlink(missing_ok=True)

    save(2, to=1)
    assert pairs.restore()[:2] == (2, LOCAL), "not the durable step 3, which was left behind"
    save(3)
    assert pairs.restore()[:2] == (3, LOCAL), "nor a durable step of the same number"
    save(4)
    assert pairs.restore()[:2] == (4, LOCAL)
    # Whatever becomes of the copies: nothing of the steps that were left behind counts as the newest.
    pairs.start(restore_and_save, [5])
    for host in (0, 1):
        shutil.rmtree(pairs.folder / f"host-{host}")
    assert [step_of(name) for name in newest_steps(LocalStore(pairs.run), 4).values()] == [5, 1, 3, 2]


def test_a_step_that_was_removed_from_the_run_does_not_come_back(cluster: Cluster) -> None:
    cluster.save(1, 2)
    shutil.rmtree(Path(cluster.run) / "step-00000002")
    assert cluster.restore()[:2] == (1, RUN)
    cluster.save_locally(3)
    shutil.rmtree(cluster.run)
    assert cluster.restore()[0] is None, "nor one that was saved after it"


def test_a_job_that_removes_a_step_goes_on(pairs: Cluster) -> None:
    """What it saves afterwards is no part of what it has removed."""
    pairs.save(1, 2)
    assert {result.died for result in pairs.start(delete_and_save, 2, 3)} == {-9}
    jobs.hold(str(pairs.folder)).unlink()
    assert pairs.restore()[:2] == (3, LOCAL)


def delete_and_save(rank: int, run: str, folder: str, hosts: int, removed: int, step: int) -> None:
    checkpoints = jobs.checkpoints_of(rank, run, folder, hosts)
    checkpoints.restore(jobs.state_of(0, rank, 4))
    checkpoints.delete(removed)
    jobs.hold(folder).touch()
    pending = checkpoints.save(step, jobs.state_of(step, rank, 4))
    assert pending is not None
    pending.committed(20)
    jobs.dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_start_without_restore_is_not_followed_below_the_newest_step(cluster: Cluster) -> None:
    """As without local folders: neither before its step is durable, nor then."""
    cluster.save(1, 5)
    cluster.save_locally(2, anew=True)
    assert cluster.restore()[:2] == (5, LOCAL)
    cluster.save(3)
    assert cluster.restore()[:2] == (5, LOCAL)
    cluster.save_locally(4, 6, anew=True)
    assert cluster.restore()[:2] == (6, LOCAL)
    cluster.save(2)
    assert cluster.restore()[:2] == (6, LOCAL), "nor does it remove what others have saved"


def test_a_given_step_is_that_of_the_branch(cluster: Cluster) -> None:
    cluster.save(1, 2, 3)
    cluster.save_locally(2, to=1)
    (Path(cluster.run) / LEFT).unlink(missing_ok=True)
    for how in ({}, {"step": 2}):
        assert cluster.restore(**how)[:2] == (2, LOCAL)


def test_a_copy_that_goes_on_from_a_damaged_step_is_restored(cluster: Cluster) -> None:
    cluster.save(1, 2)
    cluster.save_locally(3)
    garble_index(Path(cluster.run) / "step-00000002")
    assert cluster.restore()[:2] == (3, LOCAL)
    garble_index(Path(cluster.run) / "step-00000001")
    assert cluster.restore()[:2] == (3, LOCAL)


@pytest.mark.parametrize(
    "content", [*(pytest.param(one, marks=pytest.mark.soak) for one in (None, b"")), b"{"]
)
def test_a_folder_whose_file_was_lost_is_known_by_its_copies(cluster: Cluster, content: bytes | None) -> None:
    cluster.save(1)
    cluster.save_locally(2)
    for host in (0, 1):
        file = cluster.copies(host)[0].parent / LOCAL_FILE
        file.unlink() if content is None else file.write_bytes(content)
    assert cluster.restore()[:2] == (2, LOCAL)
    for steps, said in cluster.save(2):  # the start is another one than that of the copy
        assert [cluster.short(first)[:5] for first, _ in steps] == ["host-"]
        assert not any("overwrite" in line for line in said)
    assert cluster.restore()[:2] == (2, LOCAL)


def test_ranks_without_local_are_named(tmp_path: Path) -> None:
    with ProcessWorld(2) as world:
        for said in world.run(restore_with_local_on_rank_0, str(tmp_path)):
            assert "local=, on all ranks or on none" in said
            assert "rank 1" in said


def restore_with_local_on_rank_0(rank: int, folder: str) -> str:
    local = None if rank else f"{folder}/nvme"
    checkpoints = holdfast.Checkpoints(f"{folder}/run", local=local, job=holdfast.Job(timeout=6))
    with pytest.raises(holdfast.errors.RankFailed) as failed:
        checkpoints.restore({"w": torch.ones(3)})
    return str(failed.value)


def test_delete_removes_the_copies_too(cluster: Cluster) -> None:
    cluster.save(1, 2)
    [result.get() for result in cluster.start(delete, 2)]
    assert [cluster.copies(host) for host in (0, 1)] == [[], []]
    assert cluster.restore()[:2] == (1, RUN)


def delete(rank: int, run: str, folder: str, hosts: int, step: int) -> None:
    with jobs.checkpoints_of(rank, run, folder, hosts) as checkpoints:
        checkpoints.delete(step)


def test_another_number_of_ranks(tmp_path: Path, worlds: Worlds) -> None:
    """Of one host that has all of a step, any ranks restore it. Parts of several hosts are for those who saved
    them: others get the durable step."""
    one = Cluster(tmp_path / "one", worlds, hosts=1, each=2)
    one.folder.mkdir()
    one.save_locally(1)
    [found] = [result.get() for result in one.start(jobs.restore_parts, 2, ranks=1)]
    assert (found[0], found[1], one.short(found[2])) == (1, True, "host-0")
    two = Cluster(tmp_path / "two", worlds, each=2)
    two.folder.mkdir()
    two.save(1)
    two.save_locally(2)
    for found in [result.get() for result in two.start(jobs.restore_parts, 4, hosts=1)]:
        assert (found[0], found[1], two.short(found[2])) == (1, True, "run")


def test_a_name_that_a_part_lacks_may_be_elsewhere(pairs: Cluster) -> None:
    """Also a load that is not strict takes no part for the whole."""
    pairs.save(1)
    for kept, path in [result.get() for result in pairs.start(restore_more)]:
        assert kept == 5.0
        assert pairs.short(path) == "run"
    for mine, path in [result.get() for result in pairs.start(restore_others)]:
        assert mine == [1, 1]
        assert pairs.short(path) == "run"


def restore_more(rank: int, run: str, folder: str, hosts: int) -> tuple[float, str]:
    with jobs.checkpoints_of(rank, run, folder, hosts) as checkpoints:
        state = {**jobs.state_of(0, rank, 4), "more": torch.full((2,), 5.0)}
        report = checkpoints.restore_report(state, strict=False)
        assert report is not None
        return float(state["more"][0]), report.path


def restore_others(rank: int, run: str, folder: str, hosts: int) -> tuple[list[int], str]:
    """Ranks 1 and 2 are on each other's hosts now."""
    place = {1: 2, 2: 1}.get(rank, rank)
    with jobs.checkpoints_of(place, run, folder, hosts) as checkpoints:
        state = {"mine": holdfast.PerRank({"rank": -1, "step": -1})}
        report = checkpoints.restore_report(state, include=["mine*"], strict=False)
        assert report is not None
        return [int(state["mine"].value["rank"] == rank), state["mine"].value["step"]], report.path


def test_a_rule_for_other_ranks_is_not_asked(cluster: Cluster) -> None:
    """A part has the values of some ranks only, and its index says how many ranks there were."""
    for value, path in [result.get() for result in cluster.start(save_and_restore_with_rule)]:
        assert value == 1
        assert cluster.short(path) in LOCAL


def save_and_restore_with_rule(rank: int, run: str, folder: str, hosts: int) -> tuple[int, str]:
    def rule(values: Any) -> dict[str, int]:
        raise AssertionError(f"asked for ranks {sorted(values)}")

    with jobs.checkpoints_of(rank, run, folder, hosts) as checkpoints:
        checkpoints.save(1, {"mine": holdfast.PerRank({"rank": rank}, merge=rule), "w": torch.ones(2)})
        state = {"mine": holdfast.PerRank({"rank": -1}, merge=rule), "w": torch.zeros(2)}
        report = checkpoints.restore_report(state)
        assert report is not None
        return int(state["mine"].value["rank"] == rank), report.path


@pytest.mark.parametrize("who", [range(4), [3]])
def test_uneven_shards_of_several_hosts_are_saved_to_the_run(pairs: Cluster, who: Any) -> None:
    """Also if only one rank knows that they are uneven."""
    for path, right in [result.get() for result in pairs.start(save_uneven, list(who))]:
        assert pairs.short(path) == "run"
        assert right
    one = Cluster(pairs.folder / "one", pairs.worlds, hosts=1, each=2)
    one.folder.mkdir()
    for path, right in [result.get() for result in one.start(save_uneven, [1])]:
        assert one.short(path) == "host-0"
        assert right


def save_uneven(rank: int, run: str, folder: str, hosts: int, who: list[int]) -> tuple[str, bool]:
    world = jobs.dist.get_world_size()
    lengths = [5, 3, 4, 2][:world]
    before, total = sum(lengths[:rank]), sum(lengths)

    def state(value: float) -> dict[str, Any]:
        tensor = torch.arange(before, before + lengths[rank], dtype=torch.float32) + value
        # The others take the line for an even one, whose parts begin at multiples of the first length.
        shard = holdfast.Shard(tensor, (total,), (None,), position=rank)
        assert shard.late is not None
        if rank not in who:
            shard.late = shard.late._replace(start=min(before, total - lengths[rank]))
            shard.offset = (shard.late.start,)
        return {"w": shard}

    with jobs.checkpoints_of(rank, run, folder, hosts) as checkpoints:
        pending = checkpoints.save(1, state(1.0))
        assert pending is not None
        path = pending.committed(20).path
        restored = state(0.0)
        assert checkpoints.restore_report(restored) is not None
        return path, torch.equal(restored["w"].tensor, state(1.0)["w"].tensor)


def test_a_given_step(cluster: Cluster) -> None:
    cluster.save(1, 2)
    cluster.save_locally(3)
    assert cluster.restore(step=1)[:2] == (1, RUN)
    assert cluster.restore(step=2)[:2] == (2, LOCAL)
    assert cluster.restore(step=3)[:2] == (3, LOCAL)


def test_steps_that_are_not_durable_stay_on_the_hosts(cluster: Cluster) -> None:
    jobs.cut(str(cluster.folder)).touch()
    for steps, said in cluster.save(1, 2, keep=1, on_failure="warn"):
        assert [cluster.short(first) for first, _ in steps] == ["host-0"] * 2 or [
            cluster.short(first) for first, _ in steps
        ] == ["host-1"] * 2
        assert all("The run can't be reached." in then for _, then in steps)
        assert all("committed in the local folders of all hosts" in then for _, then in steps)
        assert any("A save in the background failed" in line for line in said)
    assert [len(cluster.copies(host)) for host in (0, 1)] == [2, 2]
    assert cluster.restore()[:2] == (2, LOCAL)
    jobs.cut(str(cluster.folder)).unlink()
    cluster.save(3, keep=1)
    assert [len(cluster.copies(host)) for host in (0, 1)] == [1, 1]


def test_a_step_that_one_host_can_not_hold_is_saved_to_the_run(pairs: Cluster) -> None:
    jobs.full(str(pairs.folder), 1).touch()
    found = pairs.save(1)
    assert [[pairs.short(path) for path in paths] for (paths,), _ in found] == [["run", "run"]] * 4
    said = [line for _, lines in found for line in lines]
    [line] = [line for line in said if "not in the local folders" in line]
    assert "rank 2" in line
    assert "No space is left." in line
    jobs.full(str(pairs.folder), 1).unlink()
    assert pairs.restore()[:2] == (1, RUN)


def test_a_folder_that_can_not_be_used_is_done_without(pairs: Cluster) -> None:
    (pairs.folder / "host-1").write_text("a file")
    found = pairs.save(1)
    assert [[pairs.short(path) for path in paths] for (paths,), _ in found] == [["run", "run"]] * 4
    assert sum("local= is not used" in line for _, lines in found for line in lines) == 1
    assert pairs.restore()[:2] == (1, RUN)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
@pytest.mark.parametrize("how", wide(["read-only", "full"], suite=["full"]))
def test_a_folder_that_can_only_be_read_is_restored_from(pairs: Cluster, how: str) -> None:
    """One that is mounted read-only, or has no byte left."""
    pairs.save(1)
    pairs.save_locally(2)
    folder = pairs.folder / "host-1"
    away = folder.rename(pairs.folder / "away")
    folder.mkdir()
    with tmpfs(folder):
        shutil.copytree(away, folder, dirs_exist_ok=True)
        if how == "read-only":
            remount(folder, "ro")
        else:
            used = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
            remount(folder, f"size={used}")
        step, where, said = pairs.restore()
        assert (step, where) == (2, LOCAL)
        assert sum("local= is used to restore only, so saves go to" in line for line in said) == 1
        found = pairs.save(3)
        assert [[pairs.short(path) for path in paths] for (paths,), _ in found] == [["run", "run"]] * 4
        assert pairs.restore()[:2] == (3, RUN)


def test_on_busy_counts_the_saves_that_are_not_durable(pairs: Cluster) -> None:
    for skipped, committed, said in [result.get() for result in pairs.start(lag)]:
        assert skipped == [False, False, True]
        assert committed == [1, 2]
        assert "was not durable within 0.5 s" in said
        assert "The step is committed in the local folders of all hosts." in said


def lag(rank: int, run: str, folder: str, hosts: int) -> tuple[list[bool], list[int], str]:
    jobs.hold(folder).touch()
    checkpoints = jobs.checkpoints_of(rank, run, folder, hosts, in_flight=2, on_busy="skip")
    found = []
    for step in (1, 2, 3):
        pending = checkpoints.save(step, jobs.state_of(step, rank, 4))
        found.append(pending is None)
        if pending is not None:
            pending.committed(20)
    said = ""
    try:
        checkpoints.close(0.5)
    except DeadlineExceeded as error:
        said = str(error)
    jobs.torch.distributed.barrier()
    jobs.hold(folder).unlink(missing_ok=True)
    checkpoints.close(20)
    return found, checkpoints.steps(), said


def test_a_synchronous_save_returns_when_the_hosts_have_it(pairs: Cluster) -> None:
    assert [result.get() for result in pairs.start(save_synchronously)] == [(False, [1])] * 4


def save_synchronously(rank: int, run: str, folder: str, hosts: int) -> tuple[bool, list[int]]:
    jobs.hold(folder).touch()
    with jobs.checkpoints_of(rank, run, folder, hosts, asynchronous=False) as checkpoints:
        pending = checkpoints.save(1, jobs.state_of(1, rank, 4))
        assert pending is not None
        done = pending.done()
        jobs.torch.distributed.barrier()
        jobs.hold(folder).unlink(missing_ok=True)
        checkpoints.close(20)
        return done, checkpoints.steps()


def test_without_local_folders_both_waits_are_one(tmp_path: Path) -> None:
    with holdfast.Checkpoints(tmp_path / "run", job=ALONE) as checkpoints:
        pending = checkpoints.save(1, {"w": torch.ones(3)})
        assert pending is not None
        assert pending.committed() == pending.durable()


def test_two_runs_share_a_local_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with holdfast.Checkpoints(tmp_path / name, local=tmp_path / "nvme", job=ALONE) as checkpoints:
            checkpoints.save(1, {"w": torch.full((3,), float(ord(name)))})
    for name in ("a", "b"):
        with holdfast.Checkpoints(tmp_path / name, local=tmp_path / "nvme", job=ALONE) as checkpoints:
            state = {"w": torch.zeros(3)}
            report = checkpoints.restore_report(state)
            assert report is not None
            assert report.path.startswith(str(tmp_path / "nvme"))
            assert state["w"].tolist() == [float(ord(name))] * 3


def test_a_second_checkpoints_of_a_run_hides_no_step_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def made() -> holdfast.Checkpoints:
        return holdfast.Checkpoints(tmp_path / "run", local=tmp_path / "local", job=ALONE)

    state = {"w": torch.ones(3)}
    with made() as first:
        with made() as second:
            assert first.restore(state) is second.restore(state) is None
            paths = [one.save(step, state).committed(20).path for step, one in ((1, first), (2, second))]
            assert [str(tmp_path / "local") in path for path in paths] == [True, False]
            assert "Another Checkpoints of this process saves into" in caplog.text
        assert str(tmp_path / "local") in first.save(3, state).committed(20).path
    with made() as third:
        assert str(tmp_path / "local") in third.save(4, state).committed(20).path


def test_the_last_copy_of_a_run_that_is_gone_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not restored, and the next save removes it: the storage of the run may have been lost."""
    state = {"w": torch.ones(3)}
    for step in (3, 4):
        with holdfast.Checkpoints(tmp_path / "run", local=tmp_path / "local", job=ALONE) as run:
            assert run.restore(state) == (3 if step == 4 else None)
            state["w"] += 1
            run.save(step, state)
    assert caplog.messages == []
    shutil.rmtree(tmp_path / "run")
    with holdfast.Checkpoints(tmp_path / "run", local=tmp_path / "local", job=ALONE) as run:
        assert run.restore(state) is None
    (line,) = caplog.messages
    (copy,) = (tmp_path / "local").glob("*/step-*")
    assert f"has no committed step, but {copy} is a copy of its step 4. What" in line
    state["w"].zero_()
    holdfast.load(state, copy, job=ALONE)
    assert torch.equal(state["w"], torch.full((3,), 3.0))


def test_a_folder_of_another_run_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with holdfast.Checkpoints(tmp_path / "run", local=tmp_path / "nvme", job=ALONE) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)})
    [folder] = (tmp_path / "nvme").iterdir()
    state = folder / ".holdfast-local.json"
    state.write_text(state.read_text().replace(str(tmp_path / "run"), str(tmp_path / "ran")))
    with holdfast.Checkpoints(tmp_path / "run", local=tmp_path / "nvme", job=ALONE) as checkpoints:
        report = checkpoints.restore_report({"w": torch.zeros(3)})
        assert report is not None
        assert report.path == str(tmp_path / "run" / "step-00000001")
    assert "holds copies of another run" in caplog.text


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="local= needs a local path, not s3"):
        holdfast.Checkpoints(tmp_path, local="s3://bucket/run", job=ALONE)
    with pytest.raises(BadInput, match="local= must be a path of this host"):
        holdfast.Checkpoints(tmp_path, local=3, job=ALONE)  # type: ignore[arg-type]
    small = holdfast.Job(no_dist=True, options=holdfast.Options(host_memory_budget=1 << 20))
    checkpoints = holdfast.Checkpoints(tmp_path / "run", local=tmp_path / "nvme", job=small)
    pending = checkpoints.save(1, {"w": torch.ones(1 << 20)})
    assert pending is not None
    for wait in (pending.committed, pending.durable, checkpoints.close):
        with pytest.raises(BadInput, match="with local= a state is copied as a whole"):
            wait()


def test_nothing_is_left_behind(cluster: Cluster) -> None:
    cluster.save(1)
    for host in (0, 1):
        names = [Path(name).parts[1:] for name in jobs.tree(cluster.folder / f"host-{host}")]
        assert {parts[0] for parts in names} == {".holdfast-local.json", "step-00000001.1-1"}
        assert {parts[1] for parts in names if len(parts) > 1} == {"data", "durable", "index.safetensors"}


def test_the_call_does_what_a_local_save_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits for the copy only: but for the first, the call itself uses no storage."""
    calls: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        was = getattr(LocalStore, name)

        def noted(self: LocalStore, *args: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                calls.append(name)
            return was(self, *args)

        return noted

    for name in ("open", "create", "publish", "delete", "remove", "stat", "list"):
        monkeypatch.setattr(LocalStore, name, noting(name))
    for what in (tmp_path / "nvme", None):
        with holdfast.Checkpoints(tmp_path / "run", local=what, job=ALONE) as checkpoints:
            for step in (1, 2):
                pending = checkpoints.save(step, {"w": torch.full((3,), float(step))})
                assert pending is not None
                pending.durable(20)
                calls.clear()
            checkpoints.save(3, {"w": torch.ones(3)})
            assert calls == []


def test_a_state_that_lacks_a_name_is_committed_nowhere(tmp_path: Path) -> None:
    checkpoints = holdfast.Checkpoints(tmp_path / "run", local=tmp_path / "nvme", job=ALONE)
    checkpoints.save(1, {"w": torch.ones(3), "b": torch.ones(2)})
    pending = checkpoints.save(2, {"w": torch.zeros(3)})
    assert pending is not None
    with pytest.raises(holdfast.errors.Vanished):
        pending.committed()
    with pytest.raises(holdfast.errors.Vanished):
        checkpoints.close()
    with holdfast.Checkpoints(tmp_path / "run", local=tmp_path / "nvme", job=ALONE) as checkpoints:
        assert checkpoints.restore({"w": torch.zeros(3), "b": torch.zeros(2)}) == 1


def test_a_cancelled_save_is_cancelled_in_both(tmp_path: Path) -> None:
    jobs.obey(str(tmp_path))
    jobs.hold(str(tmp_path)).touch()
    checkpoints = holdfast.Checkpoints(tmp_path / "run", local=tmp_path / "host-0", job=ALONE)
    pending = checkpoints.save(1, {"w": torch.ones(3)})
    assert pending is not None
    assert pending.committed(20).path.startswith(str(tmp_path / "host-0"))
    assert pending.cancel()
    jobs.hold(str(tmp_path)).unlink()
    with pytest.raises(holdfast.errors.HoldfastError, match="cancelled"):
        pending.durable(20)
    assert pending.cancelled()
    assert pending.committed(0).path.startswith(str(tmp_path / "host-0"))


PROGRAM = """
import sys, torch, holdfast
from tests.run import tier_jobs as jobs
folder = sys.argv[1]
jobs.obey(folder)
jobs.cut(folder).touch()
run = holdfast.Checkpoints(folder + "/run", local=folder + "/host-0", job=holdfast.Job(no_dist=True))
print(run.save(1, {"w": torch.ones(3)}).committed().path)
"""


def test_a_process_does_not_end_well_whose_last_step_is_not_durable(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "/host-0/" in done.stdout
    assert done.returncode == 1
    assert "The run can't be reached." in done.stderr
    assert "The step is committed in the local folders of all hosts." in done.stderr


def test_saves_in_flight_meet_their_own(pairs: Cluster) -> None:
    """Ranks may be at different saves when they ask whether all hosts have one."""
    for found in [result.get() for result in pairs.start(save_fast)]:
        assert found == ["/host-"] * 12


def save_fast(rank: int, run: str, folder: str, hosts: int) -> list[str]:
    with jobs.checkpoints_of(rank, run, folder, hosts, in_flight=4) as checkpoints:
        pending = [checkpoints.save(step, jobs.state_of(step, rank, 4)) for step in range(1, 13)]
        return [
            "/host-" if "/host-" in one.committed(20).path else "run" for one in pending if one is not None
        ]
