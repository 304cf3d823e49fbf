"""`holdfast doctor`."""

from __future__ import annotations

import platform

import click

from holdfast._core.base.options import all_variables
from holdfast._frameworks.frameworks import found_frameworks
from holdfast._groups.audit.doctor import ask, variables_of
from holdfast._groups.audit.hazards import NAMES, Hazard, ProcessFacts, hazards, of_variables
from holdfast._groups.audit.known import affects, redirecting_bridges, versions_here
from holdfast._tools.cli import output
from holdfast._tools.cli.diagnose import show
from holdfast._watch.diagnose import diagnose
from holdfast._watch.read import read_all
from holdfast._watch.shared_call import ask_for_call, wait_for_answers
from holdfast.errors import BadInput

ANSWERED = 30.0
"""Timeout in seconds for the answers of a running job."""


@click.command("doctor")
@click.option("--pid", type=int, help="A process of a running job on this host.")
@click.option("--all", "folder", type=click.Path(), help="The folder HOLDFAST_ROLL_CALLS of a running job.")
@output.as_json
@click.pass_context
def command(ctx: click.Context, pid: int | None, folder: str | None, as_json: bool) -> None:
    """List what in a process's groups and environment is known to end in a hang.

    Without --pid: this shell's environment, and the frameworks in this Python that holdfast.install() knows.
    Groups are shown of a process that uses holdfast.install, session, open_groups or warm_up, and what is
    replaced and guarded there. Exit code 1 if there is a hazard.

    With --all: asks all ranks of the jobs that have this folder where they are, and says what they hang in,
    as `holdfast diagnose` does. It disturbs nothing. Exit code 1 if that is not decided.
    """
    if folder is not None:
        try:
            path = ask_for_call(folder, "holdfast doctor --all asks")
        except OSError as error:
            raise BadInput(f"A roll call can't be asked for in {folder}: {error.strerror}.") from None
        if not wait_for_answers(path, ANSWERED):
            raise BadInput(
                f"No rank has answered in {path} within {ANSWERED:g} s.",
                hint="Does the job call holdfast.install(), with HOLDFAST_ROLL_CALLS set to this folder? No "
                "rank answers in a job of one rank, nor once the host of the message store has ended (rank "
                "0, or the launcher): take the stacks of each process (py-spy dump --pid PID > rank-N.txt) "
                "for holdfast diagnose.",
            )
        found = diagnose(read_all([path]))
        output.report(found, as_json, show, passed=found.who is not None or found.why is not None)
        return
    # A process without Holdfast does not answer, but its environment can be read.
    facts: ProcessFacts | None = ask(pid) if pid is not None else None
    if facts is not None:
        findings = hazards(facts)
    else:
        variables = all_variables() if pid is None else variables_of(pid)
        findings = of_variables({name: value for name, value in variables.items() if name.startswith(NAMES)})
    frameworks = found_frameworks() if pid is None else []
    # The versions in another process are not visible from here; its own log has them (`install`).
    if pid is None:
        bad = affects(versions_here(), platform.machine(), all_variables())
        findings += [
            Hazard("known to hang", f"{one.what}.", f"Fixed in {one.library} {one.fixed}: {one.thread}")
            for one in bad
        ]
        if bridges := redirecting_bridges():
            what = (
                f"{output.count(len(bridges), 'PCI bridge')} ({', '.join(bridges[:4])}) have Access Control "
                "Services on: what GPUs send each other goes through the IOMMU, and NCCL may hang."
            )
            remedy = (
                "On bare metal: BIOS, or setpci -s BRIDGE ECAP_ACS+6.w=0000. A virtual machine needs them: "
                "https://github.com/NVIDIA/nccl/issues/2079"
            )
            findings.append(Hazard("known to hang", what, remedy))
    if as_json:
        output.print_json({"pid": pid, "process": facts, "hazards": findings, "frameworks": frameworks})
    else:
        for name, version, tested in frameworks:
            known = "tested" if version in tested else f"not tested; tested are {', '.join(tested)}"
            output.say(f"{name} {version}: holdfast.install() knows it ({known if tested else 'not tested'})")
        if facts is not None:
            here = "not initialised" if facts.rank is None else f"rank {facts.rank} of {facts.world_size}"
            output.say(
                f"process {facts.pid}: {here}, torch {facts.torch}, "
                f"{output.count(len(facts.groups), 'group')}"
            )
            output.print_table(
                ("group", "ranks", "backend", "timeout", "communicator"),
                [
                    (
                        group.description or group.name,
                        output.listed(group.ranks),
                        group.backend,
                        "" if group.timeout is None else f"{group.timeout:g} s",
                        {None: "warmed up" if group.is_warm else "", True: "open", False: "none yet"}[
                            group.is_open
                        ],
                    )
                    for group in facts.groups
                ],
            )
            for sentence in facts.installed:
                output.say(sentence)
        elif pid is not None:
            output.say(f"process {pid} does not tell of its groups; its environment:")
        for hazard in findings:
            output.say(f"{hazard.kind}: {hazard.what} {hazard.remedy}")
        if not findings:
            output.say("no hazards found")
    if findings:
        ctx.exit(1)
