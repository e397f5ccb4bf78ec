"""CUDA-aware MPI: what MPI claims, and a trial in a separate process, since it may crash.

``python -m kvr_mpi.doctor.trial TIMEOUT_S`` runs one rank of the trial, which has two.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvr_mpi.doctor.facts import RankFacts
from kvr_mpi.doctor.findings import Finding, fail, ok, warn
from kvr_mpi.doctor.process import run_limited

# Bytes of a message that MPI sends eagerly, and of one that it sends with a rendezvous.
SIZES = (4 << 10, 16 << 20)
# Variables that tie a process to its MPI job. Without them a launcher starts a new job on this host.
JOB_VARIABLES = (
    *("PMI_", "PMI2_", "PMIX_", "HYDI_", "MPI_LOCAL", "MPIR_", "PALS_", "SLURM_", "MV2_COMM_", "PRTE_", "ORTE_"),
    *("OMPI_COMM_", "OMPI_UNIVERSE_", "OMPI_APP_", "OMPI_FILE_", "OMPI_COMMAND", "OMPI_ARGV", "OMPI_NUM_APP"),
    *("OMPI_FIRST_", "OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_initial_wdir", "OMPI_MCA_shmem_RUNTIME"),
)
USER_VARIABLES = ("PRTE_ALLOW_", "PRTE_MCA_rmaps_", "PMIX_MCA_gds")


def check_cuda_awareness(facts: Sequence[RankFacts]) -> list[Finding]:
    """Report whether MPI claims to be CUDA-aware."""
    mpi, gpus = facts[0].mpi, any(one.device.count for one in facts)
    if mpi is None:
        return [ok("cuda-aware", "no MPI")]
    claim = {True: "yes", False: "no", None: "unknown"}[mpi.cuda]
    rest = (
        "no GPU to use it with" if not gpus else "a claim, tested below" if mpi.cuda else "staged through host memory"
    )
    return [ok("cuda-aware", f"{claim} ({mpi.cuda_why}); {rest}")]


def is_to_be_tried(facts: Sequence[RankFacts]) -> bool:
    """Whether MPI claims to accept GPU buffers, and there are GPUs."""
    mpi = facts[0].mpi
    return mpi is not None and bool(mpi.cuda) and facts[0].device.count > 0


def find_launcher(libraries: Sequence[str], search_path: str) -> list[str] | None:
    """Find the command that starts two ranks: the mpirun of the loaded libmpi, any other mpirun, or srun."""
    folders = [parent / "bin" for path in libraries for parent in list(Path(path).parents)[1:3]]
    places = os.pathsep.join([*map(str, folders), str(Path(sys.executable).parent), search_path])
    for name in ("mpirun", "mpiexec"):
        if found := shutil.which(name, path=places):
            return [found, "-n", "2"]
    srun = shutil.which("srun", path=search_path)
    return [srun, "--overlap", "-N", "1", "-n", "2"] if srun else None


def trial_environment(environ: Mapping[str, str], launcher: str) -> dict[str, str]:
    """Remove the variables that tie this process to its MPI job."""
    dropped = tuple(prefix for prefix in JOB_VARIABLES if prefix != "SLURM_" or Path(launcher).name != "srun")
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(dropped) or name.startswith(USER_VARIABLES)
    }
    # The two ranks are started in addition to those of this job.
    return kept | {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}


def try_transfers(command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> Finding:
    """Run the trial, and report how it ends: success, crash, hang, wrong data, or failure to start."""
    code, output, errors = run_limited(command, environ, timeout_s)
    rows, words = _rows(output), " ".join(errors.split())[-400:]
    ready, sums = [row for row in rows if "ready" in row], [row for row in rows if "sent" in row]
    said = f"; its output: {words}" if words else ""
    if len({row["ready"] for row in ready}) < 2:
        how = f"no response within {timeout_s:.0f} s" if code is None else f"exit code {code}"
        text = f"the test process did not start ({how}){said}"
        return warn("transfers", text, f"run it by hand: {' '.join(command)}")
    sent = {(row["rank"], row["bytes"]): row["sent"] for row in sums}
    wrong = [
        row["bytes"] for row in sums if sent.get((1 - row["rank"], row["bytes"]), row["received"]) != row["received"]
    ]
    if code is None:
        problem = f"hangs, killed after {timeout_s:.0f} s{said}"
    elif wrong:
        problem = f"the checksum of {wrong[0]} bytes is wrong: data are corrupted in transit"
    elif code != 0 or len(sums) < 2 * len(SIZES):
        how = f"killed by {signal.Signals(-code).name}" if -64 < code < 0 else f"exit code {code}"
        problem = f"crashes ({how}){said}"
    else:
        sizes = " and ".join(map(str, SIZES))
        return ok("transfers", f"buffers of {sizes} bytes exchanged by 2 ranks on this host, checksums correct")
    return fail("transfers", f"GPU buffers: {problem}", "use an MPI with working GPU support, or disable it")


def _rows(text: str) -> list[dict[str, Any]]:
    """Extract flat JSON objects from mixed output of ranks and launchers."""
    rows = []
    for found in re.findall(r"\{[^{}]*\}", text):
        try:
            rows.append(json.loads(found))
        except ValueError:  # output of the launcher
            continue
    return rows


def swap_buffers(timeout_s: float) -> None:
    """Run as one of two ranks that exchange buffers, on a GPU if there is one; prints JSON lines with checksums.

    MPI accesses the buffers directly. If it crashes or hangs, it does so only in this process.
    """
    # Ends this process even if a driver call hangs and the launcher is gone.
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    import torch

    from kvr_mpi.model.devices import visible_gpus
    from kvr_mpi.topology import gpus_in_turn
    from kvr_mpi.transport.links import checksum, pattern
    from kvr_mpi.transport.mpi import connect
    from kvr_mpi.transport.mpi_query import swap_in_place

    world = connect()
    device = torch.device("cpu")
    if seen := visible_gpus():
        device = torch.device("cuda", gpus_in_turn([seen] * world.size)[world.rank])  # both see the same
        torch.cuda.set_device(device)  # MPI may only accept memory of the current GPU
    buffers = [
        (pattern(size, world.rank).to(device), torch.zeros(size, dtype=torch.uint8, device=device)) for size in SIZES
    ]
    print(json.dumps({"ready": world.rank, "size": world.size}), flush=True)
    for send, receive in buffers:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # MPI does not wait for CUDA streams
        swap_in_place(send, receive, 1 - world.rank)
        sums = {"sent": checksum(send), "received": checksum(receive)}
        print(json.dumps({"rank": world.rank, "bytes": send.numel(), **sums}), flush=True)


if __name__ == "__main__":
    swap_buffers(float(sys.argv[1]))
