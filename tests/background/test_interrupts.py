"""A program that catches Ctrl-C, or forks, while a save is under way goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.groups.session.launch import Forks
from tests.support.wide import wide

HEAD = """
import os, signal, sys, torch, holdfast
folder, kind = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
job = holdfast.Job(no_dist=True, timeout=20)
small, large = {"w": torch.ones(3_000_000)}, {"w": torch.ones(9_000_000)}
"""
INTERRUPTED = """
run = holdfast.Checkpoints(folder, job=job)
run.save(1, small).committed()
# A real SIGINT at one place.
def where(frame, event, arg):
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    if kind == "unmapped":
        hit = event == "c_return" and name == "_detach" and getattr(arg, "__name__", "") == "close"
    else:
        hit = event == "call" and name == kind and file.endswith("pending.py")
    if hit:
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)
sys.setprofile(where)
try:
    run.save(2, large)
    sys.exit("it was not interrupted")
except KeyboardInterrupt:
    pass
for attempt in range(2):
    try:
        run.save(3, small).committed()
        break
    except holdfast.errors.HoldfastError:  # of the interrupted save, on all ranks
        assert not attempt
run.close()
assert run.steps() == [1, 3], run.steps()
assert bool((holdfast.load(folder + "/step-00000003")["w"] == 1).all())
"""
FORKED = """
with holdfast.Checkpoints(folder, job=job) as run:
    run.save(1, {"w": torch.ones(30_000_000)})
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        if kind == "leaves":
            sys.exit(7)
        try:
            run.close() if kind == "closes" else run.save(2, small)
        except holdfast.errors.BadInput as error:
            assert "was forked" in str(error)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    run.save(3, small).committed()
assert run.steps() == [1, 3], run.steps()
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("tests.support.run_code") as made:
        yield made


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        *((INTERRUPTED, kind) for kind in ("unmapped", "_attempt")),
        *((FORKED, kind) for kind in ("leaves", "saves")),
        *wide([(INTERRUPTED, "start"), (INTERRUPTED, "has_staged"), (FORKED, "closes")]),
    ],
)
def test_the_program_goes_on(program: str, kind: str, forks: Forks, tmp_path: Path) -> None:
    words = [HEAD + program, str(tmp_path / "run"), kind]
    ended = forks.run(words, [0], 1, tmp_path / "terminal", 120.0)
    assert ended.codes == [0], ended.said
