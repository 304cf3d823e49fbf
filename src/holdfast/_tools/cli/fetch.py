"""`holdfast fetch`."""

from __future__ import annotations

import click

from holdfast._core.base.values import size_text
from holdfast._models.huggingface.fetch import FetchReport, fetch
from holdfast._tools.cli import output
from holdfast._tools.cli.progress import progress


@click.command("fetch")
@click.argument("source", type=click.Path())
@click.option("--ranks", required=True, metavar="8-15", help="Ranks, such as those of one host.")
@click.option("--grid", required=True, metavar="world=64,tp=2,pp=4,ep=8", help="How ranks share the model.")
@click.option("--to", type=click.Path(), help="Copy to this folder; else only say what would be copied.")
@click.option("--split", metavar="3,4,4,3", help="Layers of each model chunk; by default all the same.")
@click.option("--vocabulary", type=click.IntRange(1), help="Rows of the model's embedding with padding.")
@click.option("--weights-only", is_flag=True, help="Leave out the optimizer's state.")
@output.as_json
def command(
    source: str,
    ranks: str,
    grid: str,
    to: str | None,
    split: str | None,
    vocabulary: int | None,
    weights_only: bool,
    as_json: bool,
) -> None:
    """Show or copy just what some ranks need of a checkpoint or a published model.

    SOURCE is a Holdfast checkpoint of megatron-core's model, or the folder of a published model. These ranks
    load from the copy with nothing else present. After an interruption the same command goes on.

    --grid takes world, tp, pp, cp, ep, etp, vpp, order and first_rank, as holdfast.Grid does.
    """
    with progress(f"fetch {source}") as advance:
        report = fetch(
            source,
            ranks,
            grid,
            to,
            split=split,
            vocabulary=vocabulary,
            weights_only=weights_only,
            progress=advance,
            timeout=7 * 86400.0,
        )
    output.report(report, as_json, _show)


def _show(report: FetchReport) -> None:
    output.print_table(
        ("file", "bytes", "ranges"),
        [(file.name, size_text(file.bytes), f"{file.ranges:,}") for file in report.files],
        right=("bytes", "ranges"),
    )
    output.print_table(
        ("rank", "tensors", "bytes"),
        [(need.rank, f"{need.tensors:,}", size_text(need.bytes)) for need in report.by_rank],
        right=("rank", "tensors", "bytes"),
    )
    part = 100 * report.bytes / max(report.bytes_in_all, 1)
    output.say(
        f"Ranks {report.ranks} of {report.grid} need {size_text(report.bytes)} of "
        f"{size_text(report.bytes_in_all)} ({part:.1f} %), in {output.count(len(report.files), 'file')}."
    )
    if report.taken_whole:
        output.say(
            f"Taken whole, as it is not known how ranks share them: {output.listed(report.taken_whole, 5)}."
        )
    if report.path is not None:
        output.say(f"{report.path}: {size_text(report.bytes_written)} written; load from there.")
