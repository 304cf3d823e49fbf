"""python -m drill.picture [--draw]: the picture of the front page, measured and drawn; with --draw, drawn again.

What was measured is in drill/results/save.json, and the picture is docs/save.svg. A test compares the two.
"""

from __future__ import annotations

import argparse
import os
import re
from datetime import UTC, datetime
from html import escape
from pathlib import Path

import msgspec

from drill.spans import AWAY, LIMIT_S, WORLD, Picture, Run, measure

ROOT = Path(__file__).resolve().parents[1]
RESULTS, SVG = ROOT / "drill" / "results" / "save.json", ROOT / "docs" / "save.svg"
ROUNDS = 5
WIDE, HIGH, BAR, GAP = 372, 26, 17, 56
"""Pixels: a panel's width, the height of a rank's row and of its bar, and the room for names of ranks."""
STYLE = """
text{font:13px system-ui,sans-serif;fill:#3d4652}.dim{fill:#68727f}.head{font-weight:600}.small{font-size:12px}
.works{fill:#8c9db5}.writes{fill:#2e9d6f}.collective{fill:#d64545}.waits{fill:#dde3ea}.axis{stroke:#aab3bd}.told{stroke:#b7791f;stroke-width:2}
@media(prefers-color-scheme:dark){text{fill:#d5dae0}.dim{fill:#9aa4af}.waits{fill:#3b444f}.works{fill:#6f83a0}.axis{stroke:#5b6570}}
"""
KINDS = {
    "works": "plans, checks",
    "writes": "writes",
    "collective": "waits in a collective",
    "waits": "waits for a message, under a deadline",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m drill.picture", description=__doc__)
    parser.add_argument("--draw", action="store_true", help="draw what was measured before")
    if not parser.parse_args().draw:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        from bench.machine import this_machine

        # In turns, so that a busy machine is the same for both; drawn is the save of the middle length.
        rounds = [[measure(False, ours) for ours in (False, True)] for _ in range(ROUNDS)]
        found = [
            sorted(side, key=lambda one: seconds(one[0]))[ROUNDS // 2] for side in zip(*rounds, strict=True)
        ]
        found += [measure(True, ours) for ours in (False, True)]
        day = datetime.now(UTC).date().isoformat()
        picture = Picture(day, found[0][1], str(this_machine({})), tuple(run for run, _ in found))
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(picture), indent=1))
    SVG.write_text(draw(read()), encoding="utf-8")


def read() -> Picture:
    return msgspec.json.decode(RESULTS.read_bytes(), type=Picture)


def draw(picture: Picture) -> str:
    """Two panels side by side for each scenario, with one scale of time."""
    parts: list[str] = []
    for column, words in enumerate(("torch.distributed.checkpoint.save", "holdfast.dcp.save")):
        parts.append(text(left_of(column), 20, words, "head"))
    top = 34
    for away in (False, True):
        runs = sorted((run for run in picture.runs if run.away == away), key=lambda run: run.ours)
        longest = max(map(seconds, runs))
        head = f"Rank {AWAY} never comes; both have a limit of {LIMIT_S:g} s" if away else "All ranks come"
        parts.append(text(8, top + 14, head, "dim"))
        for column, run in enumerate(runs):
            parts += panel(run, left_of(column), top + 24, longest)
        top += 24 + WORLD * HIGH + (98 if away else 56)
    x = 8
    for kind, words in KINDS.items():
        parts.append(f'<rect x="{x}" y="{top - 6}" width="14" height="14" rx="2" class="{kind}"/>')
        parts.append(text(x + 20, top + 6, words, "small"))
        x += 42 + round(6.3 * len(words))
    parts.append(f'<line x1="{x + 7}" x2="{x + 7}" y1="{top - 8}" y2="{top + 9}" class="told"/>')
    parts.append(text(x + 16, top + 6, "tells whom it waits for", "small"))
    note = f"The state of a transformer and AdamW under FSDP2, {picture.tensors:,} tensors, {WORLD} ranks over gloo; measured {picture.measured}."
    parts.append(text(8, top + 28, note, "small dim"))
    width = left_of(1) + WIDE + 12
    title = "<title>A save with collectives beside one without: what each rank does, in seconds</title>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + 40}" role="img">'
    return "\n".join([head, title, f"<style>{STYLE}</style>", *parts, "</svg>\n"])


def seconds(run: Run) -> float:
    """Until the last rank is done."""
    return max(span.end for rank in run.ranks for span in rank.spans)


def left_of(column: int) -> int:
    return GAP + column * (WIDE + GAP + 16)


def panel(run: Run, left: int, top: int, longest: float) -> list[str]:
    """A bar for each rank, the axis, and what its user reads."""
    scale = WIDE / longest
    parts = []
    for number in range(WORLD):
        y = top + number * HIGH
        parts.append(text(left - 8, y + 13, f"rank {number}", "small", "end"))
        rank = next((one for one in run.ranks if one.rank == number), None)
        if rank is None:
            parts.append(text(left + 4, y + 13, "in its data loader, fetch_batch()", "small dim"))
            continue
        for span in rank.spans:
            x, long = left + span.begin * scale, (span.end - span.begin) * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(long, 0.4):.1f}" height="{BAR}" class="{span.does}"/>'
            )
        if rank.told is not None:
            x = left + rank.told * scale
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 3}" y2="{y + BAR + 3}" class="told"/>')
    bottom = top + WORLD * HIGH
    parts.append(f'<line x1="{left}" x2="{left + WIDE}" y1="{bottom}" y2="{bottom}" class="axis"/>')
    every = 0.5 if longest < 4 else 2.0
    ticks = [tick * every for tick in range(int(longest / every) + 1)]
    parts += [
        text(round(left + at * scale, 1), bottom + 15, f"{at:g}", "small dim", "middle") for at in ticks
    ]
    lines = enumerate(said(run))
    parts += [text(left - GAP + 8, bottom + 36 + 17 * line, words, "small") for line, words in lines]
    return parts


def said(run: Run) -> list[str]:
    """How it ended, and what a user reads."""
    ends = seconds(run)
    waited = max(
        sum(span.end - span.begin for span in rank.spans if span.does == "collective") for rank in run.ranks
    )
    if not run.away:
        where = f"up to {waited:.1f} s of them in collectives" if waited else "no collective"
        return [f"saved in {ends:.1g} s, {where}" if ends < 1 else f"saved in {ends:.1f} s, {where}"]
    # Of several ranks, the one whose own limit passed; others may see that its connection closed.
    error = next((rank.error for rank in run.ranks if "imed out" in rank.error), run.ranks[0].error)
    kind = error.partition(":")[0]
    if run.ours:
        who = re.search(rf"rank {AWAY} \(host [\w.-]+, pid \d+\)", error)
        where = re.search(r"(\w+\.py:\d+ \w+)\. Nothing was committed", error)
        assert who is not None
        assert where is not None
        told = min(rank.told for rank in run.ranks if rank.told is not None)
        return [
            f"told in the log after {told:.1f} s; {kind} after {ends:.1f} s:",
            f"{who[0]} has not entered the save;",
            f"its main thread is at {where[1]}",
        ]
    return [f"told: nothing; {kind} after {ends:.1f} s:", shortened(error)]


def shortened(error: str) -> str:
    """The message of a backend without its type and the place in its source."""
    return re.sub(r"^\w+: (\[[^\]]*\] )?", "", error)


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    place = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x}" y="{y}"{place}{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escape(words)}</text>'


if __name__ == "__main__":
    main()
