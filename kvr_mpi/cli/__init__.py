"""The command line. Each command parses its arguments, calls the package and prints the result.

Only click is imported here, so that ``--help`` is fast; a command's module is imported when it runs.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import NoReturn

import click

from kvr_mpi import __version__
from kvr_mpi.disk import named_error
from kvr_mpi.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_USAGE, KvrError

# Subcommands in the groups of `kvr --help`, with their descriptions; each is a function in a module of the same name.
GROUPS = {
    "Getting started": {
        "demo": "Summarize eight documents that come with kvr-mpi, with a small real model.",
        "init": "Create a job file from a folder of documents, a model and a question.",
        "run": "Run a job: process every document and store the answers.",
        "status": "Show the progress of a run and the state of its ranks.",
        "export": "Export answers as JSON Lines, CSV or Parquet, or export keys and values.",
    },
    "Everyday": {
        "doctor": "Check the launcher, GPUs, network, output folder and batch system.",
        "plan": "Forecast the time, memory and cost of a job without running it.",
        "sbatch": "Submit a job to SLURM; nodes and time limit come from the plan.",
        "inspect": "Show the results of a run, or one document.",
        "ask": "Ask new questions about stored documents without a new prefill.",
        "merge": "Merge the results of a run into one verified HDF5 file.",
    },
    "Occasional": {
        "report": "Write an HTML page with the answers and timings of a run.",
        "verify": "Compare the results of chains with those of one process.",
        "search": "Measure the best slices on this machine, or the tokens kept by each KV head.",
        "prune": "Remove stored keys and values by document, age or size.",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}
# If a launcher starts these commands on several ranks, only the first rank runs them.
ON_FIRST_RANK = ("demo", "init", "plan", "sbatch", "status", "inspect", "export", "merge", "report", "prune")


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of a user's work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"{__name__}.{cmd_name}"), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a subcommand; for an unknown one, suggest similar ones."""
        try:
            found = super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], COMMANDS)
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean {' or '.join(map(repr, near))}?", ctx) from error
        if found[0] in ON_FIRST_RANK and _rank() > 0:
            ctx.exit()
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands without importing them."""
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def group() -> None:
    """Long-document LLM batch work on HPC clusters (KV-Runahead over MPI).

    \b
    kvr demo                       # run an example
    kvr init                       # create your own job

    For shell completion, add eval "$(_KVR_COMPLETE=bash_source kvr)" to ~/.bashrc; for zsh and fish, use zsh_source
    and fish_source.
    """  # noqa: D301


def kvr() -> NoReturn:
    """Entry point of ``kvr``."""
    _main(group, "kvr")


def kvr_run() -> NoReturn:
    """Entry point of ``kvr-run``, the same as ``kvr run``."""
    from kvr_mpi.cli.run import run

    _main(run, "kvr-run")


def _rank() -> int:
    """Return this process's rank from the launcher's variables."""
    from kvr_mpi.transport.mpi import launched_rank

    return launched_rank(os.environ)


def _main(command: click.Command, name: str) -> NoReturn:
    """Run a command; user errors become one message and their exit code.

    Only the first rank prints help and errors in the arguments, which are the same on all ranks.
    """
    from kvr_mpi.cli.environment import cache_folder
    from kvr_mpi.cli.module_scan import remember_modules

    is_first = _rank() == 0
    if not is_first and {"-h", "--help", "--version"}.intersection(sys.argv[1:]):
        sys.exit(0)
    remember_modules(cache_folder())
    try:
        code = command.main(prog_name=name, standalone_mode=False)
        sys.stdout.flush()  # here, where a closed pipe is handled, and not when the interpreter exits
    except click.exceptions.Abort:
        code = EXIT_INTERRUPTED
        if "mpi4py.MPI" in sys.modules:  # MPI would warn, as it ends, about each transfer in progress
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    except click.ClickException as error:
        if is_first:
            error.show()
        code = EXIT_USAGE
    except BrokenPipeError:  # the reader of our output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_BUG
    except (KvrError, OSError) as error:
        named = named_error(error)
        if not isinstance(named, KvrError):
            raise
        click.echo(f"Error: {named}", err=True)
        code = named.exit_code
    sys.exit(code if isinstance(code, int) else 0)
