"""The judge of who is lost, rule by rule; and that there is no second one."""

from __future__ import annotations

import ast
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path as File
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast._core.roster.links import Path
from holdfast._core.roster.lost import (
    AWAY,
    DESTROYED,
    PROGRAM_ENDED,
    Gone,
    Seen,
    Signs,
    Stalls,
    by_kernel,
    cut_off,
    end_told,
    ended_since,
    host_of_store,
    judge,
)
from holdfast._core.roster.memory import MemoryRoster
from holdfast._core.roster.presence import Vitals, at_key
from holdfast._core.roster.process import ENDED, Identity, this_process
from holdfast._groups.session.monitor import Monitor
from holdfast.errors import BadInput, HoldfastError, RosterLost
from holdfast.testing import ManualClock

FAR = Identity(1, "h", 7, machine="other", started="1", token="t")
HERE = this_process(1)
ENDED_HERE = msgspec.structs.replace(HERE, started="1")


def judged(who: Identity, said: str = "", gone: Gone | None = None, beat: int = 5) -> Seen:
    at = msgspec.to_builtins(Vitals(who, beat=beat, ended=said))
    return judge(at, None if gone is None else msgspec.to_builtins(gone))


@pytest.mark.parametrize(
    ("who", "said", "gone", "ended", "there", "past_end"),
    [
        (HERE, "", None, "", True, False),
        (ENDED_HERE, "", None, ENDED, False, True),
        (FAR, "", None, "", None, False),
        (FAR, "", Gone("t", ENDED, beat=5), ENDED, False, True),
        (FAR, "", Gone("t", ENDED, beat=4), "", None, False),
        (FAR, "", Gone("another", ENDED, beat=9), "", None, False),
        (HERE, PROGRAM_ENDED, None, PROGRAM_ENDED, True, False),
        (FAR, PROGRAM_ENDED, None, PROGRAM_ENDED, None, False),
        (ENDED_HERE, PROGRAM_ENDED, None, PROGRAM_ENDED, False, True),
        (FAR, PROGRAM_ENDED, Gone("t", ENDED, beat=5), PROGRAM_ENDED, False, True),
    ],
    ids=[
        "2: alive",
        "2: its process has ended",
        "5: on another host",
        "2: a witness",
        "8: it has spoken since",
        "8: of an earlier process",
        "3: left",
        "3: left, elsewhere",
        "3: left, and ended",
        "3: left, and a witness",
    ],
)
def test_what_is_known_of_a_rank(
    who: Identity, said: str, gone: Gone | None, ended: str, there: bool | None, past_end: bool
) -> None:
    seen = judged(who, said, gone)
    assert (seen.ended, seen.there) == (ended, there)
    assert seen.is_lost() == bool(ended)
    assert seen.is_lost(past_end=True) == past_end
    assert ended_since(seen) == ended


def test_of_a_rank_that_has_never_spoken_nothing_is_known() -> None:
    for message in (None, {"not": "a message"}):
        seen = judge(message, msgspec.to_builtins(Gone("t", ENDED)))
        assert seen == Seen()
        assert not seen.is_lost()
        assert ended_since(seen) == ""


def test_an_end_that_was_found_here_counts_before_it_is_published() -> None:
    """On another host: no kernel of this one tells that the process has ended."""
    found, said = Gone("t", ENDED, beat=5), Gone("t", PROGRAM_ENDED, clean=True, beat=5)
    assert judged(FAR).told(found).is_lost(past_end=True)
    assert judged(FAR, PROGRAM_ENDED).told(said).is_lost()
    assert not judged(FAR, PROGRAM_ENDED).told(said).is_lost(past_end=True), "its process may still come"


@pytest.mark.parametrize("state", ["T", "t", "D", "S", "R"])
def test_what_holds_a_process_is_only_told(state: str) -> None:
    seen = Seen(Vitals(HERE), there=True, state=state)
    assert not seen.is_lost()
    assert seen.held().startswith("it is ") == (state in "TtD")
    assert seen.held().endswith(f"(state {state})") == (state in "TtD")


@pytest.mark.parametrize(
    ("seen", "success", "cause"),
    [
        (Seen(), False, False),
        (Seen(ended=ENDED), False, False),
        (Seen(ended="its process has ended with exit code 0"), True, False),
        (Seen(ended="its process has ended with exit code 1"), False, True),
        (Seen(ended="its process was killed by SIGKILL"), False, True),
        (Seen(ended=PROGRAM_ENDED), True, False),
        (Seen(ended=DESTROYED), True, False),
        (Seen(ended="its program exited with code 0 (SystemExit)"), True, False),
        (Seen(ended="its program exited with code 3 (SystemExit)"), False, True),
        (Seen(ended="its program was ended by KeyError"), False, True),
        (Seen(ended=ENDED, gone=Gone("t", ENDED, clean=True), exited_with_0=True), True, False),
    ],
)
def test_which_ends_are_a_success_and_which_may_be_a_cause(seen: Seen, success: bool, cause: bool) -> None:
    assert (seen.is_success(), seen.is_cause()) == (success, cause)


def test_the_word_of_a_rank_is_told_before_that_of_a_witness() -> None:
    witness = Gone("t", ENDED, beat=5)
    assert end_told(judged(FAR)) is None
    assert end_told(judged(FAR, gone=witness)) == witness
    assert end_told(judged(FAR, PROGRAM_ENDED, witness)) == Gone("t", PROGRAM_ENDED, clean=True, beat=5)


def test_a_second_look_finds_a_sign_of_life() -> None:
    signs, now = Signs(FAR, 0.0), 0.0
    vitals = Vitals(FAR, beat=5)
    while not (how := signs.look(Path.ENDED, vitals, 120.0, 1.0, now)):
        now += 1.0
    assert how == ENDED
    assert signs.confirm(how, Vitals(FAR, beat=6), {}, 1.0) is None
    assert signs.confirm(how, None, {}, 1.0) is None, "the store can't be read"
    assert signs.confirm(how, vitals, {2: Seen(Vitals(HERE, hears=[1]))}, 1.0) is None
    assert signs.confirm(how, vitals, {2: Seen(Vitals(HERE, hears=[3]))}, 1.0) == Gone("t", ENDED, beat=5)


REFUSED, IN_ORDER = {"refused": True}, {"refused": True, "ended": True}


@pytest.mark.parametrize(
    ("who", "details", "silent", "is_heard", "ended"),
    [
        (HERE, IN_ORDER, 500.0, False, ""),
        (ENDED_HERE, REFUSED, 0.0, False, ENDED),
        (ENDED_HERE, {}, 500.0, False, ""),
        (FAR, REFUSED, 119.0, False, ""),
        (FAR, REFUSED, 120.0, False, ENDED),
        (FAR, REFUSED, 120.0, True, ""),
        (FAR, IN_ORDER, 0.0, False, ENDED),
        (FAR, IN_ORDER, 0.0, True, ""),
        (FAR, {"ended": True}, 500.0, False, ""),
    ],
)
def test_whether_the_host_of_the_store_has_ended(
    who: Identity, details: dict[str, bool], silent: float, is_heard: bool, ended: str
) -> None:
    error = RosterLost("The message store can't be reached.", details=details)
    assert host_of_store(Vitals(who), error, silent, 120.0, is_heard).ended == ended


def test_the_end_of_the_stores_host_with_exit_code_0_is_no_failure() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    fields = File(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    who = msgspec.structs.replace(HERE, pid=pid, started=fields[19])
    assert by_kernel(who) == Seen(
        ended="its process has ended with exit code 0", there=False, exited_with_0=True
    )
    assert not host_of_store(Vitals(who), RosterLost("", details=REFUSED), 0.0, 120.0, False).ended
    os.waitpid(pid, 0)


def test_all_ranks_of_a_host_are_cut_off_with_one() -> None:
    seen = {
        rank: Seen(Vitals(msgspec.structs.replace(FAR, machine=machine)), ended)
        for rank, machine, ended in [(1, "a", ""), (2, "a", ""), (3, "b", ""), (4, "a", ENDED), (5, "", "")]
    } | {6: Seen()}
    assert cut_off(seen, {1}) == {1, 2}
    assert cut_off(seen, {4}) == {1, 2}
    assert cut_off(seen, {5, 6}) == {5, 6}
    assert cut_off(seen, set()) == set()


def test_a_stall_is_measured_from_the_last_change() -> None:
    clock = ManualClock()
    stalls = Stalls(5.0, clock)
    for at in range(20):
        assert stalls.note(1, {"bytes": at}) is None
        clock.advance(4.0)
    assert stalls.note(1, {"bytes": 19}) is None
    clock.advance(0.9)
    assert stalls.note(1, {"bytes": 19}) is None
    clock.advance(0.1)
    assert stalls.note(1, {"bytes": 19}) == pytest.approx(5.0)
    assert stalls.note(2, {"bytes": 19}) is None
    assert stalls.note(1, {"bytes": 0}) is None, "a next call counts from 0 again"
    assert [stalls.is_near(1, seconds) for seconds in (1.0, 100.0)] == [False, False]
    clock.advance(3.0)
    assert [stalls.is_near(1, seconds) for seconds in (1.0, 100.0)] == [False, True]
    with pytest.raises(BadInput, match="stall_timeout"):
        Stalls(-1.0)


def test_without_a_wish_no_rank_stalls() -> None:
    clock = ManualClock()
    stalls = Stalls(None, clock)
    for _ in range(3):
        assert stalls.note(1, 0) is None
        assert not stalls.is_near(1, 100.0)
        clock.advance(1e6)


def test_a_session_does_not_count_the_absence_of_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of a container were frozen: nobody has renewed a message meanwhile."""
    failures: list[HoldfastError] = []
    roster, now = MemoryRoster(0, 2), 1000.0
    roster.put(at_key(1), msgspec.to_builtins(Vitals(FAR, beat=1)))
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monitor = Monitor(roster, "session", None, 60.0, failures.append)
    monkeypatch.setattr(monitor.presence.beacon.watch, "near", lambda: [1])
    monitor.look()
    now += 500.0 + AWAY
    monitor.look()
    assert monitor.failure is None
    for _ in range(58):
        now += 1.0
        monitor.look()
    assert monitor.failure is None
    now += 2.0
    monitor.look()
    assert "silent for 6" in str(monitor.failure)


# -- one judge --------------------------------------------------------------------------------------

ROOT = File(holdfast.__file__).parent
WORDS = {"ENDED", "HELD", "GONE", "UNSEEN", "OOM", "stat"}
CALLS = {"state", "how_it_ended", "exited_with_0", "waitstatus_to_exitcode", "pidfd_open"}
VERDICT = {"ended", "gone", "there", "state", "exited_with_0"}
SENTENCES = (
    "its process has ended",
    "its process was killed",
    "its program has ended",
    "its host has not answered",
    "its port refuses",
    "it has destroyed its process group",
)
ALLOWED = {
    "_core/roster/neighbours.py": {"pidfd_open()"},  # wakes the heart, and proves nothing
    "_core/background/writer_client.py": {"HELD", "stat"},  # of its own child, whose end Popen tells
    # It reads what the judge has written to a log.
    "_watch/own_words.py": {
        "its process has ended",
        "its program has ended",
        "its host has not answered",
        "it has destroyed its process group",
    },
    "_watch/why.py": {"its program has ended"},  # by its stack, in files: no process is looked at
}
"""What may be used outside of the judge and its evidence, and why it judges nobody."""


OF_THE_CORE = re.compile(r"holdfast\._core(\.roster\b.*|\.\w+)?$")
"""What may give the names of `roster`: itself, and what exports names of the core."""


def _evidence(tree: ast.AST) -> Iterator[str]:
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="holdfast._core.roster", names=names):
                yield from (one.name for one in names if one.name in ("process", "links", "lost"))
            case ast.ImportFrom(module=str(module), names=names) if OF_THE_CORE.match(module):
                yield from (one.name for one in names if one.name in {*WORDS, "Path", "judge", "*"})
            case ast.Import(names=names):
                yield from (one.name for one in names if one.name.startswith("holdfast._core.roster"))
            case ast.Call(ast.Attribute(_, name)) if name in CALLS:
                yield f"{name}()"
            case ast.Call(ast.Attribute(_, "kill"), [_, ast.Constant(0)]):
                yield "kill(0)"
            case ast.Call(ast.Attribute(_, "_replace"), _, words) if {one.arg for one in words} & VERDICT:
                yield "_replace()"
            case ast.Call(ast.Name("Gone" | "Seen" as name), args, words) if args or words:
                yield f"{name}()"
            case ast.Call(
                ast.Attribute(ast.Attribute(_, "details"), "get"), [ast.Constant("refused" | "ended")]
            ):
                yield "details"
            case ast.Subscript(ast.Attribute(_, "details"), ast.Constant("refused" | "ended")):
                yield "details"
            case ast.JoinedStr([ast.Constant("/proc/"), ast.FormattedValue(), ast.Constant("/stat")]):
                yield "/proc/PID/stat"
            case ast.Constant(str(text)) if id(node) not in docs:
                yield from (one for one in SENTENCES if one in text)


def test_nobody_else_judges() -> None:
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        name = str(file.relative_to(ROOT))
        used = set(_evidence(ast.parse(file.read_text())))
        if name not in ("_core/roster/lost.py", "_core/roster/process.py", "_core/roster/links.py") and used:
            found[name] = used
    assert found == ALLOWED, "ask `_core/roster/lost.py`, or put the rule there"


@pytest.mark.parametrize(
    "sixth",
    [
        "from holdfast._core.roster.process import ENDED",
        "from holdfast._core.roster.process import Identity, stat",
        "from holdfast._core.roster import process",
        "import holdfast._core.roster.process as process",
        "from holdfast._core.roster.links import Path",
        "from holdfast._core.roster.lost import judge",
        "from holdfast._core import judge",
        "who.state()",
        "if not seen.vitals.who.exited_with_0(): pass",
        "why = known.who.how_it_ended()",
        "os.kill(pid, 0)",
        "code = os.waitstatus_to_exitcode(status)",
        "Seen(vitals, 'it is silent')",
        "lost = Gone(who.token, 'it is silent')",
        "seen._replace(there=False)",
        "error.details.get('refused')",
        "error.details['ended']",
        "open(f'/proc/{pid}/stat')",
        "note = f'its process has ended after {seconds} s'",
    ],
)
def test_a_sixth_place_is_found(sixth: str) -> None:
    code: Any = f'"""Its process has ended."""\ndef f():\n    """its process has ended"""\n    {sixth}'
    assert list(_evidence(ast.parse(code)))


@pytest.mark.parametrize(
    "asks",
    [
        "from holdfast._core.roster.lost import Seen, by_kernel, see",
        "from holdfast._core.roster.process import Identity, this_process",
        "seen = Seen()",
        "if seen.is_lost(past_end): raise failed(seen.ended)",
        "by_kernel(who).there",
    ],
)
def test_who_asks_is_no_judge(asks: str) -> None:
    assert not list(_evidence(ast.parse(asks)))
