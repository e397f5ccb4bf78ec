"""Options that several benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.rivals import Rival, open_rival
from kvr_mpi.cli.environment import read_environment
from kvr_mpi.cli.options import DEFAULT_MODEL, grouped, parse_names
from kvr_mpi.duration import parse_duration
from kvr_mpi.store.targets import check_file
from kvr_mpi.transport import Transport, on_root
from kvr_mpi.transport.choose import NAMES

F = TypeVar("F", bound=Callable[..., Any])
# The value of an option that prints, or writes where a file is named.
PRINT = "-"

transport_option = click.option(
    "--transport",
    type=click.Choice(NAMES),
    default="auto",
    show_default=True,
    help="What carries keys and values between ranks; auto tests what works here, and reports its choice.",
)
model_options = grouped(
    click.option(
        "--model",
        default=DEFAULT_MODEL,
        show_default=True,
        help="Model folder, .gguf file, or id on the Hugging Face hub; or, assembled by this benchmark: "
        "qwen2.5-coder-0.5b, gemma-3-270m, random-llama-3.2-1b.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        help="Data type of the weights; auto: as stored in the model.  [default: bfloat16 on CPUs, auto on GPUs]",
    ),
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="auto: a GPU if there is one.",
    ),
)


def default_dtype(device: str) -> str:
    """Choose what a model is timed in on a device (``auto``, ``cpu``, ``cuda``), where no ``--dtype`` is given.

    That is what models ship in: on GPUs as stored, and on CPUs bfloat16, since the GGUF file of the demo says nothing.
    """
    import torch

    is_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return "auto" if is_gpu else "bfloat16"


def make_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Make a parser of a benchmark's options."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m benchmarks {name}", description=about, formatter_class=formatter)


def check_writable(*files: Path | str | None) -> None:
    """Find out before a long measurement that its files could not be written after it; files of runs never are.

    Raises
    ------
    OutputError
        Of `check_file`.
    """
    for file in files:
        if file is not None:
            check_file(Path(file), overwrite=True)


def _percent(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    """Read ``3%`` as 0.03."""
    if text is None:
        return None
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0.0 < share < 1.0:
        raise click.BadParameter(f"{text!r}; expected a share such as 3%", context, option)
    return share


def _seconds(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    return None if text is None else parse_duration(text)


def patience_options(function: F) -> F:
    """Add ``--repeats``, ``--until`` and ``--time-limit`` (`pairs.Patience`)."""
    return grouped(
        click.option(
            "--repeats",
            default=5,
            show_default=True,
            type=click.IntRange(1),
            help="Minimum number of pairs of runs of each with ours; fewer than 5 never count as significant.",
        ),
        click.option(
            "--until",
            callback=_percent,
            metavar="PERCENT",
            help="Repeat until the confidence interval of each ratio is within this of its median, such as 3%.",
        ),
        click.option(
            "--time-limit",
            callback=_seconds,
            metavar="TIME",
            help="Start no new pair after this time, as SLURM writes it, such as 20:00.",
        ),
    )(function)


def rival_options(function: F) -> F:
    """Add ``--rivals`` and ``--rivals-folder`` (`open_rivals`)."""
    return grouped(
        click.option(
            "--rivals",
            default="",
            metavar="NAMES",
            help="Other engines to compare with, which use all cores: openvino, llama.cpp, vllm; "
            "`benchmarks/install_rivals` installs them.",
        ),
        click.option(
            "--rivals-folder",
            type=click.Path(file_okay=False, path_type=Path),
            default=".rivals",
            show_default=True,
            help="Folder with the engines' Python environments, each named after its engine.",
        ),
    )(function)


json_option = click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows as JSON."
)
plot_option = click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot (.png, .svg or .pdf)."
)


def open_rivals(
    stack: ExitStack, world: Transport, names: str, folder: Path, model: str, dtype: str, longest: int, at_once: int = 1
) -> dict[str, Rival | None]:
    """Start other engines beside the first rank.

    Parameters
    ----------
    stack : ExitStack
        Ends them.
    names : str
        Of engines, separated by commas.
    folder, model, dtype, longest, at_once
        Of `open_rival`.

    Returns
    -------
    dict of str to Rival or None
        By name; None on all ranks but the first.
    """

    def start(name: str) -> Rival:
        cache_dir = read_environment().cache_dir
        return stack.enter_context(open_rival(name, model, dtype, longest, folder, at_once, cache_dir))

    return {name: on_root(world, partial(start, name)) for name in parse_names(names)}


printed_json_option = click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value=PRINT,
    metavar="[FILE]",
    help="Print JSON instead of a table, or write it to FILE.",
)
