"""`kvr sbatch --array`: what is submitted, what it is said to cost, and what cannot be meant."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from constants import Kvr
from made_tables import a_table, fitting

from kvr_mpi.cli.allocation import Allocation
from kvr_mpi.cli.sbatch import scripts_folder
from kvr_mpi.errors import EXIT_CONFIG, EXIT_OK, EXIT_USAGE
from kvr_mpi.tuning.table import save_table


@pytest.fixture
def job(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "corpus").mkdir()
    for number in range(6):
        (tmp_path / "corpus" / f"{number}.txt").write_text("The ferry left at seven. " * (1 + 9 * number))
    path = tmp_path / "job.toml"
    path.write_text(
        f"""
        [model]
        path = "{tiny_model_dir}"
        [documents]
        path = "corpus"
        [output]
        path = "the out"
        """
    )
    monkeypatch.chdir(tmp_path)
    return path


def test_an_array_and_its_gathering(job: Path, run_kvr: Kvr) -> None:
    words = ["--ranks", "8", "--array", "3%2", "--print", "--hardware", "h200"]
    code, out, err = run_kvr("sbatch", job, *words, "--account=abc", "--exclusive")
    assert code == EXIT_OK
    array, gather = re.split(r"^# Then, submitted with --dependency=afterany:JOB:\n", out, flags=re.MULTILINE)
    for line in ("array=0-2%2", "nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "account=abc", "exclusive"):
        assert array.count(f"#SBATCH --{line}\n") == 1
    assert "#SBATCH --account=abc\n" in gather and "exclusive" not in gather and "gpus" not in gather
    assert "set -- 'the out' 3\n" in gather and "#SBATCH --job-name=kvr-job-gather\n" in gather
    assert "for the longest of 3 shares" in err and re.search(r"predicted cost: \S+ node hours, \S+ GPU hours", err)
    assert re.search(r"GPU memory: at least \S+ \S+ per rank", err)
    minutes = re.search(r"requesting (\d+) min", err)
    assert minutes is not None
    most = Allocation(2, 8, 8, 8).hours(3 * 60 * int(minutes[1]))
    assert f"at most {most}: the time limit of {minutes[1]} min on 2 nodes for each of 3 shares" in err


def test_memory_to_ask_for_and_ranks_that_gain_little(
    job: Path, tmp_path: Path, tiny_model_dir: Path, run_kvr: Kvr
) -> None:
    save_table(fitting(a_table(), tiny_model_dir), tmp_path / "table.json")
    words = ["--ranks", "8", "--print", "--hardware", tmp_path / "table.json"]
    code, _, err = run_kvr("sbatch", job, *words)
    assert code == EXIT_OK
    assert re.search(r"memory: at least \S+ MiB per rank, so about --mem=7G", err), err
    assert "warning: 4 ranks would take only" in err


@pytest.mark.parametrize(
    ("arguments", "expected", "why"),
    [
        (["--array", "7"], EXIT_CONFIG, "7 shares of 6 documents: some shares would be empty"),
        (["--array", "2", "--set", "documents.shard=0/2"], EXIT_CONFIG, "remove documents.shard from the job"),
        (["--ranks", "6", "--time=9", "--nodes=4"], EXIT_CONFIG, "--nodes=4: 6 ranks, 1 per node, need 6"),
        (["--ranks", "6", "--ntasks-per-node", "4"], EXIT_CONFIG, "the same number of ranks on every node"),
        (["--Partition=gpu"], EXIT_CONFIG, "--'Partition': expected a long option of sbatch"),
        (["--array", "2", "--extend"], EXIT_USAGE, "--extend cannot be combined with --array"),
        (["--array", "0-3"], EXIT_USAGE, "expected a number of shares"),
        (["--array", "1"], EXIT_USAGE, "at least 2"),
        (["--account", "abc"], EXIT_USAGE, "options of sbatch are written --NAME=VALUE"),
        (["-p"], EXIT_USAGE, "expected a long option of sbatch"),
        (["--resum"], EXIT_USAGE, "Did you mean --resume?"),
    ],
)
def test_words_that_cannot_be_meant(arguments: list[str], expected: int, why: str, job: Path, run_kvr: Kvr) -> None:
    ranks = [] if "--ranks" in arguments else ["--ranks", "2"]
    code, out, err = run_kvr("sbatch", job, *ranks, "--hardware", "h200", "--print", *arguments)
    assert code == expected and why in " ".join(err.split()) and out == ""


def test_a_plan_says_what_it_takes(job: Path, run_kvr: Kvr) -> None:
    code, out, _ = run_kvr("plan", job, "--ranks", "8", "--hardware", "h200", "--cpus-per-task", "16")
    assert code == EXIT_OK and re.search(r"takes \S+ node hours, \S+ GPU hours, \S+ core hours on 2 node", out)
    used = Allocation(nodes=2, ranks=8, gpus=8, cores=128).used(1800)
    assert used == {"node_hours": 1.0, "gpu_hours": 4.0, "core_hours": 64.0}
    assert Allocation(1, 2, 0, 2).hours(3600) == "1 node hours, 2 core hours"


@pytest.mark.parametrize(
    ("cores", "nodes", "gpus", "hours"),
    [
        ("16(x3),8", "4", "2", "4 node hours, 8 GPU hours, 56 core hours"),
        ("4", "1", "", "1 node hours, 0 GPU hours, 4 core hours"),
    ],
)
def test_a_log_ends_with_what_was_used(cores: str, nodes: str, gpus: str, hours: str) -> None:
    text = (scripts_folder() / "common.sh").read_text()
    spent = text[text.index("spent() {") : text.index("trap spent EXIT")]
    environ = {
        "SLURM_JOB_CPUS_PER_NODE": cores,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_GPUS_ON_NODE": gpus,
        "PATH": "/usr/bin:/bin",
    }
    script = f"is_number() {{ [[ ${{1:-}} =~ ^[0-9]+$ ]]; }}\n{spent}\nSECONDS=3600; spent"
    said = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert said.stdout.rstrip().endswith(f"on {nodes} node{'s' * (nodes != '1')}: {hours}") and said.stderr == ""
