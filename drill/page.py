"""docs/drill.md, from what a run of the drill measured."""

from __future__ import annotations

from drill.results import Results, Row, Side

INTRODUCTION = """\
# The drill

`make drill` replays the reports that Holdfast was built from and writes this page (`drill/page.py`). Every scenario runs
twice with real processes, as stock and with one more line, `holdfast.install()`; `python -m drill --only NAME` runs one.

- Nothing is scripted: the stock side runs, hangs and fails as it does. Its timeouts, and the `timeout` and `stall_timeout` of
  `install()`, are shortened to seconds, so the seconds compare what happens, not how long a production job would wait.
- Frameworks are the frameworks' own functions over real megatron-core models on CPU. Modules that they import and that need
  CUDA, or are not used in the scenario, are empty (`tests/support/stand_ins.py`).
- Collectives go over gloo. gloo connects a group when it is made, where NCCL does so at the first collective; and a rank that
  waits for a process that is gone hears at once that a connection closed, where NCCL waits to its watchdog.
- Seconds are those of the slowest rank that was waited for, from the moment at which it entered the call, or at which ranks
  began to end. The message is that of one rank; `named` are the ranks that other ranks blame in any.
- `checked` counts the expectations of both sides that held, listed below the table; the program fails if one does not.
"""


def document(results: Results) -> str:
    """The whole page."""
    lines = INTRODUCTION.split("\n")
    lines += [measured(results), "", *table(results.rows), "", "## What is checked", ""]
    for row in results.rows:
        lines += [f"{row.report}, {row.scenario}:", ""]
        lines += [f"- {check.expects}" + ("" if check.held else ": **not so**") for check in row.checks]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


BEGIN, END = "<!-- drill: written by make drill -->", "<!-- drill: end -->"
SHORT = {
    "12 x 128 experts": "planning the save of 12 layers of 128 experts",
    "never comes": "a rank never comes to verl's save",
    "Bridge's own save": "Megatron-FSDP's ranks hold different optimizer states",
    "first used while": "a group is first used while a rank is stopped",
    "take no part": "ranks that do not train take no part in a save",
    "`raise SystemExit(3)`": "a rank ends by `raise SystemExit(3)`",
}
"""What stands on the front page: a part of a scenario's name, and its short words."""


def front(results: Results) -> list[str]:
    """The short table of the front page: some scenarios, seconds, and who was named."""
    lines = ["| report | what happens | stock | with `install()` |", "|---|---|---|---|"]
    for row in results.rows:
        words = next((short for part, short in SHORT.items() if part in row.scenario), None)
        if words is not None:
            both = " | ".join(_short(side) for side in (row.stock, row.ours))
            lines.append(f"| {row.report} | {words} | {both} |")
    return lines


def with_front(readme: str, results: Results) -> str:
    """The front page with that table between its marks."""
    before, _, rest = readme.partition(BEGIN)
    return "\n".join([before + BEGIN, *front(results), END + rest.partition(END)[2]])


def _short(side: Side) -> str:
    named = f"rank {', '.join(map(str, side.named))} named" if side.named else "nobody named"
    saved = side.message.startswith("saved")
    return f"{side.seconds:g} s, saved" if saved else f"{side.seconds:g} s, fails, {named}"


def measured(results: Results) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    of_commit = f", commit {results.commit}" if results.commit else ""
    return (
        f"Measured {results.measured[:10]}{of_commit}, in {results.seconds:.0f} s, load average {results.load:g} before it "
        f"began.\n\nMachine: {results.machine}.\n\nVersions: {versions}."
    )


def table(rows: list[Row]) -> list[str]:
    """One line a scenario."""
    heads = ("report", "scenario", "stock", "s", "named", "with `install()`", "s", "named", "checked")
    cells = [" | ".join(heads), "---|---|---|---:|---|---|---:|---|---"]
    for row in rows:
        held = len(row.checks) - len(row.failed)
        checked = f"{held} of {len(row.checks)}" if not row.failed else f"**{held} of {len(row.checks)}**"
        both = [*_cells(row.stock), *_cells(row.ours)]
        cells.append(" | ".join(_cell(text) for text in (row.report, row.scenario, *both, checked)))
    return [f"| {cells[0]} |", f"|{cells[1]}|", *(f"| {line} |" for line in cells[2:])]


def _cells(side: Side) -> tuple[str, str, str]:
    named = ", ".join(map(str, side.named))
    return side.message, f"{side.seconds:g}", f"rank {named}" if named else "nobody"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_")
