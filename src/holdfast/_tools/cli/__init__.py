"""The command line: one module and one library call for each command, and `--json` for its result.

A command's module is imported when that command runs, so that `holdfast --help` and `holdfast latest` start
fast. Only `import`, `export` and `same` import torch, and `diff` for objects that are not stored as JSON.
Exit codes: 0: success. 1: the check failed (damaged, different or missing). 2: the command could not run.
"""

from __future__ import annotations

from importlib import import_module
from keyword import iskeyword

import click

from holdfast._core.base.collector import collector_paused
from holdfast._version import __version__

# Copies of the commands' own first lines, because `--help` would otherwise import every command. A test
# compares them (tests/cli/test_start.py).
COMMANDS = {
    "latest": "Print the newest committed step of a run.",
    "inspect": "Show what is in a checkpoint, or which steps a run has.",
    "verify": "Re-read a checkpoint and report all damage.",
    "explain": "Show where a tensor is stored, and what a reader of a part reads.",
    "diff": "Compare two checkpoints.",
    "same": "Say whether two places hold the same weights.",
    "import": "Convert checkpoints of torch DCP, megatron-core and DeepSpeed, and models of Hugging Face.",
    "export": "Convert a Holdfast checkpoint to torch DCP and megatron-core, or its weights to Hugging Face.",
    "fetch": "Show or copy just what some ranks need of a checkpoint or a published model.",
    "models": "List the types of published models that there are tables for.",
    "reindex": "Rebuild a lost index from the data files.",
    "prune": "Remove what failed saves left behind, and old steps.",
    "run": "Run a program whose processes all call holdfast.install().",
    "diagnose": "Say who waits for whom in a job, and why, by its logs, stacks and flight records.",
    "watch": "Show what the ranks of a run do now, and who is behind.",
    "report": "Show what the ranks of a run did, as one page for a browser.",
    "doctor": "List what in a process's groups and environment is known to end in a hang.",
}
"""The first line of help of each command, by name; the name is also that of the module."""


class LazyGroup(click.Group):
    """A group that imports a command when it is used, and prints the library's errors as one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        # `import` is a keyword of Python, so the module is named `import_`.
        module = cmd_name + "_" * iskeyword(cmd_name)
        # Imports release no memory, so garbage collection would only cost time.
        with collector_paused():
            command: click.Command = import_module(f"holdfast._tools.cli.{module}").command
        return command

    # click's own method gets every command, which would import them all.
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if not _is_told(error):
                raise
            ctx.exit(2)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Look at, check and mend Holdfast checkpoints.

    Exit codes: 0: success. 1: the check failed (damaged, different or missing). 2: the command could not run.
    """


def main() -> None:
    """Run the command line: the entry point of `holdfast`."""
    try:
        cli(prog_name="holdfast")
    except OSError as error:
        if not _is_told(error):
            raise
        raise SystemExit(2) from None


def _is_told(error: Exception) -> bool:
    """Print an error of the library, or of the output, as one sentence. Any other error is a bug: return
    False, and its traceback is shown."""
    from holdfast._tools.cli import output  # here: `--help` does not need it

    return output.is_told(error)
