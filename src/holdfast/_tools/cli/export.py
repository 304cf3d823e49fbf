"""`holdfast export`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from holdfast._core.base.values import size_text
from holdfast._tools.cli import output
from holdfast._tools.cli.progress import progress

if TYPE_CHECKING:
    from holdfast._models.huggingface.export import ExportReport


@click.command("export")
@click.argument("kind", type=click.Choice(["torch_dist", "hf"]))
@click.argument("source", type=click.Path())
@click.argument("out", type=click.Path())
@click.option("--like", type=click.Path(), help="hf: the folder of the published model, with config.json.")
@click.option(
    "--dtype",
    help="hf: of floating-point weights; by default as in --like, never wider than they are stored.",
)
@click.option(
    "--prefix",
    help="hf: of the model's names in SOURCE, such as `model`; needed only if it holds several models.",
)
@click.option("--partial", is_flag=True, help="hf: leave out what the checkpoint has nothing for.")
@output.as_json
def command(
    kind: str,
    source: str,
    out: str,
    like: str | None,
    dtype: str | None,
    prefix: str | None,
    partial: bool,
    as_json: bool,
) -> None:
    """Convert a Holdfast checkpoint to torch DCP and megatron-core, or its weights to Hugging Face.

    torch_dist: to one that torch DCP and megatron-core load. OUT must not exist, or be empty. After an
    interruption the same command starts again.

    hf: its weights to a folder that transformers loads. SOURCE has a model of megatron-core's; --like gives
    configuration and tokenizer. After an interruption the same command goes on. A few hundred MB of memory.
    """
    if kind == "torch_dist" and (like or dtype or prefix or partial):
        raise click.UsageError("--like, --dtype, --prefix and --partial are for hf.")
    if kind == "hf" and like is None:
        raise click.UsageError("hf needs --like, the folder of the published model.")
    from holdfast._tools.cli import conversions

    if kind == "hf" and like is not None:
        with progress(f"export {source}") as advance:
            report = conversions.export_huggingface(
                source,
                out,
                like=like,
                dtype=dtype,
                strict=not partial,
                prefix=prefix,
                progress=advance,
                job=conversions.job_alone(),
            )
        output.report(report, as_json, _show)
        return
    with progress(f"export {source}") as advance:
        written = conversions.export_torch_dist(source, out, progress=advance)
    if as_json:
        output.print_json({"path": out, "bytes_written": written})
    else:
        output.say(f"{out}: {size_text(written)}.")


def _show(report: ExportReport) -> None:
    output.say(
        f"{report.path}: {output.count(report.tensors, 'tensor')} in {output.count(report.files, 'file')}, "
        f"{size_text(report.bytes_written)} written."
    )
    if report.prefix:
        output.say(f"Names in the checkpoint begin with {report.prefix!r}; they are exported without it.")
    if report.left_out:
        output.say(f"No part of the model, left out: {output.listed(report.left_out, 10)}.")
    if report.missing:
        output.say(f"Left out: {output.listed(report.missing, 10)}.")
