"""`holdfast import`."""

from __future__ import annotations

import click

from holdfast._core.base.values import size_text
from holdfast._tools.cli import output
from holdfast._tools.cli.progress import progress


@click.command("import")
@click.argument("kind", type=click.Choice(["torch_dist", "hf", "zero"]))
@click.argument("source", type=click.Path())
@click.argument("out", type=click.Path())
@click.option("--step", type=click.IntRange(min=0), help="The step to note in the new checkpoint.")
@click.option("--fingerprint", is_flag=True, help="Note fingerprints, by which `holdfast same` compares.")
@click.option("--unnamed", is_flag=True, help="hf: import weights that the model's table does not name, too.")
@click.option("--adapter", type=click.Path(), help="hf: the folder of an adapter (LoRA) to merge into it.")
@output.as_json
def command(
    kind: str,
    source: str,
    out: str,
    step: int | None,
    fingerprint: bool,
    unnamed: bool,
    adapter: str | None,
    as_json: bool,
) -> None:
    """Convert checkpoints of torch DCP, megatron-core and DeepSpeed, and models of Hugging Face.

    torch_dist: SOURCE is the folder that has its .metadata. Its CRCs are checked.

    hf: SOURCE is the folder of a published model. Names stay as they are; digests are added. It loads in any
    layout, like the folder itself. With --adapter, an adapter that PEFT has saved is merged into the weights.

    zero: SOURCE is a folder of DeepSpeed's (ZeRO 1, 2, 3, or universal), or that with its file `latest`. Its
    CRCs are checked first. --step is its number of steps if it is not given.

    OUT must not exist, or be empty. After an interruption the same command starts again. One process, a part
    of a tensor in memory at a time. Nothing in SOURCE is executed.
    """
    if (unnamed or adapter) and kind != "hf":
        raise click.UsageError("--unnamed and --adapter are for hf.")
    from holdfast._tools.cli import conversions

    with progress(f"import {source}") as advance:
        if kind == "hf":
            job = conversions.job_alone(fingerprint)
            report = conversions.import_huggingface(
                conversions.merged(source, adapter) if adapter else source,
                out,
                step=step,
                strict=not unnamed,
                progress=advance,
                job=job,
            )
        else:
            convert = conversions.import_zero if kind == "zero" else conversions.import_torch_dist
            report = convert(source, out, step=step, fingerprint=fingerprint, progress=advance)
    if as_json:
        output.print_json(report)
        return
    names, size = output.count(report.tensors, "name"), size_text(report.bytes_written)
    output.say(f"{report.path}: {names}, {size} in {report.seconds:.1f} s.")
