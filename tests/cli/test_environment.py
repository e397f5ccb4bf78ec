"""What environment variables mean."""

from __future__ import annotations

import pytest

from kvr_mpi.cli.environment import is_offline


@pytest.mark.parametrize(
    ("value", "alone", "in_a_job"),
    [("1", True, True), ("yes", True, True), ("0", False, False), ("off", False, False), ("", False, True)],
)
def test_offline_as_the_hub_library_reads_it_and_by_default_in_a_job(value: str, alone: bool, in_a_job: bool) -> None:
    assert is_offline({"HF_HUB_OFFLINE": value}) is alone
    assert is_offline({"HF_HUB_OFFLINE": value, "SLURM_JOB_ID": "1"}) is in_a_job
