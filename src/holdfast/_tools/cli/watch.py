"""`holdfast watch`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import click

from holdfast._core.base.values import age_text, printable, time_text
from holdfast._tools.cli import output
from holdfast._tools.recorded.live import QUIET, Looker, State

SHOWN = 20
"""Maximum number of table rows."""


@click.command("watch")
@click.argument("run", type=click.Path())
@click.option("--once", is_flag=True, help="Show it once, and end.")
@click.option(
    "--every",
    metavar="SECONDS",
    default=2.0,
    type=click.FloatRange(0.1, 3600),
    help="Seconds between two looks. Default: 2.",
)
@output.as_json
def command(run: str, once: bool, every: float, as_json: bool) -> None:
    """Show what the ranks of a run do now, and who is behind.

    The job must record its events (HOLDFAST_EVENTS, or holdfast.events.record). It is shown again and again,
    on a terminal in place, until Ctrl-C. --json shows it once.
    """
    looker = Looker(run)
    if as_json:
        output.print_json(looker.look(time.time()))
        return
    if once:
        click.echo("\n".join(_lines(run, looker.look(time.time()))))
        return
    try:
        _show_again(run, looker, every)
    except KeyboardInterrupt:
        return


def _show_again(run: str, looker: Looker, every: float) -> None:
    if not sys.stdout.isatty():
        while True:
            click.echo("\n".join([*_lines(run, looker.look(time.time())), ""]))
            time.sleep(every)
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            text = Text("\n".join(_lines(run, looker.look(time.time()))), no_wrap=True, overflow="ellipsis")
            text.highlight_regex("behind: .*|, not known to be over: .*", "bold yellow")
            live.update(text, refresh=True)
            time.sleep(every)


def _lines(run: str, state: State) -> Iterator[str]:
    """Yield the lines that show a state, without control characters."""
    known = (
        f"{state.ranks} of {state.world} ranks"
        if state.ranks < state.world
        else output.count(state.ranks, "rank")
    )
    is_old = state.quiet > QUIET
    since = f", and nothing was recorded for {age_text(0.0, state.quiet)}" if is_old else ""
    yield printable(f"{run}: {known}, {time_text(time.time())}{since}")
    if not state.ranks:
        yield "No rank has recorded events here: set HOLDFAST_EVENTS to this folder in the job."
    now = "then" if is_old else "now"
    facts = {now: state.call, "last save": state.last_save, "not saved": state.failed_save}
    yield from (f"  {name:<10} {printable(fact)}" for name, fact in facts.items() if fact)
    yield from (f"  {'roll call':<10} {printable(called)}" for called in state.roll_calls)
    if state.skipped:
        yield f"  {output.count(state.skipped, 'line')} of the logs can't be read."
    rows = [(one.ranks, one.does, one.phase, f"{one.seconds:.1f}") for one in state.doing[:SHOWN]]
    yield from output.table_lines(
        ("ranks", "did" if is_old else "do", "in phase", "seconds"), rows, right=("seconds",)
    )
    if len(state.doing) > SHOWN:
        yield f"and {len(state.doing) - SHOWN} lines more; --json has all."
