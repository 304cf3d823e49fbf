"""`holdfast diagnose`."""

from __future__ import annotations

import click

from holdfast._tools.cli import output
from holdfast._watch.diagnose import diagnose
from holdfast._watch.read import read_all
from holdfast._watch.verdict import MEANS, TODO, Diagnosis, Observation, listed

SHOWN = 12
"""Maximum number of observations shown; --json prints all."""


@click.command("diagnose")
@click.argument("places", nargs=-1, required=True, metavar="PLACE...", type=click.Path())
@output.as_json
def command(places: tuple[str, ...], as_json: bool) -> None:
    """Say who waits for whom in a job, and why, by its logs, stacks and flight records.

    Places are files, or folders of them, in any mixture: logs, dumps of py-spy and faulthandler, flight
    records of torch (pickles or JSON), and the run folder of a job that has called the roll. The rank of a
    dump is the number at the end of its name. Nothing in them is executed. Exit code 1 if the evidence tells
    neither who nor why.
    """
    found = diagnose(read_all(places))
    output.report(found, as_json, show, passed=found.who is not None or found.why is not None)


def show(found: Diagnosis) -> None:
    """Print a diagnosis."""
    world = f" of {found.world_size}" if found.world_size is not None else ""
    heard = listed(found.heard_of) if found.heard_of else "no rank"
    output.say(f"heard of: {heard}{world}{_not_heard(found)}")
    who, why = found.who, found.why
    seen = why.seen if why is not None and why.seen else who.seen if who is not None else ()
    _observations(seen or found.observations)
    if who is None:
        output.say("who:  not known: this evidence shows no rank that waits for another.")
    else:
        output.say(f"who:  {who.summary.rstrip('.')}.")
        for place in who.known:
            output.say(f"      {listed(place.ranks)}: {place.text}")
        if who.call is not None:
            output.say(f"code: {who.call}")
    if why is None:
        output.say("why:  not proven.")
    else:
        output.say(f"why:  {why.kind}: {MEANS[why.kind]}.")
        output.say(f"      {why.summary.rstrip('.')}.")
        output.say(f"do:   {TODO[why.kind]}")
    for said in found.advice[:SHOWN]:
        output.say(f"read: {said.what}.  [{said.source}]")
    for like in found.looks_like:
        output.say(f"looks like: {like.title} ({like.thread})")
        output.say(f"      there, the cause: {like.cause}; the cure: {like.cure}.")
    if found.holdfast:
        output.say(f"Holdfast: {found.holdfast}")
    for place in found.places[:SHOWN]:
        output.say(f"at:   {listed(place.ranks)}: {place.text}")
    for wanted in found.collect:
        output.say(f"collect: {wanted}")


def _not_heard(found: Diagnosis) -> str:
    """Return what the evidence lacks; "" if it tells of every rank."""
    if found.is_complete:
        return ""
    if found.world_size is None:
        return "; how many ranks there are is not known"
    is_partial = len(found.heard_of) < found.world_size
    return "; no line of the others tells anything" if is_partial else "; lines of them are left out"


def _observations(seen: tuple[Observation, ...]) -> None:
    for one in seen[:SHOWN]:
        output.say(f"  {one.what}" + (f"  [{one.source}]" if one.source is not None else ""))
    if len(seen) > SHOWN:
        output.say(f"  and {len(seen) - SHOWN} more; --json prints all.")
