"""Hardware profiles: rates of a machine, shipped with the package or from a JSON file.

The cost model divides a `Workload` by these rates. Keys name their units. Link rates are bytes per second in one
direction: a 400 Gbit/s link is 50e9.
"""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from kvr_mpi.disk import read_regular
from kvr_mpi.errors import ConfigError, DataError
from kvr_mpi.plain import Strict, explain

MAX_FILE_BYTES = 1 << 20

# Limits within which every machine lies; they prevent overflows in forecasts.
Positive = Annotated[float, Field(ge=1, le=1e24)]
NotNegative = Annotated[float, Field(ge=0, le=1e6)]


class Hardware(Strict):
    """Rates of one rank, and of its link to the next rank."""

    name: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(min_length=1, description="where the figures come from")]
    gemm_flop_per_s: Positive
    attention_flop_per_s: Positive
    launch_floor_s: NotNegative = Field(0.0, description="minimum time to launch a layer's kernels")
    layer_overhead_s: NotNegative = Field(0.0, description="per layer and rank, if there are several ranks")
    link_bytes_per_s: Positive
    link_latency_s: NotNegative
    memory_bytes_per_s: Positive
    memory_bytes: Positive
    host_ranks: Annotated[int, Field(ge=1, le=1 << 20)] = Field(1, description="ranks that share a host")
    host_link_bytes_per_s: Positive | None = Field(
        None,
        description="links within a host, one direction, which carry a group's all-reduces; default: link_bytes_per_s",
    )
    host_link_latency_s: NotNegative | None = Field(None, description="the same; default: link_latency_s")

    def group_link(self, ranks: int) -> tuple[float, float]:
        """Bandwidth (bytes per second) and latency within a tensor-parallel group.

        If the group fits on a host, these are the links within a host. Over several hosts, collective libraries use
        one ring per network adapter, so all adapters of a host are used, up to the bandwidth within a host.
        """
        speed, latency_s = self.host_link_bytes_per_s, self.host_link_latency_s
        speed = self.link_bytes_per_s if speed is None else speed
        if ranks <= self.host_ranks:
            return speed, self.link_latency_s if latency_s is None else latency_s
        return min(speed, self.host_ranks * self.link_bytes_per_s), self.link_latency_s


def profiles() -> list[str]:
    """Names of the shipped profiles."""
    folder = resources.files("kvr_mpi.costs") / "data"
    return sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json"))


def load_hardware(name_or_path: str) -> Hardware:
    """Read a shipped profile or a file.

    Raises `ConfigError`, which lists the profiles, if there is neither, and `DataError` if the file is damaged, or a
    rate is missing, negative or not finite.
    """
    path = find_hardware(name_or_path)
    if path is None:
        text = (resources.files("kvr_mpi.costs") / "data" / f"{name_or_path.lower()}.json").read_text()
    else:
        text = _read_text(path)
    try:
        return Hardware.model_validate_json(text)
    except ValidationError as error:
        raise DataError(
            f"hardware file {name_or_path!r} is not a profile: {explain(error)}; valid keys: "
            f"{', '.join(Hardware.model_fields)}"
        ) from error


def find_hardware(name_or_path: str) -> Path | None:
    """Return the path of a file or folder, None for a shipped profile; raise `ConfigError` if there is neither."""
    path, shipped = Path(name_or_path), profiles()
    if name_or_path.lower() in shipped:
        return None
    if not (path.is_file() or path.is_dir()):
        near = [name for name in shipped if name.startswith(name_or_path.lower())]  # h100 is h100-80gb, not h200
        close = near or difflib.get_close_matches(name_or_path.lower(), shipped, 1)
        raise ConfigError(
            f"hardware {name_or_path!r}: no such profile or file; {f'did you mean {close[0]!r}? ' if close else ''}"
            f"shipped profiles: {', '.join(shipped)}; or give a JSON file with the same keys"
        )
    return path


def _read_text(path: Path) -> str:
    try:
        return read_regular(path, MAX_FILE_BYTES).decode()
    except (OSError, ValueError) as error:
        raise DataError(
            f"hardware file {str(path)!r} cannot be read: {error}; shipped profiles: {', '.join(profiles())}"
        ) from error
