"""What environment variables mean."""

from __future__ import annotations

import pytest

from kvr_mpi.cli.environment import is_offline


@pytest.mark.parametrize("value", ["1", "yes", "on", "True", "TRUE"])
def test_every_value_that_the_hub_library_reads_as_true_is_offline(value: str) -> None:
    assert is_offline({"HF_HUB_OFFLINE": value})


@pytest.mark.parametrize("value", ["0", "no", "off", "False"])
def test_any_other_value_is_online(value: str) -> None:
    assert not is_offline({"HF_HUB_OFFLINE": value})
    assert not is_offline({"HF_HUB_OFFLINE": value, "SLURM_JOB_ID": "1"})


def test_unless_it_is_set_jobs_under_slurm_are_offline() -> None:
    for environ in ({}, {"HF_HUB_OFFLINE": ""}):
        assert not is_offline(environ) and is_offline({**environ, "SLURM_JOB_ID": "1"})
