"""`kvr search` as a user runs it, and jobs that use what it wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_jobs import with_settings
from made_tables import an_entry

from kvr_mpi.errors import ConfigError
from kvr_mpi.partition import Partition
from kvr_mpi.store.results import open_results
from kvr_mpi.tuning.table import load_table, save_table
from kvr_mpi.tuning.tabulate import check_contexts


def test_contexts_that_cannot_be_searched() -> None:
    assert check_contexts([256, 128, 256], 2, 512) == [128, 256]
    with pytest.raises(ConfigError, match="mpirun -n 2 kvr search"):
        check_contexts([128], 1, 512)
    with pytest.raises(ConfigError, match="3: expected from 4 .two tokens per rank. to what the model takes"):
        check_contexts([3], 2, None)


@pytest.fixture
def job(job: Path, tmp_path: Path) -> Path:
    """A job whose slices come from a table yet to be made, over three documents of which one is shorter than 256."""
    text = job.read_text().replace('"even"', f'"{tmp_path / "tables"}"')
    job.write_text(text.replace(str(tmp_path / "corpus"), str(tmp_path / "corpus" / "doc-[234].txt")))
    return job


@pytest.mark.slow
def test_search_writes_a_table_by_which_a_job_is_cut(
    job: Path, tmp_path: Path, tiny_model_dir: Path, mpirun: Any, kvr: Path, kvr_run: Path, run_here: Any
) -> None:
    options = ["--contexts", "256,32", "--output", tmp_path / "tables"]
    command = [kvr, "search", *with_settings(f"model.path={tiny_model_dir}"), *options]
    found = mpirun(2, command, env={"OMP_NUM_THREADS": "3"})
    assert found.returncode == 0, found.stderr
    (path,) = (tmp_path / "tables").glob("*.json")
    table = load_table(path)
    again = mpirun(2, [*command, "--output", path])
    assert again.returncode == 78 and "exists; add --overwrite" in again.stderr and load_table(path) == table
    assert "3 threads" in table.key.device, "as many as a job would have"
    assert path.name.endswith("_p2.json") and "-float32_" in path.name
    assert (table.key.ranks, table.key.dtype, table.key.model.architecture) == (2, "float32", "LlamaForCausalLM")
    assert [entry.context_tokens for entry in table.entries] == [32, 256]
    assert table.rates.layers == 3 and table.rates.kv_bytes == 2 * 2 * 8 * 4
    for entry in table.entries:
        assert f"{entry.context_tokens} tokens: {entry.partition}" in found.stderr, "it says what it chose"
        assert "kvr search" in entry.provenance.command and "torch" in entry.provenance.versions
        assert entry.provenance.versions["mpi"] != "none" and entry.provenance.hosts
        assert entry.predicted_ttft_s > 0 and entry.ttft_s > 0 and entry.noise_ratio is not None
        assert entry.runs >= entry.repetitions >= 1

    # Splits nobody would choose, so that it shows where the slices come from.
    entries = tuple(an_entry(bounds) for bounds in ((0, 8, 32), (0, 64, 256)))
    other = replace(table.rates, rest_token_s=1000 * table.rates.rest_token_s)
    save_table(table.model_copy(update={"entries": entries, "rates": other}), path)
    run = mpirun(2, [kvr_run, job], env={"OMP_NUM_THREADS": "3"})
    assert run.returncode == 0, run.stderr
    assert "times as fast (other kernels, versions or processors)" in run.stderr, "the table is of a slower machine"
    records = list(open_results(tmp_path / "out"))
    inside = [record for record in records if record.prompt_tokens <= 256]
    assert len(records) == 3 and 0 < len(inside) < 3
    assert min(record.prompt_tokens for record in inside) >= 128, "long enough to be cut at all"
    for record in inside:
        known = record.prompt_tokens - record.computed_tokens
        assert record.slices == Partition.by_ratio(record.computed_tokens, [1, 3], 16).after(known).bounds
    assert run.stderr.count("from the fitted rates of the table") == 1, "the longer prompts are warned about once"
    refused = run_here(3, [job, "--overwrite"])
    assert refused.returncode == 78 and "ranks is 2, here it is 3" in refused.stderr
