"""`holdfast verify`."""

from __future__ import annotations

import os

import click

from holdfast._core.base.values import size_text
from holdfast._tools.checkpoints.verify import Verified, VerifiedRun, verify
from holdfast._tools.cli import output
from holdfast._tools.cli.progress import progress


@click.command("verify")
@click.argument("path", type=click.Path())
@click.option("--quick", is_flag=True, help="Indexes, sizes and headers only; tensor data is not read.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=min(4, os.cpu_count() or 1),
    show_default=True,
    help="Threads that read and hash.",
)
@output.as_json
def command(path: str, quick: bool, threads: int, as_json: bool) -> None:
    """Re-read a checkpoint and report all damage.

    PATH may be a run folder: then all committed steps are checked. Exit code 1 if anything is
    damaged, 2 if nothing is, but storage did not let all of it be read.
    """
    with progress("verifying") as bar:
        report = verify(path, quick, threads, bar)
    output.report(report, as_json, _show, all(step.whole for step in _steps(report)))
    if not report.whole:
        click.get_current_context().exit(2)


def _steps(report: Verified | VerifiedRun) -> tuple[Verified, ...]:
    return (report,) if isinstance(report, Verified) else report.steps


def _show(report: Verified | VerifiedRun) -> None:
    for step in _steps(report):
        _show_step(step)
    for one in () if isinstance(report, Verified) else report.not_checked:
        output.say(f"{one.path}: not known: {one.problem}")


def _show_step(report: Verified) -> None:
    read = f"{size_text(report.bytes_checked)} of data read" if not report.quick else "data was not read"
    contents = f"{output.count(report.tensors, 'name')} in {output.count(report.files, 'file')}, {read}"
    if report.whole:
        output.say(f"{report.path}: whole ({contents}, {report.seconds:.1f} s)")
        return
    output.say(f"{report.path}: damaged, {output.count(len(report.damage), 'finding')} ({contents})")
    rows = [
        (
            item.file,
            item.tensor or "",
            "" if item.start is None else f"{item.start}-{item.stop}",
            item.problem,
        )
        for item in report.damage
    ]
    output.print_table(("file", "tensor", "bytes", "problem"), rows)
