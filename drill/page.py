"""docs/drill.md, from what a run of the drill measured."""

from __future__ import annotations

from drill.must_go_on import LIMIT_S, SECONDS
from drill.results import Results, Row, Side

INTRODUCTION = """\
# The drill

`make drill` replays the reports that Holdfast was built from and writes this page (`drill/page.py`). Every scenario runs
twice with real processes, as stock and with one more line, `holdfast.install()`; `python -m drill --only NAME` runs one.

- Nothing is scripted: the stock side runs, hangs and fails as it does. Its timeouts, and the limits of `install()`, are
  shortened to seconds, so the seconds compare what happens, not how long a production job would wait. A scenario says what
  `install()` was given: without `stall_timeout`, which has no default, a rank that lives is told of and waited for.
- The endings of ms-swift 8385 and 9188 and all healthy jobs run under torchrun, with its elastic agent (`drill/torchrun.py`;
  its workers are forked from a process that has imported torch). It ends all ranks when one fails, and names the first that
  it found ended: on both sides, and not always the culprit. In the other scenarios no process ends, and torchrun has nothing
  to say.
- Frameworks are the frameworks' own functions over real megatron-core models on CPU. Modules that they import and that need
  CUDA, or are not used in the scenario, are empty (`tests/support/stand_ins.py`).
- Collectives go over gloo. gloo connects a group when it is made, where NCCL does so at the first collective; and a rank that
  waits for a process that is gone hears at once that a connection closed, where NCCL waits to its watchdog.
- Seconds are those of the slowest rank that was waited for, from the moment at which it entered the call, or at which ranks
  began to end. The message is that of one rank; `named` are the ranks that other ranks blame in any, and torchrun's own.
- `checked` counts the expectations of both sides that held, listed below the table; the program fails if one does not.
"""


def document(results: Results) -> str:
    """The whole page."""
    lines = INTRODUCTION.split("\n")
    lines += [measured(results), "", "## Must not hang", "", *table(results.rows), ""]
    lines += [*GO_ON.split("\n"), *healthy_table(results.healthy), "", "## What is checked", ""]
    for row in (*results.rows, *results.healthy):
        lines += [f"{row.name}:", ""]
        lines += [f"- {check.expects}" + ("" if check.held else ": **not so**") for check in row.checks]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


GO_ON = f"""\
## Must go on

Healthy jobs (`drill/healthy.py`): nothing in them is dead, but each is late, silent or gone in its own way, for
{SECONDS:g} s or longer. `install()` is given limits of {LIMIT_S:g} s (`timeout`, `lost_after`, `after_end`) and is to tell of
waits after {LIMIT_S / 2:g} s. Both sides must end with the same exit codes, files and values. They run at the same time, so that
a busy machine is the same for both; seconds are from the start of torchrun to its end, the start of processes included. What
Holdfast costs in training is measured in turns, as CPU time. `make soak` runs four of these jobs at the default limits.
"""


BEGIN, END = "<!-- drill: written by make drill -->", "<!-- drill: end -->"
SHORT = {
    "12 x 128 experts": "planning the save of 12 layers of 128 experts",
    "never comes": "a rank never comes to verl's save",
    "fraction=0; Bridge": "Megatron-FSDP's ranks hold different optimizer states",
    "first used while": "a group is first used while a rank is stopped",
    "in its groups, and": "ranks that do not train take no part in a save",
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
    good = sum(not row.failed for row in results.healthy)
    return [
        *lines,
        "",
        f"{good} of {len(results.healthy)} healthy jobs, nearly all late or silent for longer than every limit, go on as in stock.",
    ]


def with_front(readme: str, results: Results) -> str:
    """The front page with that table between its marks."""
    before, _, rest = readme.partition(BEGIN)
    return "\n".join([before + BEGIN, *front(results), END + rest.partition(END)[2]])


def _short(side: Side) -> str:
    named = f"rank {', '.join(map(str, side.named))} named" if side.named else "nobody named"
    named = f"torchrun names rank {side.launcher}" if side.launcher is not None and not side.named else named
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
        both = [*_cells(row.stock), *_cells(row.ours)]
        cells.append(" | ".join(_cell(text) for text in (row.report, row.scenario, *both, _checked(row))))
    return [f"| {cells[0]} |", f"|{cells[1]}|", *(f"| {line} |" for line in cells[2:])]


def healthy_table(rows: list[Row]) -> list[str]:
    """One line a healthy job."""
    lines = [
        "| job | stock | s | with `install()` | s | ratio | checked |",
        "|---|---|---:|---|---:|---:|---|",
    ]
    for row in rows:
        both = [
            _cell(row.stock.message),
            f"{row.stock.seconds:g}",
            _cell(row.ours.message),
            f"{row.ours.seconds:g}",
        ]
        ratio = f"{row.ours.seconds / row.stock.seconds:.2f}"
        lines.append(f"| {' | '.join([_cell(row.scenario), *both, ratio, _checked(row)])} |")
    return lines


def _checked(row: Row) -> str:
    held = f"{len(row.checks) - len(row.failed)} of {len(row.checks)}"
    return f"**{held}**" if row.failed else held


def _cells(side: Side) -> tuple[str, str, str]:
    named = [f"rank {', '.join(map(str, side.named))}"] if side.named else []
    named += [f"rank {side.launcher} by torchrun"] if side.launcher is not None else []
    return side.message, f"{side.seconds:g}", "; ".join(named) or "nobody"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_")
