"""Every order of the requests of saves that refer to an earlier step, of who removes steps, and of readers: no
committed index ever names what is gone. The code is the real one. And proof that the search finds what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast._core.format.names import reference
from holdfast._core.io import old_steps, references, removal
from tests.support.explore import Explored, Explorer, mutate
from tests.support.explored_references import (
    DATA,
    FOLDERS,
    References,
    drawn,
    finisher,
    planted,
    reader,
    remover,
    saver,
)
from tests.support.wide import wide

FIRST = reference(FOLDERS[0], DATA[0])
"""The data of step 1."""


@pytest.fixture(autouse=True)
def _drawn() -> Iterator[None]:
    with drawn():
        yield


def explore(world: References) -> Explored:
    found = Explorer(world, most=2_000_000).run()
    print(f"{found.states} states, {found.histories} histories, {sorted(map(str, found.ends))}")
    return found


def referred(*more: tuple[str, bytes]) -> list[tuple[str, bytes]]:
    """Step 1, and step 2 that refers to it, with its claim."""
    claim = f"run/{FOLDERS[0]}/.holdfast-pins/ref-{2:012x}.r00000"
    text = f'{{"folder":"{FOLDERS[1]}","attempt":"{2:012x}","files":["{DATA[0]}"],"by_hand":false}}'
    return [*planted(0, 1), *planted(1, 2, FIRST), (claim, text.encode()), *more]


def kept() -> list[tuple[str, bytes]]:
    """The same after step 1 was removed: its data is kept for step 2."""
    index = f"run/{FOLDERS[0]}/index.safetensors"
    note = f"run/.holdfast-removed/{FOLDERS[0]}.kept-{'00' * 8}"
    text = f'{{"folder":"{FOLDERS[0]}","kept":["{DATA[0]}"]}}'
    return [*(one for one in referred() if one[0] != index), (note, text.encode())]


SAVES = saver(1, 2, FIRST)
LATER = saver(2, 3, FIRST)
WORLDS: dict[str, dict[str, Any]] = {
    "a save and a remover": {"objects": planted(0, 1), "actions": [SAVES, remover(0)], "attempts": {0: 2}},
    "a save and two removers": {
        "objects": planted(0, 1),
        "actions": [SAVES, remover(0), remover(0)],
        "attempts": {0: 2},
    },
    "a save and a remover who tries again": {
        "objects": planted(0, 1),
        "actions": [SAVES, remover(0, again=True)],
        "attempts": {0: 2},
    },
    "a save, a remover who tries again, and one who goes on": {
        "objects": planted(0, 1),
        "actions": [SAVES, remover(0, again=True), finisher()],
        "attempts": {0: 2},
    },
    "a save, a remover, and one who goes on": {
        "objects": planted(0, 1),
        "actions": [SAVES, remover(0), finisher()],
        "attempts": {0: 2},
    },
    "a save and removers of both steps before": {
        "objects": referred(),
        "actions": [LATER, remover(0), remover(1)],
        "attempts": {0: 3},
    },
    "a save, who refers goes, and one who goes on": {
        "objects": kept(),
        "actions": [LATER, remover(1), finisher()],
        "attempts": {0: 3},
    },
    "a save, and two who go on": {
        "objects": [one for one in kept() if FOLDERS[1] not in one[0] and "/ref-" not in one[0]],
        "actions": [LATER, finisher(), finisher()],
        "attempts": {0: 3},
    },
    "the step is saved again": {
        "objects": planted(0, 1),
        "actions": [SAVES, saver(0, 4, reference(FOLDERS[2], DATA[5]), replaces=True), finisher()],
        "attempts": {0: 2, 1: 4},
    },
    "a reader of who refers": {
        "objects": referred(),
        "actions": [reader(1), remover(1), remover(0)],
        "attempts": {},
    },
    "a reader of who refers, whose save is void": {
        "objects": kept(),
        "actions": [reader(1), remover(1), finisher()],
        "attempts": {},
        "void": {2},
    },
    "a reader of who refers, and one who goes on": {
        "objects": kept(),
        "actions": [reader(1), remover(1), finisher()],
        "attempts": {},
    },
}


LARGE = ("a save and two removers", "a save and removers of both steps before", "a save, and two who go on")


@pytest.mark.parametrize("name", wide(WORLDS, suite=WORLDS.keys() - set(LARGE)))
def test_no_committed_step_loses_what_it_refers_to(name: str) -> None:
    found = explore(References(**WORLDS[name]))
    assert not found.wrong, found.wrong


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("a save and a remover", {"faults": 1}),
        ("a save and a remover", {"kills": 1}),
        ("a save and a remover", {"faults": 2}),
        ("a save and a remover who tries again", {"faults": 1}),
        ("a save and a remover who tries again", {"kills": 1}),
        *(
            pytest.param(name, bound, marks=pytest.mark.soak)
            for name in WORLDS
            for bound in ({"faults": 1}, {"kills": 1})
            if name not in ("a save and a remover", "a save and a remover who tries again")
        ),
    ],
)
def test_nor_if_replies_are_lost_or_processes_killed(name: str, bound: dict[str, int]) -> None:
    found = explore(References(**WORLDS[name], **bound))
    assert not found.wrong, found.wrong


# -- mutants: what is wrong is found --------------------------------------------------------------------------

MUTANTS: dict[str, tuple[str, dict[str, int], list[Any]]] = {
    "a save looks at the notes before it claims": ("a save and a remover", {}, [
        references, "claim_files", "    out = step.create(",
        "    early = being_deleted(run, folder, sizes)\n    out = step.create(",
        "sizes.keys() - being_deleted(run, folder, sizes)", "sizes.keys() - early",
    ]),
    "a remover lists the claims only before its note": ("a save and a remover", {}, [
        removal, "_delete_data", "kept = referred_to(step, note.files, pins, known)", "kept = []",
    ]),
    "a remover asks who has ended after it has looked at the index": ("a save and a remover", {"kills": 1}, [
        removal, "referred_to", "why_kept(made.attempt)", "known(run)(made.attempt)",
    ]),
    "who goes on deletes what is kept without a note": ("a save, and two who go on", {}, [
        removal, "finish_kept", 'deleting_path = _write(store, note.folder, own, deleting)', "deleting_path = path",
    ]),
    "a note goes if the index is there": ("a save, a remover, and one who goes on", {}, [
        removal, "finish_removal", "    return named_by_index(step)",
        "    if not named_by_index(step).files.isdisjoint(note.files):\n        store.delete(path)\n"
        "    return named_by_index(step)",
    ]),
    "the claims of a step go before its readers": ("a reader of who refers, and one who goes on", {}, [
        removal, "_delete_data", "    pins = step.list(PINS)",
        "    release_all(store, note.referred, note.attempt)\n    pins = step.list(PINS)",
    ]),
    "a step that is being removed counts for nothing": ("a reader of who refers, whose save is void", {}, [
        removal, "referred_to", "notes_at(run, made.folder)[0]", "False",
    ]),
    "data that is replaced is deleted at once": ("the step is saved again", {}, [
        old_steps, "remove_replaced", "if not can_refer(step):", "if True:",
    ]),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_defect_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, bound, changes = MUTANTS[mutant]
    mutate(monkeypatch, *changes)
    found = explore(References(**WORLDS[world], **bound)).wrong
    assert "is gone" in found or "found less" in found, found
