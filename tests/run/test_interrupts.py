"""One rank alone is interrupted in a save: by Ctrl-C, an alarm, or a lack of memory. After that all meet
again."""

from __future__ import annotations

import dis
import linecache
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import holdfast
from holdfast._core.roster.memory import MemoryRoster
from holdfast.errors import HoldfastError
from tests.support.threads import on_ranks
from tests.support.wide import wide

HERE = str(Path(holdfast.__file__).parent)
RANKS, STEPS, AT = 3, 6, 2


class Interrupt:
    """Raises in a thread at its n-th line of Holdfast's code; counts them."""

    def __init__(self, number: int, kind: type[BaseException]) -> None:
        self.number, self.kind, self.lines, self.place = number, kind, 0, ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        if event == "line":
            self.lines += 1
            if self.lines >= self.number > 0 and not self.place and not leaves_with(frame):
                self.place = f"{frame.f_code.co_filename.removeprefix(HERE)}:{frame.f_lineno}"
                raise self.kind(self.place)
        return self


def leaves_with(frame: FrameType) -> bool:
    """Is a `with` block about to call `__exit__`? Python handles no signal between that and the last call inside;
    an exception here would leave a lock locked for good."""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return text.startswith("with ") and dis.opname[frame.f_code.co_code[frame.f_lasti]] in (
        "LOAD_CONST",
        "SWAP",
    )


def train(run: Path, victim: int, interrupt: Interrupt, in_flight: int) -> list[list[str]]:
    """Ranks in lockstep, as training is, save six steps; the victim is interrupted in one of them. Return how
    the calls of each rank ended."""
    together = threading.Barrier(RANKS)

    def loop(roster: MemoryRoster) -> list[str]:
        job = holdfast.Job(roster=roster, timeout=60)
        made = holdfast.Checkpoints(run, in_flight=in_flight, job=job)
        ends = []
        for step in range(1, STEPS + 1):
            together.wait(60)
            state = {f"own{roster.rank}": torch.full((9,), float(step)), "w": torch.full((5,), float(step))}
            if roster.rank == victim and step == AT:
                sys.settrace(interrupt)
            try:
                made.save(step, state)
                ends.append("saved")
            except interrupt.kind as error:
                ends.append(f"interrupted at {error}")
            except HoldfastError as error:
                ends.append(str(error))
            finally:
                sys.settrace(None)
        try:
            made.close()
        except HoldfastError as error:
            ends.append(f"close: {error}")
        return ends

    return on_ranks(RANKS, loop)


def steps_of(run: Path) -> list[int]:
    """Return the committed steps, and prove that each is of one call of all ranks."""
    with holdfast.Checkpoints(run, job=holdfast.Job(no_dist=True)) as made:
        for step in made.steps():
            with holdfast.open(run / f"step-{step:08}") as opened:
                names = ["w", *(f"own{rank}" for rank in range(RANKS))]
                assert {float(value) for name in names for value in opened[name][:]} == {step}
        return made.steps()


@pytest.mark.parametrize("points", [2, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize(
    ("kind", "victim", "in_flight"),
    [
        (KeyboardInterrupt, 0, 1),
        (MemoryError, 0, 2),
        *wide([(KeyboardInterrupt, 1, 2), (MemoryError, 1, 1)]),
    ],
)
def test_after_an_interrupt_at_any_point_the_ranks_meet_again(
    kind: type[BaseException], victim: int, in_flight: int, points: int, tmp_path: Path
) -> None:
    counting = Interrupt(0, kind)
    train(tmp_path / "counted", victim, counting, in_flight)
    assert steps_of(tmp_path / "counted") == list(range(1, STEPS + 1))
    assert counting.lines > 300
    hit = 0
    for number in range(1, counting.lines, counting.lines // points):
        run, interrupt = tmp_path / str(number), Interrupt(number, kind)
        ends = train(run, victim, interrupt, in_flight)
        hit += bool(interrupt.place)
        said = f"{interrupt.place}: {ends}"
        # What is lost is the step of the interrupt and, where it failed on all ranks, the one that hears of it.
        assert set(range(1, STEPS + 1)) - {AT, AT + in_flight} <= set(steps_of(run)), said
        assert not any(end.startswith("close") for rank in ends for end in rank), said
    assert hit >= points - 1
