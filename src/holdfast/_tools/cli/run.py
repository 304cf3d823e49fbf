"""`holdfast run`."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import click

from holdfast._core.base.options import INSTALL, SECRET, encode_install
from holdfast._tools.cli import output
from holdfast.errors import BadInput

_PYTHON = re.compile(r"python[0-9.]*t?")
_LETTERS = re.compile("-[A-Zabd-ln-z]+")
"""Combined single-letter options of Python, without -c and -m."""
_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
_IS_REACHED = 'import sys; sys.exit("holdfast._tools.startup.sitecustomize" not in sys.modules)'


@click.command("run", context_settings={"ignore_unknown_options": True})
@click.option("--framework", multiple=True, help="Only this one, and what it uses; may be repeated.")
@click.option("--timeout", type=float, help="Seconds that a save may take. [default: 1800 without progress]")
@click.option("--stall-timeout", type=float, help="Give up a living rank after so many seconds of silence.")
@click.option(
    "--report-after",
    type=float,
    default=30.0,
    show_default=True,
    help="Tell of a wait after so many seconds.",
)
@click.option(
    "--lost-after", type=float, default=120.0, show_default=True, help="Seconds until a silent host is gone."
)
@click.option(
    "--after-end",
    type=float,
    help="End a process that has done nothing for so many seconds after the end of its main thread.",
)
@click.option("--no-session", is_flag=True, help="Do not watch the ranks to the end of the process.")
@click.option("--no-warm-up", is_flag=True, help="Do not warm up process groups.")
@click.option("--host-memory-budget", type=int, help="Bytes for copies of asynchronous saves, on each rank.")
@click.option(
    "--env", "as_environment", is_flag=True, help="Print the variables in place of running anything."
)
@click.argument("command_line", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND...")
def command(
    framework: tuple[str, ...],
    timeout: float | None,
    stall_timeout: float | None,
    report_after: float,
    lost_after: float,
    after_end: float | None,
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
        "after_end": after_end,
        "session": not no_session,
        "warm_up": not no_warm_up,
        "job": {
            "timeout": timeout,
            "stall_timeout": stall_timeout,
            "report_after": report_after,
            "lost_after": lost_after,
            "options": {"host_memory_budget": host_memory_budget},
        },
    }
    # At its start Python imports `sitecustomize` from the first folder of its path that has one.
    folder = str(Path(__file__).parents[1] / "startup")
    # An empty part would mean the working directory. The folder may be there already, because one
    # `holdfast run` may run another.
    rest = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != folder]
    variables = {"PYTHONPATH": os.pathsep.join([folder, *rest]), INSTALL: encode_install(arguments)}
    if as_environment:
        for name, value in variables.items():
            output.say(f"export {name}={shlex.quote(value)}")
        return
    os.environ.update(variables)
    if SECRET not in os.environ and is_torchrun_of_one_host(command_line):
        os.environ[SECRET] = secrets.token_hex(16)
    _refuse_isolated(command_line)
    # exec replaces this process: buffered output would be lost.
    sys.stdout.flush()
    try:
        # Not a child process: launchers expect that signals, terminal and exit code are the program's own.
        os.execvp(command_line[0], command_line)
    except OSError as error:
        raise BadInput(f"{command_line[0]!r} can't be run: {error.strerror}.") from None


def is_torchrun_of_one_host(command_line: Sequence[str]) -> bool:
    """Return whether a command line is a single-host torchrun, so that all ranks of the job inherit this
    environment. Other commands may start one part of a job on several hosts."""
    program, *words = command_line
    as_module = any(pair[0] == "-m" and pair[1] in _TORCHRUN for pair in pairwise(words))
    name = os.path.basename(program)
    if name != "torchrun" and not (_PYTHON.fullmatch(name) and as_module):
        return False
    hosts = [os.environ.get("PET_NNODES", "1")]  # torchrun reads its options from there, too
    for word, following in pairwise([*words, ""]):
        if word.startswith("--nn"):  # it may be abbreviated
            hosts.append(word.partition("=")[2] or following)
    return all(count in ("1", "1:1") for count in hosts)


def _refuse_isolated(command_line: Sequence[str]) -> None:
    """Raise BadInput for a Python that ignores its environment variables and lacks an installed Holdfast:
    `holdfast run` would have no effect on it."""
    program, *arguments = command_line
    options = _options(arguments) if _PYTHON.fullmatch(os.path.basename(program)) else []
    ignoring = [option for option in options if re.match("-[^-XW]*[IES]", option)]
    if not ignoring:
        return
    try:
        looked = subprocess.run(
            [program, *options, "-c", _IS_REACHED], stdin=subprocess.DEVNULL, capture_output=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return  # it can't be run: `exec` will raise the error
    if looked.returncode:
        told = " ".join(ignoring)
        raise BadInput(
            f"`{program} {told}` ignores the variables by which holdfast run reaches a program, and no "
            "Holdfast of this version is installed there. Nothing was run.",
            hint=f"Leave {told} out, or install Holdfast for that Python, or call holdfast.install() in the "
            "program.",
        )


def _options(arguments: Sequence[str]) -> list[str]:
    """Return the options of a Python command line, up to its program."""
    options, rest = [], iter(arguments)
    for word in rest:
        if word in ("-X", "-W", "--check-hash-based-pycs"):
            options += [word, next(rest, "")]
        elif word.startswith(("-X", "-W", "--")) or _LETTERS.fullmatch(word):
            options.append(word)
        else:
            # -c and -m end the options, and may be combined with preceding letters.
            begin = _LETTERS.match(word)
            return [*options, begin[0]] if begin else options
    return options
