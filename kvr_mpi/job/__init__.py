"""The job file: its sections, the table of combinations, and how it is read."""

from kvr_mpi.job.load import break_lines, load_job, make_job, show_job
from kvr_mpi.job.spec import EQUAL_TIME, EVEN, JobSpec, ModelSection, ParallelSection, PromptSection

__all__ = [
    "EQUAL_TIME",
    "EVEN",
    "JobSpec",
    "ModelSection",
    "ParallelSection",
    "PromptSection",
    "break_lines",
    "load_job",
    "make_job",
    "show_job",
]
