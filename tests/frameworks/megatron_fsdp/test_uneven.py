"""Shards whose offsets no rank knows: saved without a gather, placed by the commit, loaded in any layout."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.existing.reindex import reindex
from holdfast._tools.checkpoints.verify import verify
from holdfast.errors import BadInput, HoldfastError
from tests.frameworks.megatron_fsdp import uneven
from tests.frameworks.megatron_fsdp.uneven import Uneven
from tests.support.processes import ProcessWorld
from tests.system.checks import errors_of, same_everywhere

WORLD = 4


@pytest.fixture(scope="module")
def world() -> Iterator[ProcessWorld]:
    with ProcessWorld(WORLD) as shared:
        yield shared


SOME = [
    Uneven("w", (13, 5), (3, 7, 0, 3)),
    Uneven(
        "even here and there", (16, 3), (4, 5, 3, 4)
    ),  # ranks 0 and 3 take their offsets for known, rank 3 wrongly by luck
    Uneven("trailing empty", (5,), (2, 3, 0, 0)),
    Uneven("one has it all", (6, 2, 2), (0, 0, 6, 0), "bfloat16"),
    Uneven("even", (8, 2), (2, 2, 2, 2), "float64"),
]


def test_uneven_shards_are_placed_by_their_lengths(world: ProcessWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    assert sum(world.run(uneven.save_and_load, path, SOME, (WORLD,))) == sum(
        uneven.value_of(what, 1).nbytes for what in SOME
    )
    uneven.read_whole(path, SOME)
    other = [what._replace(lengths=tuple(reversed(what.lengths))) for what in SOME]
    world.run(uneven.save_and_load, path, SOME, (WORLD,), frozenset(), 0, False, other)
    assert verify(path).whole


def test_an_index_that_is_rebuilt_has_the_same_offsets(world: ProcessWorld, tmp_path: Path) -> None:
    path = tmp_path / "c"
    world.run(uneven.save_and_load, str(path), SOME, (WORLD,))
    (path / "index.safetensors").unlink()
    reindex(path)
    uneven.read_whole(str(path), SOME)


def test_replicas_of_uneven_shards_share_the_writing(world: ProcessWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    hybrid = [Uneven("w", (9, 400_000), (2, 7)), Uneven("v", (5, 3), (5, 0))]
    world.run(uneven.save_and_load, path, hybrid, (2, 2))
    uneven.read_whole(path, hybrid)


def test_an_asynchronous_save_places_them_too(world: ProcessWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    world.run(uneven.save_and_load, path, SOME, (WORLD,), frozenset(), 0, True)
    uneven.read_whole(path, SOME)


@pytest.mark.parametrize(("lengths", "replicas"), [([3, 0, 5, 1], 1), ([4, 1], 2)])
def test_shards_declared_by_hand(
    world: ProcessWorld, tmp_path: Path, lengths: list[int], replicas: int
) -> None:
    world.run(uneven.by_hand, str(tmp_path / "c"), lengths, replicas)


def test_lanes_have_lengths_of_their_own(tmp_path: Path) -> None:
    with ProcessWorld(6) as six:
        six.run(uneven.by_hand, str(tmp_path / "c"), [1, 4], 3)


def test_lengths_that_do_not_add_up_are_told(world: ProcessWorld, tmp_path: Path) -> None:
    wrong = [Uneven("w", (13, 5), (3, 7, 0, 2))]
    world.start(uneven.save_and_load, str(tmp_path / "c"), wrong, (WORLD,))
    error = same_everywhere(errors_of(world.collect(30)), WORLD)
    assert "Tensor 'w' of shape [13, 5]: what ranks hold along axis 0 adds up to 12: " in str(error)
    assert "rank 0 holds 3; rank 1 holds 7; rank 2 holds 0; rank 3 holds 2." in str(error)


def test_a_load_whose_lengths_do_not_add_up_is_refused(world: ProcessWorld, tmp_path: Path) -> None:
    right, wrong = Uneven("w", (13, 5), (3, 7, 0, 3)), Uneven("w", (13, 5), (3, 6, 0, 3))
    world.start(uneven.save_and_load, str(tmp_path / "c"), [right], (WORLD,), frozenset(), 0, False, [wrong])
    error = same_everywhere(errors_of(world.collect(30)), WORLD)
    assert "What ranks hold of 'w' along axis 0 adds up to 12, but it has 13 there: rank 0 holds 3" in str(
        error
    )


def test_ranks_that_have_other_meshes_are_told(world: ProcessWorld, tmp_path: Path) -> None:
    world.start(uneven.of_two_meshes, str(tmp_path / "c"))
    error = same_everywhere(errors_of(world.collect(30)), WORLD)
    assert re.search(r"Tensor 'w' of shape \[8, 2\] is (not covered|covered twice): .*ranks? \d", str(error))


@pytest.mark.parametrize("knowing", [(0, 2, 3), (1,), (0, 1, 2, 3)])
def test_who_has_metadata_sets_the_others_right(
    world: ProcessWorld, tmp_path: Path, knowing: tuple[int, ...]
) -> None:
    what = Uneven(
        "w", (16, 3), (3, 4, 5, 4)
    )  # rank 1 holds as many rows as an even cut gives, and other ones
    world.run(uneven.some_know, str(tmp_path / "c"), what, knowing)
    uneven.read_whole(str(tmp_path / "c"), [what._replace(name="w")], "model.")


@pytest.mark.parametrize("lengths", [(2, 2, 5), (5, 2, 2), (3, 3, 3)])
def test_equal_lengths_on_a_part_of_the_world_are_no_replicas(
    world: ProcessWorld, tmp_path: Path, lengths: tuple[int, ...]
) -> None:
    world.run(uneven.on_a_part_of_the_world, str(tmp_path / "c"), lengths)


def test_a_bad_leaf_is_not_hidden_by_the_question_for_lengths(world: ProcessWorld, tmp_path: Path) -> None:
    world.start(uneven.bad_leaf_in_an_uneven_load, str(tmp_path / "c"))
    error = same_everywhere(errors_of(world.collect(30)), WORLD)
    assert "'x' is a quantized tensor" in str(error)
    assert error.rank == 2


def test_what_can_not_be_declared() -> None:
    from holdfast import Shard

    for offset, position in (((None, None), 1), ((None, 0), None), ((0, 0), 2), ((None, 0), -1)):
        with pytest.raises(BadInput, match="None stands for one axis, and position says which"):
            Shard(torch.zeros(2, 2), (4, 2), offset, position=position)
    assert "position 3 of axis 0" in repr(Shard(torch.zeros(2, 2), (4, 2), (None, 0), position=3))


# -- any state at all -------------------------------------------------------------------------------


@st.composite
def lengths_of(draw: st.DrawFn, positions: int) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 5]), min_size=positions, max_size=positions)))


@st.composite
def asymmetric(draw: st.DrawFn) -> tuple[list[Uneven], tuple[int, ...], frozenset[tuple[int, str]], int]:
    """Uneven tensors; some ranks lack some, and all have orders of their own."""
    shape = draw(st.sampled_from([(WORLD,), (2, 2)]))
    whats, lacking = [], set()
    for number in range(draw(st.integers(1, 4))):
        lengths = draw(lengths_of(shape[-1]))
        total = max(0, sum(lengths) + draw(st.sampled_from([0] * 15 + [-1, 1])))
        tail = draw(st.sampled_from([(), (3,), (2, 2)]))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "float64"]))
        whats.append(Uneven(f"layers.{number}.exp_avg", (total, *tail), lengths, dtype))
        for rank in range(WORLD):
            if draw(st.integers(0, 9)) == 0:
                lacking.add((rank, whats[-1].name))
    return whats, shape, frozenset(lacking), draw(st.integers(0, 99))


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder where syncing costs nothing, if there is one."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize("examples", [60, pytest.param(500, marks=pytest.mark.soak)])
def test_any_state_is_saved_bit_for_bit_or_refused_with_a_sentence(
    examples: int, world: ProcessWorld, in_memory: Path
) -> None:
    numbers, seen = count(), {"saved": 0, "refused": 0}

    @settings(max_examples=examples)
    @given(asymmetric())
    def any_state(case: tuple[list[Uneven], tuple[int, ...], frozenset[tuple[int, str]], int]) -> None:
        path = in_memory / str(next(numbers))
        seen[saved_or_refused(world, str(path), *case)] += 1
        shutil.rmtree(path, ignore_errors=True)

    any_state()
    assert min(seen.values()) > examples // 20, seen


def saved_or_refused(
    world: ProcessWorld,
    path: str,
    whats: list[Uneven],
    shape: tuple[int, ...],
    lacking: frozenset[tuple[int, str]],
    order: int,
) -> str:
    world.start(uneven.save_and_load, path, whats, shape, lacking, order)
    results = world.collect(30)
    held = [what for what in whats if any((rank, what.name) not in lacking for rank in range(WORLD))]
    errors = [result.error for result in results if result.error is not None]
    if not errors:
        uneven.read_whole(path, held)  # nothing that some rank holds is lost
        return "saved"
    assert len(errors) == WORLD, errors
    assert len({str(error) for error in errors}) == 1
    error = errors[0]
    assert isinstance(error, HoldfastError), results[0].trace
    if not held:
        assert "no rank holds anything to save" in str(error)
        return "refused"
    named = re.search(r"'(layers\.\d+\.exp_avg)'", str(error))
    assert named, error
    assert re.search(r"ranks? \d", str(error)), error
    what = next(what for what in whats if what.name == named[1])
    wrong = sum(what.lengths) != what.shape[0]
    assert wrong or any(name == what.name for _, name in lacking), error  # it has a reason
    return "refused"
