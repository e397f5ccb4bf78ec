"""The nodes, GPUs and cores of a job, and their hours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from kvr_mpi.cli.options import grouped

if TYPE_CHECKING:
    from kvr_mpi.job import JobSpec

RANKS_PER_NODE = 4
# Time to start and to load a model from a network file system, which `kvr sbatch` adds to the forecast.
START_S = 600.0

# Options for a node's resources, named as in SLURM.
node_options = grouped(
    click.option(
        "--ntasks-per-node",
        type=click.IntRange(1),
        help="Ranks on each node.  [default: 4, or all of them if there are fewer]",
    ),
    click.option(
        "--gpus-per-node",
        type=click.IntRange(0),
        help="GPUs on each node.  [default: one per rank if the job or the hardware profile uses GPUs, else 0]",
    ),
    click.option(
        "--cpus-per-task",
        type=click.IntRange(1),
        help="Cores per rank.  [default: 1, as in SLURM]",
    ),
)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Resources of a whole job."""

    nodes: int
    ranks: int
    gpus: int
    cores: int

    def used(self, seconds: float) -> dict[str, float]:
        """Return node, GPU and core hours of a job that takes `seconds`."""
        hours = seconds / 3600
        return {"node_hours": self.nodes * hours, "gpu_hours": self.gpus * hours, "core_hours": self.cores * hours}

    def hours(self, seconds: float) -> str:
        """Describe the hours of a job that takes `seconds`."""
        words = [
            f"{spent:.2g} {name.replace('_', ' ')}" if spent < 10 else f"{spent:.0f} {name.replace('_', ' ')}"
            for name, spent in self.used(seconds).items()
            if self.gpus or name != "gpu_hours"
        ]
        return ", ".join(words).replace("gpu", "GPU")


def allocation_of(
    spec: JobSpec,
    ranks: int,
    hardware: str | None,
    *,
    ntasks_per_node: int | None,
    gpus_per_node: int | None,
    cpus_per_task: int | None,
) -> Allocation:
    """Return the resources of a job with this number of ranks.

    Raises
    ------
    ConfigError
        If the nodes would not all have the same number of ranks.
    """
    from kvr_mpi.errors import ConfigError
    from kvr_mpi.topology import divides

    per_node = ntasks_per_node or min(RANKS_PER_NODE, ranks)
    if not divides(per_node, ranks):
        raise ConfigError(
            f"--ranks {ranks} --ntasks-per-node {per_node}: expected the same number of ranks on every node"
        )
    nodes = ranks // per_node
    gpus = _gpus(spec, per_node, hardware) if gpus_per_node is None else gpus_per_node
    return Allocation(nodes, ranks, nodes * gpus, ranks * (cpus_per_task or 1))


def _gpus(spec: JobSpec, per_node: int, hardware: str | None) -> int:
    """Return the GPUs per node; shipped profiles are of GPUs, tables may be of any hardware."""
    from kvr_mpi.costs.hardware import profiles

    return per_node if spec.model.device == "cuda" or (spec.model.device == "auto" and hardware in profiles()) else 0
