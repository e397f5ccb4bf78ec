"""What a job reads from the variables of batch systems, which are faked here (tests/gridengine runs a real one)."""

from __future__ import annotations

from pathlib import Path

import pytest
from constants import Kvr
from made_jobs import toml_of

from kvr_mpi.cli.environment import is_offline, read_environment, read_owner
from kvr_mpi.documents import CorpusPart
from kvr_mpi.errors import EXIT_CONFIG, ConfigError
from kvr_mpi.job import load_job
from kvr_mpi.scheduler import batch_job

# As each batch system sets them in the third task of an array, which was requeued.
THIRD_TASKS = {
    "SLURM": {"SLURM_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "3"},
    "PBS": {"PBS_JOBID": "9[2].server", "PBS_ARRAY_INDEX": "2"},
    "LSF": {"LSB_JOBID": "9", "LSB_JOBINDEX": "3", "LSB_RESTART": "Y"},
    "Flux": {"FLUX_JOB_ID": "f2Fp", "FLUX_JOB_CC": "2"},
    "Grid Engine": {"JOB_ID": "9", "SGE_TASK_ID": "3", "RESTARTED": "1"},
}
NO_ARRAY = {
    "SLURM": {"SLURM_JOB_ID": "9"},
    "PBS": {"PBS_JOBID": "9.server"},
    "LSF": {"LSB_JOBID": "9", "LSB_JOBINDEX": "0"},
    "Flux": {"FLUX_JOB_ID": "f2Fp"},
    "Grid Engine": {"JOB_ID": "9", "SGE_TASK_ID": "undefined", "RESTARTED": "0"},
}
RESTARTS = {"SLURM": 3, "PBS": 0, "LSF": 1, "Flux": 0, "Grid Engine": 1}


@pytest.mark.parametrize("name", THIRD_TASKS)
def test_a_job_learns_its_id_restarts_end_and_task(name: str) -> None:
    task, alone = batch_job(THIRD_TASKS[name]), batch_job(NO_ARRAY[name])
    assert task is not None and alone is not None
    assert (task.scheduler, task.task, task.restarts) == (name, 2, RESTARTS[name])
    assert (alone.scheduler, alone.task, alone.restarts) == (name, None, 0)
    assert read_owner(THIRD_TASKS[name]).job == task.job
    another = {key: value.replace("2", "4").replace("3", "5") for key, value in THIRD_TASKS[name].items()}
    if name != "SLURM":  # it gives every task an id of its own, which the variables here do not show
        assert read_owner(another).job != task.job, "tasks of an array are different jobs"
    assert is_offline(NO_ARRAY[name])
    assert read_environment({**NO_ARRAY[name], "KVR_END_TIME": "1800"}).deadline_s == 1800


def test_without_a_batch_system() -> None:
    assert batch_job({"JOB_ID": "7"}) is None, "a name that other programs may use"
    assert read_environment({"SLURM_JOB_END_TIME": "soon"}).deadline_s is None
    assert read_environment({"SLURM_JOB_END_TIME": "5", "KVR_END_TIME": "6"}).deadline_s == 6


def test_each_task_of_an_array_takes_its_share_of_the_corpus(tmp_path: Path, run_kvr: Kvr) -> None:
    job = tmp_path / "job.toml"
    settings = {"model.path": "m", "documents.path": "d", "documents.shard": "task/3", "output.path": "out"}
    job.write_text(toml_of(settings))
    for environ in THIRD_TASKS.values():
        spec, _ = load_job(job, environ=environ)
        assert (spec.documents.shard, spec.output.path) == ("2/3", "out/share-2-of-3")
    outside, _ = load_job(job, environ={})
    assert outside.documents.part == CorpusPart(0, 3)
    code, _, err = run_kvr("run", job)
    assert code == EXIT_CONFIG and "submit the job as an array" in err
    with pytest.raises(ConfigError, match="task 2 of the array"):
        load_job(job, ["documents.shard=task/2"], environ=THIRD_TASKS["PBS"])
    for wrong in ("task/0", "task", "task/x"):
        with pytest.raises(ConfigError, match="task/8"):
            load_job(job, [f"documents.shard={wrong}"], environ={})
