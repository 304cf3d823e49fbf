"""`holdfast diagnose`."""

from __future__ import annotations

import click

from holdfast._cli import output
from holdfast._watch.verdict import Diagnosis, Observation, Verdict, listed

SHOWN = 12
"""Observations that are shown; --json prints all."""


@click.command("diagnose")
@click.argument("places", nargs=-1, required=True, metavar="PLACE...", type=click.Path())
@output.as_json
def command(places: tuple[str, ...], as_json: bool) -> None:
    """Say what a job hangs in, by its logs, stacks and flight records.

    Places are files, or folders of them, in any mixture: logs, dumps of py-spy and faulthandler, flight
    records of torch (pickles or JSON), and the run folder of a job that has called the roll. The rank of a
    dump is the number at the end of its name. Nothing in them is executed. Exit code 1 if the evidence is not
    enough.
    """
    from holdfast._watch.diagnose import diagnose
    from holdfast._watch.read import read_all

    found = diagnose(read_all(places))
    output.report(found, as_json, show, passed=found.verdict is not None)


def show(found: Diagnosis) -> None:
    """Print a diagnosis."""
    world = f" of {found.world_size}" if found.world_size is not None else ""
    whole = "" if found.is_complete else ", so that absence proves nothing"
    output.say(f"heard of: {listed(found.ranks) if found.ranks else 'no rank'}{world}{whole}")
    verdict = found.verdict
    _observations(verdict.seen if verdict is not None and verdict.seen else found.observations)
    if verdict is None:
        output.say("not enough: this evidence does not decide.")
    else:
        _verdict(verdict, found)
    for one in found.possible[:3]:
        output.say(f"{'also' if verdict is not None else 'perhaps'}: {one.kind}: {one.summary.rstrip('.')}.")
        for other in one.others:
            output.say(f"    {other}")
    for wanted in found.collect:
        output.say(f"collect: {wanted}")


def _observations(seen: tuple[Observation, ...]) -> None:
    for one in seen[:SHOWN]:
        output.say(f"  {one.what}" + (f"  [{one.source}]" if one.source is not None else ""))
    if len(seen) > SHOWN:
        output.say(f"  and {len(seen) - SHOWN} more; --json prints all.")


def _verdict(verdict: Verdict, found: Diagnosis) -> None:
    ranks = (
        "not known"
        if verdict.ranks is None
        else listed(verdict.ranks)
        if verdict.ranks
        else "none is to blame"
    )
    facts = {
        "verdict": f"{verdict.kind}: {found.means}.",
        "because": f"{verdict.summary.rstrip('.')}.",
        "ranks": ranks,
        "waiting": listed(verdict.waiting) if verdict.waiting else "",
        "group": verdict.group,
        "operation": f"{verdict.operation} #{verdict.number}"
        if verdict.number is not None
        else verdict.operation,
        "code": str(verdict.call or ""),
        "sure": f"{verdict.confidence:.0%}, by {verdict.basis}",
        "do": found.todo,
        "Holdfast": found.holdfast,
        "like": found.thread,
    }
    for key, value in facts.items():
        if value:
            output.say(f"{key + ':':<10} {value}")
    for other in verdict.others:
        output.say(f"{'or:':<10} {other}")
