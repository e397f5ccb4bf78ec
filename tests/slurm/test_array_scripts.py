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
    assert "host memory" not in err and "keys and values" not in err and "asks for no GPUs" not in err
    minutes = re.search(r"requesting (\d+) min", err)
    assert minutes is not None
    most = Allocation(2, 8, 8, 8).hours(3 * 60 * int(minutes[1]))
    assert f"at most {most}: the time limit of {minutes[1]} min on 2 nodes for each of 3 shares" in err


@pytest.mark.parametrize("options", [[], ["--time=9"]])
def test_memory_to_ask_for_and_ranks_that_gain_little(
    options: list[str], job: Path, tmp_path: Path, tiny_model_dir: Path, run_kvr: Kvr
) -> None:
    """Also if the user has chosen a time limit, which stays."""
    save_table(fitting(a_table(), tiny_model_dir), tmp_path / "table.json")
    words = ["--ranks", "8", "--print", "--hardware", tmp_path / "table.json", "--set", "output.kv=true", *options]
    code, out, err = run_kvr("sbatch", job, *words)
    assert code == EXIT_OK and ("#SBATCH --time=9\n" in out) == ("requesting" not in err) == bool(options)
    assert re.search(r"memory: at least \S+ MiB per rank, so about --mem=7G", err), err
    assert "warning: 4 ranks would take only" in err and "predicted cost: " in err and "predicted " in err
    assert re.search(r"keys and values of 6 documents: about \S+ [KM]iB; \S+ [GT]iB are free", err)


def test_a_job_whose_speed_is_unknown_may_have_a_time_limit(
    job: Path, tmp_path: Path, run_kvr: Kvr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVR_CACHE", str(tmp_path / "cache"))
    code, out, err = run_kvr("sbatch", job, "--ranks", "2", "--print", "--time=9", "--gpus-per-node", "2")
    assert code == EXIT_OK and "#SBATCH --time=9\n" in out
    none, most = err.splitlines()
    assert none.startswith("no forecast of time, cost and memory: the speed of a rank is unknown") and "at most" in most


def test_host_memory_is_said_where_weights_pass_through_it(
    job: Path, run_kvr: Kvr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvr_mpi.setup.planning.placement", lambda device: {})  # without accelerate
    code, _, err = run_kvr("sbatch", job, "--ranks", "8", "--print", "--hardware", "h200")
    assert code == EXIT_OK and re.search(
        r"\nhost memory: at least \S+ [KM]iB per rank, so about --mem=7G, since", err
    ), err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "no GPUs, and for 1 core (--cpus-per-task) per rank"),
        (["--cpus-per-task", "8"], "no GPUs, and for 8 cores per rank"),
        (["--gpus-per-node", "0"], None),
        (["--gpus=2"], None),
        (["--gres=gpu:2"], None),
        (["--set", "model.device=cpu"], None),
    ],
)
def test_a_script_without_gpus_says_so_unless_they_were_decided(
    options: list[str], words: str | None, job: Path, tmp_path: Path, run_kvr: Kvr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVR_CACHE", str(tmp_path / "cache"))
    code, out, err = run_kvr("sbatch", job, "--ranks", "2", "--print", "--time=9", *options)
    assert (
        code == EXIT_OK and "#SBATCH --gpus-per-node" not in out and ("asks for no GPUs" in err) == (words is not None)
    )
    assert (words or "") in err


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
    assert "not included: the time to start and to load the model; kvr sbatch adds 10 min" in out
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
