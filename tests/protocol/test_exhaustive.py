"""Every interleaving, up to a stated bound, of commits on object semantics: requests that are lost, late, refused and
repeated, ranks that give up or are killed, and two jobs in one folder. The code is the real one
(`tests.support.explore`). And proof that the search finds what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast._core.protocol import rounds
from holdfast._core.saving.commit import Commit
from holdfast._core.saving.job import SaveJob
from holdfast._core.store import object_publish
from tests.support.explore import Explored, Explorer, World, mutate
from tests.support.explored_bucket import Bucket, in_place_of_obstore
from tests.support.explored_saves import Saves, in_place_of_threads
from tests.support.explored_writers import Writers
from tests.support.wide import wide


@pytest.fixture(autouse=True)
def _stepwise() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with in_place_of_obstore(), in_place_of_threads():
        yield
    torch.set_num_threads(threads)


def explore(world: World[Any], reduces: bool = True) -> Explored:
    found = Explorer(world, reduces=reduces).run()
    print(f"{found.states} states, {found.transitions} transitions, {found.histories} histories")
    return found


def holds(world: World[Any]) -> set[str]:
    """Explore a world in which nothing must be broken; return how its processes ended."""
    found = explore(world)
    assert not found.wrong, found.wrong
    return {result[0] for results in found.ends for result in results if isinstance(result, tuple)}


# -- one object -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    ("writers", "attempts", "faults"),
    [(2, 1, 2), (2, 2, 3), *wide([(2, 3, 3), (3, 2, 2)]), pytest.param(3, 3, 3, marks=pytest.mark.soak)],
)
def test_one_writer_wins(replace: bool, writers: int, attempts: int, faults: int) -> None:
    assert holds(Writers(writers, attempts, faults, replace)) == {"won", "conflict", "unsettled", "failed"}


@pytest.mark.parametrize("replace", [False, True])
def test_one_writer_wins_and_a_later_one_replaces_it(replace: bool) -> None:
    assert holds(Writers(2, 2, 2, replace, later=True)) == {"won", "conflict", "unsettled", "failed"}


def test_of_writers_of_equal_bytes_one_wins_while_every_answer_comes() -> None:
    assert holds(Writers(3, 2, 0, equal=True)) == {"won", "conflict"}
    # Whose bytes they are can't be told after an answer that did not come. So an index ends with its seal.
    assert "two writers have won" in explore(Writers(2, 2, 1, equal=True)).wrong


def test_a_bucket_is_tried_by_what_its_server_says() -> None:
    assert holds(Writers(1, 3, 2, tried=False)) == {"won", "unsettled", "failed"}
    assert holds(Writers(1, 3, 2, tried=False, honest=False)) == {"failed", "refused"}


def test_a_removed_object_may_come_back_which_the_pages_say() -> None:
    assert "removed is in place again" in explore(Writers(1, 2, 1, remover=True)).wrong


# -- whole saves ----------------------------------------------------------------------------------------------


def committed() -> Bucket:
    """Return a bucket with a committed checkpoint of two ranks."""
    world = Saves(jobs=1, ranks=2, faults=0, names="z")
    found = Explorer(world).run()
    (bucket,) = {state.shared.bucket for state in found.over}
    return bucket


def bounds(*soak: dict[str, float], suite: list[Any]) -> list[Any]:
    return [*suite, *(pytest.param(bound, marks=pytest.mark.soak) for bound in soak)]


@pytest.mark.parametrize(
    "bound",
    bounds(
        {"ranks": 3, "faults": 1},
        {"ranks": 3, "faults": 0, "hurries": 1},
        {"ranks": 3, "faults": 0, "kills": 1},
        {"ranks": 2, "faults": 2},
        {"ranks": 2, "faults": 1, "hurries": 1},
        suite=[
            {"ranks": 2, "faults": 1},
            {"ranks": 3, "faults": 0},
            {"ranks": 2, "faults": 0, "kills": 1},
            *wide(
                (
                    {"ranks": 2, "faults": 1, "seconds": 0.05},  # its deadline comes after one request
                    {"ranks": 2, "faults": 0, "hurries": 1},
                )
            ),
        ],
    ),
    ids=str,
)
@pytest.mark.timeout(3600)
def test_two_jobs_save_into_one_new_folder(bound: dict[str, Any]) -> None:
    assert holds(Saves(**bound)) == {"committed", "failed", "unconfirmed"}


@pytest.mark.parametrize(
    "bound",
    bounds(
        {"ranks": 2, "faults": 1},
        {"ranks": 3, "faults": 0},
        {"ranks": 2, "faults": 0, "hurries": 1},
        suite=[{"ranks": 2, "faults": 0}, {"ranks": 2, "faults": 0, "kills": 1}],
    ),
    ids=str,
)
@pytest.mark.timeout(3600)
def test_two_jobs_replace_one_checkpoint(bound: dict[str, Any]) -> None:
    assert holds(Saves(start=committed(), **bound)) == {"committed", "failed", "unconfirmed"}


def test_the_reduction_leaves_out_no_end() -> None:
    whole, reduced = (explore(Saves(ranks=2, faults=0), reduces) for reduces in (False, True))
    assert whole.states > 3 * reduced.states
    assert set(whole.ends) == set(reduced.ends)


# -- mutants: what is wrong is found --------------------------------------------------------------------------


_ATTEMPT = object_publish._Attempt
PUBLISH = {
    "a request is repeated without its condition": (
        _ATTEMPT, "_put", "mode=self._mode", "mode=None if self._unclear else self._mode",
        "two writers have won one version",
    ),
    "a 412 after an unclear answer counts": (
        _ATTEMPT, "_after", "status != 409 and self._unclear is None", "status != 409",
        "is told 'conflict', and its bytes are in place",
    ),
    "a 409 is taken as proof": (
        _ATTEMPT, "_after", "status != 409 and self._unclear is None", "self._unclear is None",
        "is told of another's version, and there was none",
    ),
    "a refusal after an unclear answer is final": (
        _ATTEMPT, "_after", "    if self._unclear is None:\n", "    if True:\n",
        "is told 'failed', and its bytes are in place",
    ),
    "a deadline is a failure": (
        _ATTEMPT, "run", "raise self._unsettled(REAL_CLOCK.now() - begun)",
        'raise explained("Publishing", "s3://bucket/x", TimeoutError(), 0.0)',
        "is told 'failed', and its bytes are in place",
    ),
    "a look that fails is a conflict": (
        _ATTEMPT, "_after", "return None  # look again", "raise self._conflict()  # look again",
        "is told of another's version, and there was none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", PUBLISH)
def test_a_defect_of_publishing_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *change, wrong = PUBLISH[mutant]
    mutate(monkeypatch, *change)
    assert wrong in explore(Writers(2, 2, 2)).wrong


def test_bytes_that_are_always_compared_let_two_writers_win(monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, _ATTEMPT, "_after", "refused and status != 409 and self._unclear is None", "False")
    assert "two writers have won one version" in explore(Writers(2, 2, 0, equal=True)).wrong


def test_a_bucket_that_is_tried_by_looks_alone_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, object_publish, "check_conditions", ", only_refusals=True", "")
    assert "ignores conditions is written to" in explore(Writers(1, 3, 2, tried=False, honest=False)).wrong


SAVES = {
    "what is not confirmed counts as failed": (
        Commit, "_unconfirmed", " and not isinstance(error, Unsettled)\n", "\n",
        {"faults": 1, "seconds": 0.05}, ("names objects that are missing", "whose index is in place"),
    ),
    "who can't tell deletes": (
        SaveJob, "run", "raise\n    except HoldfastError", "self.discard()\n        raise\n    except HoldfastError",
        {"faults": 1}, ("can't tell, and has deleted",),
    ),
    "nobody claims the outcome before the index": (
        rounds, "_claim_agreed", "learn(context, (yield Claim(context.outcome_key, to_message(agreed))))", "yield from ()",
        {"faults": 0, "hurries": 1}, ("names objects that are missing", "whose index is in place"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", SAVES)
def test_a_defect_of_a_save_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, before, after, bound, wrong = SAVES[mutant]
    mutate(monkeypatch, owner, name, before, after)
    found = explore(Saves(ranks=2, **bound)).wrong
    assert any(one in found for one in wrong), found
