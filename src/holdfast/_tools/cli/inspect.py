"""`holdfast inspect`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import click

from holdfast._core.base.values import age_text, size_text, time_text
from holdfast._core.format.names import split_reference
from holdfast._tools.checkpoints.inspect import (
    OURS,
    Checkpoint,
    File,
    Run,
    Tensor,
    Total,
    describe,
    fate,
    state,
)
from holdfast._tools.cli import output
from holdfast.errors import BadInput

SHOWN = 50
"""Number of names shown by default."""
MODULES = 20


@click.command("inspect")
@click.argument("path", type=click.Path())
@click.option(
    "--name", metavar="PATTERN", help="Only names that match a shell pattern; `model` is all under it."
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    help=f"Show at most this many names; 0 is all. Default: {SHOWN}, with --json all.",
)
@click.option(
    "--html", "page", metavar="OUT", type=click.Path(), help="Write all of it as one page for a browser."
)
@output.as_json
def command(path: str, name: str | None, limit: int | None, page: str | None, as_json: bool) -> None:
    """Show what is in a checkpoint, or which steps a run has."""
    if page is not None:
        if name is not None or limit is not None or as_json:
            raise click.UsageError("--html shows everything; it takes no --name, --limit or --json.")
        _write_page(path, page)
        return
    # Interactive output is limited; JSON is complete.
    if limit is None and not as_json:
        limit = SHOWN
    description = describe(path, name, limit or None)
    if isinstance(description, Run) and name is not None:
        raise click.UsageError(
            f"--name is for one checkpoint, and {path} is a run folder: give a step of it."
        )
    output.report(description, as_json, _show)
    if name is not None and not as_json and isinstance(description, Checkpoint) and not description.matched:
        output.say(f"No name matches {name!r}.")


def _write_page(path: str, page: str) -> None:
    from holdfast._tools.checkpoints.page import page_of

    text = page_of(path, time.time())
    try:
        with open(page, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise BadInput(f"The page can't be written to {page}: {error.strerror}.") from None
    output.say(f"{page}: {size_text(len(text))}.")


def _show(description: Checkpoint | Run) -> None:
    if isinstance(description, Run):
        _run(description)
    else:
        _checkpoint(description)


def _run(run: Run) -> None:
    removed = sum(step.is_removed for step in run.steps)
    unfinished = sum(not step.committed for step in run.steps) - removed
    more = f", {unfinished} of them not committed" if unfinished else ""
    more += f", {removed} of them removed but for data" if removed else ""
    output.say(f"{run.path}: {output.count(len(run.steps), 'step')}{more}")
    rows = [
        (
            step.step,
            state(step),
            size_text(step.bytes),
            time_text(step.created),
            age_text(step.created, time.time()),
            fate(run, step),
        )
        for step in run.steps
    ]
    head = ("step", "state", "size", "committed at", "age", "kept as")
    output.print_table(head, rows, right=("step", "size", "age"))
    total = sum(step.bytes for step in run.steps)
    output.say(f"{size_text(total)} in all.")


def _checkpoint(checkpoint: Checkpoint) -> None:
    output.say(checkpoint.path)
    is_other = checkpoint.format != OURS
    facts = {
        "format": checkpoint.format if is_other else "",
        "step": checkpoint.step,
        "created": ", ".join(filter(None, [time_text(checkpoint.created), _ago(checkpoint.created)])),
        "versions": _plain(checkpoint.versions),
        "grid": _plain(checkpoint.grid),
        "notes": _plain(checkpoint.notes),
        "metrics": _plain(checkpoint.metrics),
        "ranks": checkpoint.ranks,
        "files": f"{len(checkpoint.files)}, {size_text(checkpoint.bytes)}"
        + ("" if is_other else " with the index"),
        "refers to": _referred(checkpoint.files),
        "holds": f"{output.count(checkpoint.tensors, 'tensor')}, "
        f"{output.count(checkpoint.objects, 'object')}, {output.count(checkpoint.chunks, 'chunk')}",
    }
    for key, value in facts.items():
        # Skip missing values (most checkpoints have no notes and no grid), but not step 0.
        if value not in (None, ""):
            output.say(f"  {key:<9} {value}")
    output.say("")
    _totals(checkpoint.totals)
    shown = checkpoint.shown
    head = ("name", "dtype", "shape or value", "chunks", "bytes", "writers")
    output.print_table(head, [_row(tensor) for tensor in shown], right=("chunks", "bytes"))
    if len(shown) < checkpoint.matched:
        output.say(f"{len(shown)} of {output.count(checkpoint.matched, 'name')}; --limit 0 shows all.")


def _referred(files: Sequence[File]) -> str:
    """Say which files are data of earlier steps (`Options.link_unchanged` in an object store)."""
    found = [(referred[0], file.size) for file in files if (referred := split_reference(file.name))]
    if not found:
        return ""
    steps = ", ".join(sorted({folder for folder, _ in found}))
    size = size_text(sum(size for _, size in found))
    return f"{output.count(len(found), 'file')}, {size}, of {steps}: it is not complete by itself"


def _ago(seconds: float | None) -> str:
    return "" if seconds is None else f"{age_text(seconds, time.time())} ago"


def _totals(totals: Sequence[Total]) -> None:
    rows: list[tuple[object, ...]] = [
        (
            total.module or "(no module)",
            total.dtype,
            total.tensors,
            f"{total.elements:,}",
            size_text(total.bytes),
        )
        for total in totals[:MODULES]
    ]
    if len(totals) > 1:
        tensors, elements, nbytes = (
            sum(getattr(total, field) for total in totals) for field in ("tensors", "elements", "bytes")
        )
        more = f", {len(totals) - MODULES} lines not shown" if len(totals) > MODULES else ""
        rows.append((f"all{more}", "", tensors, f"{elements:,}", size_text(nbytes)))
    head = ("module", "dtype", "tensors", "elements", "size")
    output.print_table(head, rows, right=("tensors", "elements", "size"))
    output.say("")


def _plain(value: object) -> str:
    """Format a flat dict as `python 3.11, torch 2.6`, anything else as JSON."""
    if isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _row(tensor: Tensor) -> tuple[object, ...]:
    shown = str(list(tensor.shape)) if tensor.value is None else tensor.value
    if tensor.tied_to is not None:
        shown += f" = {tensor.tied_to}"
    writers = output.listed(tensor.writers, 4)
    return tensor.name, tensor.dtype or tensor.kind, shown, tensor.chunks, tensor.bytes, writers
