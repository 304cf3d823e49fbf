"""`holdfast inspect`."""

from __future__ import annotations

import json

import click

from holdfast._cli import output
from holdfast._maintenance.inspect import Checkpoint, Run, Tensor, describe
from holdfast._values import size_text

SHOWN = 50


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
@output.as_json
def command(path: str, name: str | None, limit: int | None, as_json: bool) -> None:
    """Show what is in a checkpoint, or which steps a run has."""
    # A person gets a screenful, a program everything.
    if limit is None and not as_json:
        limit = SHOWN
    description = describe(path, name, limit or None)
    output.report(description, as_json, _show)


def _show(description: Checkpoint | Run) -> None:
    if isinstance(description, Run):
        _run(description)
    else:
        _checkpoint(description)


def _run(run: Run) -> None:
    output.say(f"{run.path}: {output.count(len(run.steps), 'step')}")
    rows = [
        (step.step, _state(step.committed, step.problem), size_text(step.bytes), output.when(step.created))
        for step in run.steps
    ]
    output.print_table(("step", "state", "size", "committed at"), rows, right=("step", "size"))


def _state(committed: bool, problem: str | None) -> str:
    if problem:
        return f"damaged: {problem}"
    return "committed" if committed else "not committed"


def _checkpoint(checkpoint: Checkpoint) -> None:
    output.say(checkpoint.path)
    facts = {
        "step": checkpoint.step,
        "created": output.when(checkpoint.created),
        "versions": _plain(checkpoint.versions),
        "grid": _plain(checkpoint.grid),
        "notes": _plain(checkpoint.notes),
        "ranks": checkpoint.ranks,
        "files": f"{len(checkpoint.files)}, {size_text(checkpoint.bytes)} with the index",
        "holds": f"{output.count(checkpoint.tensors, 'tensor')}, "
        f"{output.count(checkpoint.objects, 'object')}, {output.count(checkpoint.chunks, 'chunk')}",
    }
    for key, value in facts.items():
        # Most checkpoints have no notes and no grid. 0 is a step like any other.
        if value not in (None, ""):
            output.say(f"  {key:<9} {value}")
    shown = checkpoint.shown
    head = ("name", "dtype", "shape or value", "chunks", "bytes", "writers")
    output.print_table(head, [_row(tensor) for tensor in shown], right=("chunks", "bytes"))
    if len(shown) < checkpoint.matched:
        output.say(f"{len(shown)} of {output.count(checkpoint.matched, 'name')}; --limit 0 shows all.")


def _plain(value: object) -> str:
    """Format a flat dict as `python 3.11, torch 2.6`, anything else as JSON."""
    if isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _row(tensor: Tensor) -> tuple[object, ...]:
    shown = str(list(tensor.shape)) if tensor.value is None else tensor.value
    writers = output.listed(tensor.writers, 4)
    return tensor.name, tensor.dtype or tensor.kind, shown, tensor.chunks, tensor.bytes, writers
