"""The commands. Each reads its arguments, calls the package, and prints.

Only click is imported here, so that ``--help`` answers at once; a command's module is imported when it runs.
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

# Subcommands as grouped by `kvr --help`, with their lines in its list; each is a function in a module of the same
# name.
GROUPS = {
    "Getting started": {
        "demo": "Summarise eight documents that come with kvr-mpi, with a small real model.",
        "init": "Write a job file: which documents, which model, what to ask.",
        "run": "Prefill, answer and store every document of a job.",
        "status": "Show the progress of a run: done, failed, left, and its ranks.",
        "export": "Export answers as JSON lines, CSV or Parquet, or keys and values.",
    },
    "Every week": {
        "doctor": "Check the machine: launcher, cores, GPUs, links, files, SLURM.",
        "plan": "Show which documents would run on which chains, when, and why.",
        "sbatch": "Submit a job to SLURM, with nodes and time from the plan.",
        "inspect": "Show the contents of a result file, or one of its documents.",
        "ask": "Ask stored documents new questions, without prefilling them again.",
        "merge": "Merge the results of a run into one HDF5 file, verifying every checksum.",
    },
    "From time to time": {
        "report": "Write an HTML page about a run: where the time went, and the answers.",
        "verify": "Check that chains give the same results as one process.",
        "search": "Measure the best slices on this machine, or how many tokens KV heads keep; write a table.",
        "prune": "Remove stored keys and values: by document, age or size.",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}
# Commands that only the first rank runs if a launcher starts them on several ranks.
ON_FIRST_RANK = ("demo", "init", "plan", "sbatch", "status", "inspect", "export", "merge", "report", "prune")


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of a user's work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a subcommand."""
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
    kvr demo                       # a first look
    kvr init                       # a job of your own

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
    is_first = _rank() == 0
    if not is_first and {"-h", "--help", "--version"}.intersection(sys.argv[1:]):
        sys.exit(0)
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
