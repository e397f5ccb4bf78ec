"""Fills in a job script: options of sbatch at the top, arguments below."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

OPTION = re.compile("[a-z][a-z0-9-]*")


def fill_in(script: str, options: Mapping[str, str], arguments: Sequence[str], folder: Path) -> str:
    """Insert sbatch's options and the job's arguments into a script.

    Parameters
    ----------
    options : mapping
        Long names without dashes, and values (empty: a flag); they replace the script's own.
    arguments : sequence of str
        What the script would be given on sbatch's command line.
    folder : Path
        Where the script's siblings are: SLURM runs a copy.
    """
    lines, left = [], dict(options)
    for line in script.splitlines():
        found = re.match(r"#SBATCH --([a-z][a-z0-9-]*)", line)
        lines.append(_directive(found[1], left.pop(found[1])) if found and found[1] in left else line)
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    lines[last + 1 : last + 1] = [
        *(_directive(key, value) for key, value in left.items()),
        "",
        f"export KVR_SLURM_DIR={shlex.quote(str(folder))}",
        f"set -- {shlex.join(arguments)}",
    ]
    return "\n".join(lines) + "\n"


def _directive(key: str, value: str) -> str:
    """Format an option as an #SBATCH line; line breaks are refused, since what follows would be executed."""
    from kvr_mpi.errors import ConfigError

    if not OPTION.fullmatch(key):
        raise ConfigError(f"--{key!r}: expected a long option of sbatch, such as --partition=gpu")
    if not value.isprintable():
        hint = "start this from another folder" if key == "chdir" else "remove them"
        raise ConfigError(f"--{key}={value!r} contains control characters, which could run as a command: {hint}")
    return f"#SBATCH --{key}" + (f"={shlex.quote(value)}" if value else "")
