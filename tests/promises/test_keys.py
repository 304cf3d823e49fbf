"""Every key of the message store: what a stranger reaches who copies, forges or deletes it.

docs/security.md has the table; each of its cells is a test here. Two ranks are threads over one TCPStore, and a
stranger is faster than both.
"""

from __future__ import annotations

import ast
import fnmatch
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._core.base.values import Message
from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.operation import agree
from holdfast._core.protocol.rendezvous import life_of
from holdfast._core.protocol.rounds import _DUTIES
from holdfast._core.protocol.task import CollectiveTask
from holdfast._core.roster.beacon import beacon_of
from holdfast._core.roster.lost import see
from holdfast._core.roster.whereabouts import Inquiry
from holdfast._groups.session.monitor import Monitor
from holdfast._watch import roll_call
from holdfast._watch.answering import Answering
from holdfast._watch.own_stacks import OwnEvidence
from holdfast.errors import HoldfastError, RankFailed
from tests.docs.pages import ROOT, table, text
from tests.support.strangers import Attacked, Stranger, job_of, on_each
from tests.support.waiting import wait_until

SECONDS = {"nothing": 30.0, "believed": 30.0, "fails": 1.0, "late": 4.0}
"""Of the deadline of a call, by what the table says: what fails, mostly does so by its deadline."""
RIGHT, WRONG = "right", "wrong"


# -- what the ranks do: each returns RIGHT on both ranks unless it is attacked ------------------


def meet(roster: Attacked, key: str) -> None:
    if not roster.wait(key, roster.seconds):
        raise HoldfastError("The other rank did not come.")


def save(roster: Attacked, folder: Path, number: int) -> str:
    state = {"w": torch.ones(4), f"own{roster.rank}": torch.full((3,), float(number))}  # lists are asked for
    holdfast.save(state, folder / "saved", job=job_of(roster, timeout=roster.seconds))
    return RIGHT


def check_saved(folder: Path, number: int) -> None:
    """What is committed is whole, and of this save or of the one before."""
    found = {name: torch.zeros(size) for name, size in (("w", 4), ("own0", 3), ("own1", 3))}
    if (folder / "saved" / "index.safetensors").exists():
        holdfast.load(found, folder / "saved", job=holdfast.Job(no_dist=True))
        value = float(found["own0"][0])
        assert value in (number, number - 1)
        assert [tensor.tolist() for tensor in found.values()] == [[1.0] * 4, [value] * 3, [value] * 3]


def load(roster: Attacked, folder: Path, number: int) -> str:
    found = {"w": torch.zeros(4)}
    holdfast.load(found, folder.parent / "there", job=job_of(roster, timeout=roster.seconds))
    return RIGHT if found["w"].tolist() == [2.0] * 4 else WRONG


def choice(roster: Attacked, folder: Path, number: int) -> str:
    call = begin_call(job_of(roster, timeout=roster.seconds))
    chosen = agree(
        "choice", "memory:x", lambda said: sorted(map(str, said.values())), call, f"r{roster.rank}"
    )
    return RIGHT if chosen == ["r0", "r1"] else WRONG


class Told(CollectiveTask):
    """Each rank is told a number, and reports it."""

    got: Message

    def contribute(self) -> Message:
        return {"mine": self.roster.rank}

    def decide(self, contributions: dict[int, Message]) -> dict[int, Message]:
        return {rank: {"yours": one["mine"] + 10} for rank, one in contributions.items()}

    def execute(self, answer: Message) -> Message:
        self.got = answer
        return {"got": answer["yours"]}

    def finish(self, reports: dict[int, Message]) -> Message:
        return {"all": [reports[rank]["got"] for rank in sorted(reports)]}


def task(roster: Attacked, folder: Path, number: int) -> str:
    made = Told("task", "memory:task", begin_call(job_of(roster, timeout=roster.seconds)))
    return RIGHT if made.run() == {"all": [10, 11]} and made.got == {"yours": roster.rank + 10} else WRONG


def due(roster: Attacked, folder: Path, number: int) -> str:
    job, ends = job_of(roster, timeout=roster.seconds), time.monotonic() + roster.seconds
    with holdfast.Checkpoints(folder / "run", save_every=timedelta(seconds=0.1), job=job) as run:
        for step in range(10**6):
            if run._times._ended is not None:  # the next question warns of it
                return WRONG
            if run.should_save(step):
                return RIGHT
            if time.monotonic() >= ends:
                break
            time.sleep(0.005)
    raise HoldfastError("No step was due.")


def stop(roster: Attacked, folder: Path, number: int) -> str:
    ends = time.monotonic() + roster.seconds
    with holdfast.Preemption(signals=(), budget=roster.seconds, job=job_of(roster)) as preemption:
        if roster.rank == 0:
            preemption.request("the test")
        while not preemption.should_stop():
            if time.monotonic() >= ends:
                raise HoldfastError("It was not stopped.")
            time.sleep(0.005)
        return RIGHT if preemption.reason == "the test on rank 0" else WRONG


def session(roster: Attacked, folder: Path, number: int) -> str:
    monitor = Monitor(roster.lane("session"), f"session/{number}", None, None, lambda error: None)
    monitor.start()
    try:
        monitor.say("closing")
        ends = time.monotonic() + roster.seconds
        if monitor.wait_for("closing", [1 - roster.rank], ends):
            raise HoldfastError("The other rank was not heard.")
        word = monitor.decide("end", "together")
        if roster.rank == 0:
            monitor.fail(RankFailed("boom", rank=0))
        while monitor.failure is None and time.monotonic() < ends:
            monitor.look()
            time.sleep(0.005)
        if monitor.failure is None:
            raise HoldfastError("No failure was heard.")
        return RIGHT if word == "together" and "boom" in str(monitor.failure) else WRONG
    finally:
        monitor.stop()
        monitor.leave()


def show(roster: Attacked, folder: Path, number: int) -> str:
    """Rank 1 shows itself, and rank 0 looks at it."""
    if roster.rank == 1:
        beacon_of(roster).send()
        roster.put(f"test/shown{number}", {})
        return RIGHT
    meet(roster, f"test/shown{number}")
    seen = see(roster, [1])[1]
    # It may not be seen until it shows itself again, within a second: then it is waited for.
    return WRONG if seen.ended else RIGHT


def where(roster: Attacked, folder: Path, number: int) -> str:
    """Rank 0 asks rank 1 where it is."""
    answering = beacon_of(roster).answering
    if roster.rank == 1:
        meet(roster, f"test/asked{number}")
        answering.beat(roster, [])
        roster.put(f"test/answered{number}", {})
        return RIGHT
    beacon_of(roster).send()
    inquiry = Inquiry(roster)
    inquiry.ask([1], {})
    roster.put(f"test/asked{number}", {})
    meet(roster, f"test/answered{number}")
    place = inquiry.answers([1], {}, 0.0).get(1, "")
    if not place:
        raise HoldfastError("No answer.")
    return WRONG if "forged" in place else RIGHT


def late(roster: Attacked, folder: Path, number: int) -> str:
    """Rank 1 comes once rank 0 tells that it is late, in each of the runs."""

    def is_told() -> bool:
        with roster.stranger.faster:
            return len(fnmatch.filter(roster.stranger.keys, ROWS["K/told/<n>"].pattern)) >= number

    if roster.rank == 1:
        wait_until(is_told)
    call = begin_call(job_of(roster, timeout=30.0, report_after=0.2))
    chosen = agree("late", "memory:late", lambda said: len(said), call)
    return RIGHT if chosen == 2 else WRONG


MADE: dict[tuple[str, int], Answering] = {}


def called(calls: roll_call.RollCall, roster: Attacked) -> Answering | None:
    """Let a rank look for a roll call, or make it; return its answer, before it is given."""
    calls._look(roster.base(), beacon_of(roster))
    return MADE.pop((roster.job(), roster.rank), None)


def roll(roster: Attacked, folder: Path, number: int) -> str:
    """Rank 0 calls the roll, and rank 1 answers."""
    beacon = beacon_of(roster)
    calls = roll_call.RollCall(roster)
    calls._number = number
    if roster.rank == 0:
        calls._waiting_call = ("asked", "the test")
        answering = called(calls, roster)
        roster.put(f"test/called{number}", {})
        meet(roster, f"test/answered{number}")
        found = answering._answers([1]).get(1) if answering is not None else None
        roster.put(f"roll/{number}/over", {})
        if found is None:
            raise HoldfastError("No answer.")
        return RIGHT if found["roll_call"]["busy"] == 0.25 else WRONG
    meet(roster, f"test/called{number}")
    answering = called(calls, roster)
    if answering is not None:
        look = OwnEvidence(1, beacon.operations)
        answering._put(1, look.found.__class__(1, busy=0.25), look.members)
    roster.put(f"test/answered{number}", {})
    if answering is None:
        raise HoldfastError("No call was seen.")
    return RIGHT if answering._asked.why == "the test" else WRONG


# -- what the stranger does ---------------------------------------------------------------------

FORGED = HoldfastError("forged").to_message()
Forge = Callable[[Message], object]
Scenario = Callable[[Attacked, Path, int], str]


@dataclass(frozen=True)
class Key:
    """A row of the table: a key that a scenario writes, and what a stranger writes in its place."""

    pattern: str
    scenario: Scenario
    forge: Forge
    is_claimed: bool = False
    """Whoever is first decides: the stranger is."""
    source: str = ""
    """The keys whose messages he copies, if not those of this kind."""
    name: Callable[[str], str] = lambda name: name
    """Which key he attacks, when this one is written."""


def gone(message: Message) -> Message:
    # Of after all that the rank will have said: a sign of life refutes an earlier one.
    return {"token": message["who"]["token"], "how": "forged", "clean": False, "beat": 1 << 60}


ROWS = {
    "secret": Key("", choice, lambda message: "0" * 32),
    "at/<rank>": Key("at/1", show, lambda message: message | {"ended": "forged"}),
    "gone/<rank>": Key("at/1", show, gone, name=lambda name: name.replace("at/1", "gone/1"), source="at/1"),
    "life/<participants>/<rank>/<life>": Key(
        "life/*/1/0", choice, lambda message: {"token": "forged"}, is_claimed=True, source="life/*/0/0"
    ),
    "where/<rank>/ask": Key("where/1/ask", where, lambda message: {"ticket": "forged"}, is_claimed=True),
    "where/<rank>": Key("where/1", where, lambda message: message | {"at": "forged"}),
    "roll/<n>": Key(
        "roll/?",
        roll,
        lambda message: {"by": 1, "why": "forged", "pause": 1.0, "at": time.time()},
        is_claimed=True,
    ),
    "roll/<n>/<rank>": Key(
        "roll/?/1", roll, lambda message: message | {"roll_call": message["roll_call"] | {"busy": 0.9}}
    ),
    "roll/<n>/over": Key(
        "roll/?", roll, lambda message: {}, name=lambda name: f"{name}/over", source="roll/?/over"
    ),
    "due/<life>/<run>/<n>": Key(
        "lane-due/due/*", due, lambda message: {"due": False, "rank": 1, "asked": 0}, is_claimed=True
    ),
    "asked/<life>/<ranks>/<n>": Key(
        "lane-preemption/asked/*", stop, lambda message: {"reason": "forged", "pid": 1}, is_claimed=True
    ),
    "session/<token>/failed": Key(
        "lane-session/session/*/failed", session, lambda message: FORGED | {"claim": ""}, is_claimed=True
    ),
    "session/<token>/end": Key(
        "lane-session/session/*/end", session, lambda message: {"word": "alone"}, is_claimed=True
    ),
    "session/<token>/<word>/<rank>": Key(
        "lane-session/session/*/closing/1", session, lambda message: {"at": 0.0}
    ),
    "K/open": Key("save/*/open", save, lambda message: {"rank": 1, "attempt": "0" * 12}, is_claimed=True),
    "K/row_digest/<rank>": Key("save/*/row_digest/1", save, lambda message: {"digest": None}),
    "K/rows/<rank>": Key("save/*/rows/1", save, lambda message: {"keys": [], "specs": []}),
    "K/answer": Key("save/*/answer", save, lambda message: {"holders": [0, 1]}),
    "K/answer of a load": Key("load/*/answer", load, lambda message: {"identity": "forged"}),
    "K/answered": Key("save/*/answered", save, lambda message: {}),
    "K/answer/<rank>": Key("groups/*/answer/1", task, lambda message: {"yours": 99}),
    "K/answer/<rank> of a save": Key(
        "save/*/answer/1", save, lambda message: {"replicas": [[0, 1] for _ in message["replicas"]]}
    ),
    "K/written/<rank>": Key("save/*/written/1", save, lambda message: message | {"files": []}),
    "K/read/<rank>": Key("load/*/read/1", load, lambda message: {"bytes": 0, "asked": 0}),
    "K/asked/<rank>": Key("choice/*/asked/1", choice, lambda message: {"value": "forged"}),
    "K/acted/<rank>": Key("groups/*/acted/1", task, lambda message: {"got": 99}),
    "K/outcome": Key(
        "save/*/outcome",
        save,
        lambda message: {"state": "abandoned", "rank": 1, "error": FORGED},
        is_claimed=True,
    ),
    "K/outcome of a choice": Key("choice/*/outcome", choice, lambda message: message | {"value": "forged"}),
    "K/final": Key("save/*/final", save, lambda message: {"error": FORGED}),
    "K/told/<n>": Key("choice/*/told/1", late, lambda message: {"rank": 1}, is_claimed=True),
    "K/left": Key("save/*/left", save, lambda message: b"99", is_claimed=True),
}
ATTACKS = ("copied", "forged", "forged, with a secret", "deleted")


@dataclass
class Attacker:
    """Attacks one key of one run of a scenario."""

    stranger: Stranger
    key: Key
    attack: str
    copies: list[bytes] = field(default_factory=list)
    attacked: bool = False

    def note(self, name: str) -> None:
        if (data := self.stranger.raw(name)) is not None:
            self.copies.append(data)

    def now(self, name: str) -> None:
        target = self.key.name(name)
        if self.attack == "copied":
            if not self.copies:
                return
            self.stranger.put(target, self.copies[0])
        elif self.attack == "deleted":
            self.stranger.delete(target)
        else:
            data = self.stranger.raw(name)
            # A counter has no seal, and what is claimed is not there yet.
            known = {} if self.key.is_claimed or data is None else self.stranger.read(name)
            made = self.key.forge(known)
            if isinstance(made, bytes):
                self.stranger.put(target, made)
            else:
                self.stranger.write(target, made)
        self.attacked = True


def cell(row: str, attack: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what the attack reaches: `nothing`, or that the call succeeds as `late` as its deadline, or that
    it `fails`, or that ranks have `believed` it.

    said: what the table says of it.
    """
    at_first, found = SECONDS[said], ""
    for seconds in (at_first, *(longer for longer in (10.0, 30.0) if longer > at_first)):
        found = reached(row, attack, seconds, folder.with_name(f"{folder.name}-{seconds:g}"), monkeypatch)
        is_too_early = (said, found) == ("late", "fails")  # a slow machine is later than a short deadline
        if found and not is_too_early:
            return found
    assert found, f"{ROWS[row].pattern} was not written within 30 s"
    return found


def reached(row: str, attack: str, seconds: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the cell for calls of so many seconds; "" if a slow machine had not written the key by then."""
    key = ROWS[row]
    secret = "of the launcher" if attack == "forged, with a secret" else ""
    stranger = Stranger(2, secret, monkeypatch, partial(between, row, attack))
    attacker = Attacker(stranger, key, attack)
    number = 1
    if key.pattern:
        stranger.at(key.source or key.pattern, attacker.note)
        if row.startswith("life"):  # which is written in the first call only
            life_of(stranger.rosters[0], (0, 1))
        else:  # then there is one to copy
            assert on_each(lambda roster: key.scenario(roster, folder, 1), stranger.rosters) == [RIGHT] * 2
            number = 2
        first = key.is_claimed and attack != "deleted"
        (stranger.before if first else stranger.at)(key.pattern, attacker.now)
    stranger.seconds, begun = seconds, time.monotonic()
    ends = on_each(lambda roster: key.scenario(roster, folder, number), stranger.rosters)
    took = time.monotonic() - begun
    # A call may return before its rank has left it: the counter of those that have left comes after that.
    with suppress(AssertionError):
        wait_until(lambda: attacker.attacked or not key.pattern, 5.0)
    if key.pattern and not attacker.attacked:
        return ""
    if key.scenario is save:
        check_saved(folder, number)
    if WRONG in ends:
        return "believed"
    if ends != [RIGHT] * 2:
        return "fails"
    return "nothing" if took < stranger.seconds else "late"


def between(row: str, attack: str, stranger: Stranger, name: str) -> None:
    """The attack on the row `secret`: before rank 1 has read it."""
    if row == "secret":
        stranger.delete(name) if attack == "deleted" else stranger.put(name, b"0" * 32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    holdfast.save({"w": torch.full((4,), 2.0)}, tmp_path / "there", job=holdfast.Job(no_dist=True))
    MADE.clear()

    def make(base: Any, *rest: Any) -> Answering:
        made = MADE[base.job(), base.rank] = Answering(base, *rest)
        return made

    monkeypatch.setattr(roll_call, "Answering", make)
    monkeypatch.setattr(roll_call, "start_thread", lambda work, name: threading.Thread())
    return tmp_path


@pytest.mark.parametrize("row", ROWS)
def test_what_a_stranger_reaches_is_what_the_table_says(
    row: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The four cells of a row at once, each on a store of its own: they mostly wait for a deadline."""
    (line,) = [line for line in table(text("docs/security.md"), "keys") if line[0] == row]
    said = {attack: re.split("[:;.]", words)[0] for attack, words in zip(ATTACKS, line[2:], strict=True)}
    with ThreadPoolExecutor(len(ATTACKS)) as pool:
        runs = {
            attack: pool.submit(cell, row, attack, said[attack], folder / str(number), monkeypatch)
            for number, attack in enumerate(ATTACKS)
        }
    found = {attack: run.result() for attack, run in runs.items()}
    if row.startswith("due/") and found["deleted"] in ("nothing", "late"):  # every rank has seen it before
        found["deleted"] = "fails"
    if row == "K/left":  # a rank that has read the outcome before it is deleted is not late
        found |= {attack: "late" for attack in said if (found[attack], said[attack]) == ("nothing", "late")}
    assert found == said


# -- no key without a row -----------------------------------------------------------------------

SITES = {
    ("_groups/session/monitor.py", "f'{self.key}/failed'"): ["session/<token>/failed"],
    ("_groups/session/monitor.py", "f'{self.key}/{what}'"): ["session/<token>/end"],
    ("_groups/session/monitor.py", "f'{self.key}/{what}/{self.roster.rank}'"): [
        "session/<token>/<word>/<rank>"
    ],
    ("_core/protocol/core.py", "context.answer_key"): ["K/answer of a load"],
    ("_core/protocol/core.py", "context.final_key"): ["K/final"],
    ("_core/protocol/effects.py", "key"): [
        "K/row_digest/<rank>",
        "K/rows/<rank>",
        "K/answer/<rank>",
        "K/answer/<rank> of a save",
        "K/written/<rank>",
        "K/read/<rank>",
        "K/asked/<rank>",
        "K/acted/<rank>",
    ],
    ("_core/protocol/effects.py", "f'{key}/{name}'"): ["K/answer", "K/answered"],
    ("_core/protocol/effects.py", "outcome_key(key)"): ["K/outcome", "K/outcome of a choice"],
    ("_core/protocol/liveness.py", "key"): ["K/told/<n>"],
    ("_core/protocol/operation.py", "self.context.final_key"): ["K/final"],
    ("_core/protocol/rendezvous.py", "claim.key"): ["life/<participants>/<rank>/<life>"],
    ("_core/protocol/rendezvous.py", "f'{key}/left'"): ["K/left"],
    ("_core/protocol/rendezvous.py", "f'{key}/open'"): ["K/open"],
    ("_core/protocol/rendezvous.py", "f'{lives}/{number}'"): ["life/<participants>/<rank>/<life>"],
    ("_core/protocol/rounds.py", "context.answer_key"): ["K/answer"],
    ("_core/protocol/rounds.py", "context.answered_key"): ["K/answered"],
    ("_core/protocol/rounds.py", "context.outcome_key"): ["K/outcome", "K/outcome of a choice"],
    ("_core/roster/beacon.py", "at_key(self.who.rank)"): ["at/<rank>"],
    ("_core/roster/neighbours.py", "gone_key(rank)"): ["gone/<rank>"],
    ("_core/roster/torch_store.py", "key"): ["secret"],
    ("_core/roster/whereabouts.py", "_answer_key(rank)"): ["where/<rank>"],
    ("_core/roster/whereabouts.py", "_question_key(rank)"): ["where/<rank>/ask"],
    ("_core/run/preemption.py", "key"): ["asked/<life>/<ranks>/<n>"],
    ("_core/run/save_times.py", "key"): ["due/<life>/<run>/<n>"],
    ("_watch/answering.py", "f'roll/{self._number}/over'"): ["roll/<n>/over"],
    ("_watch/answering.py", "key"): ["roll/<n>/<rank>"],
    ("_watch/roll_call.py", "key"): ["roll/<n>"],
}
"""Where the source writes a key, and the expression of the key: the rows of it."""
STORES = re.compile(
    r"(.*\.)?(_?roster|_bounded|base\(\)|_?base|lane|store\(\))\.(put|claim|count|compare_set|add)"
    "|Put|Claim|Count"
)


def _ends_so(called: ast.expr) -> bool:
    """May it be a write? `unparse` takes long."""
    name = getattr(called, "attr", getattr(called, "id", ""))
    return name.lower() in ("put", "claim", "count", "compare_set", "add")


def test_every_key_that_the_source_writes_has_a_row() -> None:
    assert [line[0] for line in table(text("docs/security.md"), "keys")] == list(ROWS)
    found, source = set[tuple[str, str]](), ROOT / "src" / "holdfast"
    for file in sorted(source.rglob("*.py")):
        name = file.relative_to(source).as_posix()
        if "testing" in file.parts or name in (
            "_core/protocol/runner.py",
            "_core/roster/base.py",
        ):  # which pass keys on
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and node.args
                and _ends_so(node.func)
                and STORES.fullmatch(ast.unparse(node.func))
            ):
                found.add((name, ast.unparse(node.args[0])))
    assert found == SITES.keys()
    assert {row for rows in SITES.values() for row in rows} == ROWS.keys()
    assert {f"K/{topic}/<rank>" for topic in _DUTIES} <= ROWS.keys()
