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
@click.argument("kind", type=click.Choice(["torch_dist", "hf", "adapter"]))
@click.argument("source", type=click.Path())
@click.argument("out", type=click.Path())
@click.option(
    "--like",
    type=click.Path(),
    help="hf: the folder of the published model; adapter: one with its adapter_config.json.",
)
@click.option(
    "--dtype",
    help="hf: of floating-point weights; by default as in --like, never wider than they are stored.",
)
@click.option("--quantize", help="hf: fp8 writes linear layers in 8 bits, with scales of blocks.")
@click.option(
    "--prefix",
    help="hf: of the model's names in SOURCE, such as `model`; needed only if it holds several models.",
)
@click.option("--partial", is_flag=True, help="hf: leave out what the checkpoint has nothing for.")
@click.option("--name", default="default", show_default=True, help="adapter: its name in the model.")
@output.as_json
def command(
    kind: str,
    source: str,
    out: str,
    like: str | None,
    dtype: str | None,
    quantize: str | None,
    prefix: str | None,
    partial: bool,
    name: str,
    as_json: bool,
) -> None:
    """Convert a Holdfast checkpoint to torch DCP and megatron-core, or its weights to Hugging Face.

    torch_dist: to one that torch DCP and megatron-core load. OUT must not exist, or be empty. After an
    interruption the same command starts again.

    hf: its weights to a folder that transformers loads. SOURCE has a model of megatron-core's; --like gives
    configuration and tokenizer. After an interruption the same command goes on. A few hundred MB of memory.

    adapter: the adapter (LoRA) of a model that PEFT has wrapped, to a folder that PEFT loads.
    """
    if (kind == "torch_dist" and like) or (kind != "hf" and (dtype or quantize or prefix or partial)):
        raise click.UsageError(
            "--like is for hf and adapter; --dtype, --quantize, --prefix and --partial are for hf."
        )
    if kind != "torch_dist" and like is None:
        needed = {"hf": "the folder of the published model", "adapter": "a folder with adapter_config.json"}
        raise click.UsageError(f"{kind} needs --like, {needed[kind]}.")
    from holdfast._tools.cli import conversions

    if kind == "hf" and like is not None:
        with progress(f"export {source}") as advance:
            report = conversions.export_huggingface(
                source,
                out,
                like=like,
                dtype=dtype,
                quantize=quantize,
                strict=not partial,
                prefix=prefix,
                progress=advance,
                job=conversions.job_alone(),
            )
        output.report(report, as_json, _show)
        return
    if kind == "adapter" and like is not None:
        output.report(conversions.export_adapter(source, out, like=like, name=name), as_json, _show)
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
