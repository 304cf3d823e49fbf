"""`holdfast run`."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from holdfast.cli import output
from holdfast.errors import BadInput
from holdfast.options import INSTALL, encode_install


@click.command("run", context_settings={"ignore_unknown_options": True})
@click.option("--framework", multiple=True, help="Only this one, and what it uses; may be repeated.")
@click.option(
    "--timeout", type=float, default=1800.0, show_default=True, help="Seconds that a save may take."
)
@click.option("--stall-timeout", type=float, default=120.0, show_default=True, help="Seconds of silence.")
@click.option("--no-session", is_flag=True, help="Do not watch the ranks to the end of the process.")
@click.option("--no-warm-up", is_flag=True, help="Do not warm up process groups.")
@click.option("--host-memory-budget", type=int, help="Bytes for copies of asynchronous saves, on each rank.")
@click.option(
    "--env", "as_environment", is_flag=True, help="Print the variables in place of running anything."
)
@click.argument("command_line", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND...")
def command(
    framework: tuple[str, ...],
    timeout: float,
    stall_timeout: float,
    no_session: bool,
    no_warm_up: bool,
    host_memory_budget: int | None,
    as_environment: bool,
    command_line: tuple[str, ...],
) -> None:
    """Run a program whose processes all call holdfast.install().

    They do so before the program's first line. For programs that nobody wants to edit: converters, launchers,
    torchrun and what it starts. All processes below inherit it, in this environment. Exit code: the
    program's.
    """
    if not command_line and not as_environment:
        raise BadInput("holdfast run needs a command.", hint="holdfast run -- python converter.py ...")
    arguments = {
        "framework": list(framework) or None,
        "timeout": timeout,
        "stall_timeout": stall_timeout,
        "session": not no_session,
        "warm_up": not no_warm_up,
        "host_memory_budget": host_memory_budget,
    }
    spec = find_spec("holdfast")
    assert spec is not None
    assert spec.origin is not None
    # At its start Python imports `sitecustomize` from the first folder of its path that has one.
    folder = str(Path(spec.origin).parent / "startup")
    # An empty part would mean the working directory. The folder may be there already, because one
    # `holdfast run` may run another.
    rest = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != folder]
    variables = {"PYTHONPATH": os.pathsep.join([folder, *rest]), INSTALL: encode_install(arguments)}
    if as_environment:
        for name, value in variables.items():
            output.say(f"export {name}={shlex.quote(value)}")
        return
    os.environ.update(variables)
    # exec replaces this process: buffered output would be lost.
    sys.stdout.flush()
    try:
        # Not a child process: launchers expect that signals, terminal and exit code are the program's own.
        os.execvp(command_line[0], command_line)
    except OSError as error:
        raise BadInput(f"{command_line[0]!r} can't be run: {error.strerror}.") from None
