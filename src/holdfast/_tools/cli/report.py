"""`holdfast report`."""

from __future__ import annotations

import time

import click

from holdfast._core.base.values import size_text
from holdfast._tools.cli import output
from holdfast._tools.recorded.report import RecordedRun, facts, page_of
from holdfast._tools.recorded.trace import write_trace
from holdfast.errors import BadInput


@click.command("report")
@click.argument("run", type=click.Path())
@click.option(
    "--html", "page", metavar="OUT", type=click.Path(), default="report.html", help="Default: report.html."
)
@click.option("--trace", metavar="FILE", type=click.Path(), help="Also write a trace for ui.perfetto.dev.")
@output.as_json
def command(run: str, page: str, trace: str | None, as_json: bool) -> None:
    """Show what the ranks of a run did, as one page for a browser.

    Timeline, saves, loads and waits are those of a job that records its events (HOLDFAST_EVENTS, or
    holdfast.events.record); roll calls are those in the run folder. --json prints them, and writes no page.
    """
    found, now = RecordedRun(run), time.time()
    try:
        if trace is not None:
            with open(trace, "w", encoding="utf-8") as file:
                count = write_trace(found, file)
        if not as_json:
            text = page_of(found, now)
            with open(page, "w", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise BadInput(f"{error.filename} can't be written: {error.strerror}.") from None
    if as_json:
        output.print_json(facts(found, now))
        return
    output.say(f"{page}: {size_text(len(text))}.")
    if trace is not None:
        output.say(f"{trace}: {output.count(count, 'event')}.")
