"""A checkpoint or a run folder as one self-contained HTML page.

Its size does not grow with ranks times tensors: ranks are grouped into columns, and names into a tree of at
most `NODES` rows. The script of the page (`page.js`) inserts names as text nodes.
"""

from __future__ import annotations

import base64
import json
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np

from holdfast._core.base.values import Json, Message, age_text, natural, printable, shortened, time_text
from holdfast._core.existing.target import checkpoint_or_run, number
from holdfast._core.format.columns import Array, tied_rows
from holdfast._core.format.index import Index
from holdfast._core.io.index_file import open_index
from holdfast._core.layout.tensor import DTYPES, OBJECT
from holdfast._core.store.base import Folder, Store
from holdfast._core.store.run_folder import own_steps
from holdfast._tools.checkpoints.inspect import (
    Checkpoint,
    Run,
    about_checkpoint,
    describe_run,
    fate,
    state,
)
from holdfast._tools.html import filled
from holdfast.errors import HoldfastError

COLUMNS = 128
"""Maximum number of columns: ranks, or groups of neighbouring ranks."""
NODES = 6000
STEPS = 2000
POINTS = 400
"""Maximum number of points in a chart."""
LABEL = 160
"""Maximum number of characters shown of a name or its part."""


def page_of(path: Folder, now: float) -> str:
    """Return the page of a checkpoint, or of a run folder with its newest step. now: current Unix time."""
    store, is_run = checkpoint_or_run(path)
    data: Message = {"path": printable(store.url), "made": time_text(now), "run": None, "checkpoint": None}
    data["title"] = shortened(printable(store.url.rstrip("/").rpartition("/")[2]), LABEL)
    if is_run:
        data["run"] = _run(describe_run(store), now)
        ours = own_steps(store)
        if ours:
            store = store.child(ours[max(ours)])
    if not is_run or ours:
        try:
            data["checkpoint"] = _checkpoint(store, now)
        except HoldfastError:
            if not is_run:
                raise  # in a run, the list of steps shows the problem of this one
    return filled(data, Path(__file__).with_suffix(".js"))


# -- a run ---------------------------------------------------------------------------------------


def _run(run: Run, now: float) -> Message:
    steps = run.steps
    sizes = [step.bytes for step in steps]
    rows = [
        (
            step.step,
            state(step),
            step.bytes,
            time_text(step.created),
            age_text(step.created, now),
            fate(run, step),
            _plain(step.metrics),
        )
        for step in reversed(steps[-STEPS:])
    ]
    every = -(-len(steps) // POINTS)
    # Includes the last step.
    shown = range((len(steps) - 1) % every, len(steps), every)
    together = list(accumulate(sizes))
    return {
        "rules": run.rules and f"Kept, by the rules of the newest step: {run.rules}.",
        "sizes": [(steps[i].step, sizes[i]) for i in shown],
        "together": [(steps[i].step, together[i]) for i in shown],
        "steps": rows,
        "older": max(len(steps) - STEPS, 0),
    }


def _plain(value: Json) -> str:
    """Format a flat dict as `loss 1.5, accuracy 0.5`, anything else as JSON."""
    if value is None:
        return ""
    if isinstance(value, dict) and not any(isinstance(one, dict | list) for one in value.values()):
        return shortened(", ".join(f"{printable(name)} {printable(one)}" for name, one in value.items()), 600)
    return shortened(json.dumps(value), 600)


# -- a checkpoint --------------------------------------------------------------------------------


def _checkpoint(store: Store, now: float) -> Message:
    with open_index(store) as index:
        about = about_checkpoint(store, index)
        written = _Written(index)
        title = f"Step {about.step}" if about.step is not None else "Checkpoint"
        return {
            "title": f"{title}, committed {time_text(about.created)}" if about.created else title,
            "cards": [
                ("age", age_text(about.created, now) or "not known", ""),
                ("elements", sum(total.elements for total in about.totals), "count"),
                ("tensors", f"{about.tensors:,}", ""),
                ("on disk", about.bytes, "bytes"),
                ("files", f"{len(about.files):,}", ""),
                ("ranks", f"{written.ranks:,}", ""),
                ("chunks", f"{about.chunks:,}", ""),
            ],
            "facts": _facts(about),
            "totals": [
                (
                    shortened(printable(one.module or "(no module)"), LABEL),
                    one.dtype,
                    one.tensors,
                    one.elements,
                    one.bytes,
                )
                for one in about.totals[:1000]
            ],
            **written.picture(),
        }


def _facts(about: Checkpoint) -> list[tuple[str, str]]:
    facts = {name: getattr(about, name) for name in ("grid", "metrics", "notes", "versions")}
    return [("folder", printable(about.path))] + [
        (name, _plain(value)) for name, value in facts.items() if value not in (None, {}, [], "")
    ]


@dataclass(slots=True)
class _Node:
    """A node in the tree of names: its children, or its row of the index."""

    parent: int
    label: str
    below: dict[str, _Tree]
    rows: list[int] = field(default_factory=list)


class _Tree(dict[str, "_Tree"]):
    row: int | None = None
    """The row of the index with exactly this name."""


class _Written:
    """The bytes written by each column of ranks, for each node in the tree of names."""

    def __init__(self, index: Index) -> None:
        self.columns = index.select()
        self.tied = tied_rows(self.columns)
        # These numbers are unchecked: a forged one makes columns wide, but not many.
        self.rank_of_file = np.maximum(self.columns.file_rank, 0)
        said = number(index.about.get("ranks")) or 1  # some ranks may have written nothing
        self.ranks = max(int(self.rank_of_file.max(initial=0)) + 1, min(said, 1 << 31), 1)
        self.width = -(-self.ranks // COLUMNS)
        self.count = -(-self.ranks // self.width)

    def picture(self) -> Message:
        rows, (nodes, cut) = self.columns, self._nodes()
        node_of = np.zeros(len(rows.names), np.int64)
        for at, node in enumerate(nodes):
            node_of[node.rows] = at
        column = self.rank_of_file[rows.file] // self.width
        cell = node_of[rows.tensor_of_chunk()] * self.count + column
        is_tied = np.isin(np.arange(len(rows.names)), [*self.tied])  # elements and bytes count once
        nbytes = np.where(is_tied[rows.tensor_of_chunk()], 0, rows.chunk_bytes())
        written = np.bincount(cell, nbytes, len(nodes) * self.count).reshape(len(nodes), -1)
        names = np.bincount(node_of, minlength=len(nodes))
        elements = np.zeros((len(nodes), len(DTYPES)))
        of_tensors = np.where(is_tied | (rows.kind == OBJECT), 0.0, rows.shape.astype(float).prod(axis=1))
        np.add.at(elements, (node_of, rows.dtype), of_tensors)
        for at in range(len(nodes) - 1, 0, -1):  # a parent stands before its children
            for sums in (written, names, elements):
                sums[nodes[at].parent] += sums[at]
        strips, strip_of = _strips(written)
        columns = (names, elements.sum(axis=1), written.sum(axis=1), strip_of)
        return {
            "ranks": self.ranks,
            "width": self.width,
            "written": written[0].tolist(),
            "strips": base64.b64encode(strips.tobytes()).decode(),
            "nodes": [
                (node.parent, shortened(printable(node.label), LABEL), self._what(node, shares), *numbers)
                for node, shares, *numbers in zip(
                    nodes,
                    elements,
                    *(np.minimum(column, 1 << 62).astype(int).tolist() for column in columns),
                    strict=True,
                )
            ],
            "cut": f"{cut:,} names are shown only as parts of the sums above them." if cut else "",
        }

    def _what(self, node: _Node, elements: Array) -> str:
        """Format the dtypes of a node, and the shape of a tensor. elements: number of elements by dtype."""
        if len(node.rows) == 1 and not node.below:
            row = node.rows[0]
            if self.columns.kind[row] == OBJECT:
                return "object"
            shape = shortened(str(list(self.columns.shape_of(row))), LABEL)
            tied = f" = {printable(self.columns.names[self.tied[row]])}" if row in self.tied else ""
            return f"{DTYPES[int(self.columns.dtype[row])].name} {shape}{shortened(tied, LABEL)}"
        codes = [int(code) for code in np.argsort(-elements, kind="stable") if elements[code]]
        if len(codes) < 2:
            return DTYPES[codes[0]].name if codes else ""
        shares = elements / elements.sum()
        return ", ".join(f"{DTYPES[code].name} {_percent(shares[code])}" for code in codes)

    def _nodes(self) -> tuple[list[_Node], int]:
        """Return the tree, parents first, and the number of names that are only included in the sums of an
        ancestor."""
        root = _Tree()
        for row, name in enumerate(self.columns.names):
            tree = root
            for part in name.split(".", 30):
                tree = tree.setdefault(part, _Tree())
            tree.row = row
        nodes, cut = [_Node(0, "all", root)], 0
        waiting, taken = deque([0]), 1
        while waiting:
            at = waiting.popleft()
            node = nodes[at]
            if taken + len(node.below) > NODES:
                node.rows += _rows(node.below)
                cut += len(node.rows)
                node.below = {}
                continue
            for label, tree in sorted(node.below.items(), key=lambda item: (natural(item[0]), item[0])):
                while len(tree) == 1 and tree.row is None:  # merge parts without branches into one row
                    [(more, tree)] = tree.items()
                    label += f".{more}"
                nodes.append(_Node(at, label, tree, [] if tree.row is None else [tree.row]))
                waiting.append(len(nodes) - 1)
            taken += len(node.below)
        return nodes, cut


def _rows(below: dict[str, _Tree]) -> list[int]:
    found, left = [], list(below.values())
    while left:
        tree = left.pop()
        left += tree.values()
        found += [] if tree.row is None else [tree.row]
    return found


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "<1%"


def _strips(matrix: Array) -> tuple[Array, Array]:
    """Return the distinct rows of a matrix, scaled so that each row's maximum is 255, and for each row the
    index of its distinct row. Non-zero shares are rounded up to at least 1, so that they stay visible."""
    top = np.maximum(matrix.max(axis=1, keepdims=True), 1)
    shares = np.minimum(np.ceil(matrix * (255 / top)), 255).astype(np.uint8)  # ceil of what rounding left
    strips, strip_of = np.unique(shares, axis=0, return_inverse=True)
    return strips, strip_of.reshape(-1)
