"""What Holdfast has written to a log is evidence for `holdfast diagnose`, in the words in which it writes it."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

import holdfast
from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.operation import agree
from holdfast._core.roster.memory import Board, MemoryRoster
from holdfast._core.roster.process import Identity
from holdfast._groups.session.blame import in_words
from holdfast._tools.cli.diagnose import show
from holdfast._watch.answering import summary
from holdfast._watch.collector import Collector
from holdfast._watch.diagnose import diagnose
from holdfast._watch.dumps import read_roll_call
from holdfast._watch.evidence import Ending, Evidence, Frame, SourceLine
from holdfast._watch.places import known_of
from holdfast._watch.read import read_all
from holdfast._watch.verdict import Diagnosis, Who
from holdfast.errors import DeadlineExceeded, HoldfastError, RankInfo
from tests.protocol.test_liveness import HOUR, Wait, seen
from tests.watch.test_roll_call import answer

OVER = "The collective of the last roll call {}, after 31 s."
WORLD, FOLDER = 8, "run/roll-calls/20261129-073627-0"
MAIN = Frame("train", "/job/train.py", 90)


def of(folder: Path, *lines: str) -> Diagnosis:
    (folder / "job.log").write_text("\n".join(lines) + "\n")
    return diagnose(read_all([str(folder / "job.log")]))


def who_of(folder: Path, *lines: str) -> Who:
    found = of(folder, *lines).who
    assert found is not None
    return found


def called(absent: set[int], ended: str = "") -> Evidence:
    """The evidence of a roll call: all but some ranks wait in an all_reduce."""
    collector = Collector()
    waits = (Frame("all_reduce", "/opt/torch/distributed/distributed_c10d.py", 3000), MAIN)
    works = (Frame("plan", "/job/planner.py", 5), MAIN)
    for rank in range(WORLD):
        late = rank in absent
        read_roll_call(answer(rank, WORLD, works if late else waits, not late), collector, f"rank-{rank}")
        if late and ended:
            collector.note_ending(rank, Ending(ended, SourceLine("kernel")))
    return collector.evidence()


@pytest.mark.parametrize(
    "prefix",
    ["", "WARNING:holdfast:", "(WorkerDict pid=3851, ip=10.0.0.1) "]
    + ["[default0]:", "[rank0]:", "[trainer0]:", "[0]:", "[rank0]: ", "0: "],  # of torchrun, and of others
)
@pytest.mark.parametrize(("absent", "ended"), [({2}, ""), ({2, 5, 6}, ""), ({2}, "killed by SIGKILL")])
def test_a_roll_call_in_a_log_is_the_verdict(
    absent: set[int], ended: str, prefix: str, tmp_path: Path
) -> None:
    evidence = called(absent, ended)
    first = diagnose(evidence)
    assert first.who is not None
    text = summary("a collective has taken 20 of 40 s", first, evidence, FOLDER)
    lines = [line if line.startswith(" ") else prefix + line for line in text.splitlines()]
    if not prefix.startswith("W"):
        lines = [prefix + line.removeprefix(prefix) for line in lines]
    found = of(tmp_path, "loss 1.0", *lines, "loss 2.0")
    assert found.who is not None
    assert (found.who.summary, found.who.basis) == (first.who.summary, "holdfast")
    assert (found.who.waiting, found.who.absent) == (first.who.waiting, first.who.absent)
    assert (found.who.ranks, found.who.known) == (tuple(sorted(absent)), first.who.known)
    assert (found.why and (found.why.kind, found.why.summary)) == (
        first.why and (first.why.kind, first.why.summary)
    )
    assert any(FOLDER in wanted for wanted in found.collect)
    assert found.world_size == WORLD
    # Who has answered is heard of, whatever its own lines tell.
    assert (found.heard_of, found.is_complete) == (tuple(range(WORLD)), True)
    # Each rank has one line, and its verb agrees.
    assert text.count("at plan (") == 1
    assert ": wait at train (" in text


def test_who_has_not_answered_a_roll_call_is_not_heard_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "Roll call of 5 of 8 ranks, because a collective has taken 20 of 40 s:"
    found = of(
        tmp_path, text, "  ranks 1, 3-4: no answer. py-spy dump --pid PID, on its host, tells where it is."
    )
    assert (found.heard_of, found.is_complete) == ((0, 2, 5, 6, 7), False)
    show(found)
    assert capsys.readouterr().out.startswith(
        "heard of: ranks 0, 2, 5-7 of 8; no line of the others tells anything\n"
    )
    # Lines are lacking: which have answered is not known.
    assert of(tmp_path, text).heard_of == ()
    many = known_of(Evidence({}, world_size=4), [1, 2])
    assert [(one.ranks, one.text) for one in many] == [((1, 2), "no line of them tells anything")]


def test_a_wait_that_is_over_is_no_verdict(tmp_path: Path) -> None:
    evidence = called({2})
    lines = summary("a collective has taken 20 of 40 s", diagnose(evidence), evidence, "").splitlines()
    assert of(tmp_path, *lines, OVER.format("is over")).who is None
    failed = who_of(tmp_path, *lines, OVER.format("has failed by its timeout"))
    assert (failed.ranks, "has ended" in failed.summary) == ((2,), False)
    # It may have come: nobody is named, and no cause is told.
    for ended in ("has ended (whether by its timeout is not known)", "has ended, or failed by its timeout"):
        found = of(tmp_path, *lines, OVER.format(ended))
        assert found.who is not None
        assert (found.who.ranks, found.who.absent, found.why) == (None, (2,), None)
        assert found.who.summary.endswith("; that has ended, whether by a timeout is not known")
        # A timeout of a rank that has waited tells.
        late = who_of(tmp_path, *lines, OVER.format(ended), *GLOO.format(3, 3252, LATE).splitlines())
        assert (late.ranks, late.summary) == (failed.ranks, failed.summary)
    # A later call is about another wait.
    other = called({3})
    later = summary("a collective has taken 20 of 40 s", diagnose(other), other, "").splitlines()
    assert who_of(tmp_path, *lines, *later).ranks == (3,)


def test_a_wait_of_holdfast_and_its_error_are_the_verdict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board, raised = Board(), list[HoldfastError]()

    def be(rank: int) -> None:
        roster = MemoryRoster(rank, 3, board)
        agree("meeting", "memory:x", lambda said: 0, begin_call(holdfast.Job(roster=roster, timeout=20)))
        if rank == 2:
            threads[0].join()
            return
        try:
            job = holdfast.Job(roster=roster, timeout=1.5, report_after=0.3)
            agree("choice", "memory:y", lambda said: 0, begin_call(job))
        except HoldfastError as error:
            raised.append(error)

    threads = [threading.Thread(target=be, args=(rank,), name=f"rank {rank}") for rank in range(3)]
    with caplog.at_level(logging.WARNING, "holdfast"):
        for thread in threads:
            thread.start()
            time.sleep(0.01)
        for thread in threads:
            thread.join(30)
    reported = next(text for text in caplog.messages if " has waited " in text)
    error = next(one for one in raised if isinstance(one, DeadlineExceeded))
    for line in (
        f"WARNING:holdfast:{reported}",
        f"rank 1 ends: {error.message}",
        f"[rank0]: holdfast.errors.DeadlineExceeded: {error}",
    ):
        found = who_of(tmp_path, line)
        assert (found.ranks, found.absent, found.basis) == ((2,), (2,), "holdfast"), line
        assert "for rank 2 to " in found.summary
        assert "its thread 'rank 2' is at" in found.known[0].text
        assert not found.known[0].text.endswith((".", ")"))
        assert not of(tmp_path, line).collect  # no flight records of NCCL, as no collective hangs


def test_ranks_that_came_late_are_no_longer_absent(tmp_path: Path) -> None:
    waits = "save of step 3: rank 0 has waited 30 s for 2 ranks to write: rank 2 (host a, pid 3); rank 4 (host b, pid 5): it is stopped. It waits on, for up to 9 s."  # fmt: skip
    both = who_of(tmp_path, waits)
    assert (both.ranks, [place.text for place in both.known]) == ((2, 4), ["it is stopped"])
    late = who_of(tmp_path, waits, "save of step 3: rank 2 came after 31 s.")
    assert (late.ranks, [place.text for place in late.known]) == ((4,), ["it is stopped"])
    assert of(tmp_path, waits, "save of step 3: rank 2, rank 4 came after 31 s.").who is None
    many = waits.replace("for 2 ranks", "for 12 ranks").replace("stopped.", "stopped; and 10 more.")
    found = who_of(tmp_path, many)
    assert (found.ranks, found.absent) == (None, (2, 4))
    assert found.summary == "rank 0 has waited 30 s for ranks 2, 4 and others to write"


ENDS = [
    ("ended", "its program has ended"),
    ("ended", "it has destroyed its process group"),
    ("ended", "its process has ended"),
    ("ended", "its process has ended with exit code 0"),
    ("unreachable", "its host has not answered for 12 s"),
    ("", "its process has ended with exit code 3"),  # its error may follow from another's
    ("", "its port refuses connections, and nothing was heard of it for 12 s"),
]


@pytest.mark.parametrize(("kind", "how"), ENDS)
def test_a_call_that_failed_by_the_end_of_a_rank_tells_the_cause(kind: str, how: str, tmp_path: Path) -> None:
    error = Wait(deadline=HOUR).go(60, lambda now, rank: seen(rank, ended=how))
    both = Wait(deadline=9).go(60, lambda now, rank: seen(rank, ended=how if rank == 2 else ""), (1, 2))
    gone = RankInfo(1, "h", 101, "idle since save of x: committed", 0.4, how)
    by_head = f"holdfast.errors.RankFailed: save of x failed after 8.4 s: {gone}. Nothing was committed."
    for line in (f"[rank0]: holdfast.errors.RankFailed: {error}", by_head):
        found = of(tmp_path, line)
        assert (found.why and found.why.kind) == (kind or None), line
        assert found.who is not None
        assert found.who.ranks == (1,)
        assert found.why is None or how in found.why.summary
    # Its end is no cause if it failed itself.
    failed = "[rank1]: Traceback (most recent call last):\n[rank1]: RuntimeError: Connection reset by peer"
    assert [of(tmp_path, failed, by_head).why] == [None] or kind == "unreachable"
    assert of(tmp_path, str(both)).who is not None


def test_a_circle_and_a_stopped_rank_in_an_error_are_causes(tmp_path: Path) -> None:
    part = {"title": "load of y", "phase": "entered", "waiting_for": [0], "blocks": True}
    circle = Wait(deadline=HOUR).go(60, lambda now, rank: seen(rank, beat=int(now), other=part))
    for at in ("", "; its main thread is at train.py:9 save"):
        why = of(tmp_path, f"{str(circle).rpartition('. ')[0].replace('load of y.', f'load of y{at}.')}.").why
        assert why is not None
        assert (why.kind, why.summary.partition("; ")[0]) == ("cycle", "rank 1 waits for rank 0 in load of y")
        assert "rank 0 waited for rank 1 to write its part" in why.summary
    stopped = Wait().go(90, lambda now, rank: seen(rank, state="T"))
    assert (found := of(tmp_path, str(stopped)).why) is not None
    assert (found.kind, found.summary) == ("stopped", "rank 1: it is stopped by a signal (state T)")
    # Of two ranks only one is stopped: the other may be what all wait for.
    both = Wait().go(90, lambda now, rank: seen(rank, state="T" if rank == 2 else ""), (1, 2))
    assert of(tmp_path, str(both)).why is None


def test_the_ranks_that_a_session_has_missed_are_the_verdict(tmp_path: Path) -> None:
    missing = RankInfo(2, "a", 7, "session: in its body", 1.2, at="its main thread is at h.py:4 load")
    error = in_words(RuntimeError("Timed out waiting 40000ms for send"), Identity(3, "a", 9), (missing,))
    found = who_of(tmp_path, f"rank 0 ends: {error.message}")
    assert (found.ranks, found.known[0].text) == ((2,), "its main thread is at h.py:4 load")
    assert found.summary == "a collective of rank 3 failed; not in it: rank 2"
    # The roll call before the same timeout tells more.
    evidence = called({2})
    lines = summary("a collective has taken 20 of 40 s", diagnose(evidence), evidence, "").splitlines()
    kept = who_of(tmp_path, *lines, f"rank 0 ends: {error.message}")
    assert "wait in all_reduce #7" in kept.summary


GLOO = """[rank{0}]: Traceback (most recent call last):
[rank{0}]:   File "/job/hang.py", line 13, in <module>
[rank{0}]:     dist.all_reduce(x)
[rank{0}]:   File "/opt/torch/distributed/distributed_c10d.py", line {1}, in all_reduce
[rank{0}]:     work.wait()
[rank{0}]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] {2}"""
LATE = "Timed out waiting 40000ms for recv operation to complete"
LOST = "Connection closed by peer [127.0.0.1]:9386"


@pytest.mark.parametrize("role", ["default", "rank", "trainer", ""])
def test_torchrun_marks_what_torch_has_marked(role: str, tmp_path: Path) -> None:
    # The ranks 8-11 of a job are 0-3 on their host. `[3]:` may be one, or the other.
    errors = {rank: GLOO.format(rank + 8, 3252, LATE) for rank in (0, 1, 3)}
    prefixed = [f"[{role}{rank}]:{line}" for rank, text in errors.items() for line in text.splitlines()]
    found = who_of(tmp_path, "WORLD_SIZE=12", *prefixed)
    assert found.waiting == (8, 9, 11)
    lost = [f"[{role}2]:{line}" for line in GLOO.format(10, 3252, LOST).splitlines()]
    assert "ranks 0-7" in who_of(tmp_path, "WORLD_SIZE=12", *prefixed, *lost).summary


def test_timeouts_of_gloo_show_who_has_none(tmp_path: Path) -> None:
    others = [GLOO.format(rank, 3252, LATE) for rank in (0, 1, 3)]
    found = who_of(tmp_path, *others)
    assert (found.waiting, found.ranks, found.basis) == ((0, 1, 3), (2,), "log")
    assert [place.text for place in found.known] == ["no line of it tells anything"]
    # Who has lost its peer may have been in the collective, and so may have ranks that timed out elsewhere.
    assert of(tmp_path, *others, GLOO.format(2, 3252, LOST)).who is None
    assert of(tmp_path, *others[:2], GLOO.format(3, 99, LATE)).who is None
    # Most have none: these may have been elsewhere, and nobody is named.
    few = who_of(tmp_path, "WORLD_SIZE=8", *others)
    assert few.ranks is None
    assert "the log has no timeout of ranks 2, 4-7" in few.summary
