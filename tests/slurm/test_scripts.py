"""The job scripts as text: valid, forcing nothing a site may want otherwise, and filled in as sbatch reads them.

And `kvr sbatch --array`: what is submitted, what it is said to cost, and what cannot be meant.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from constants import Kvr
from made_jobs import plain_job, toml_of, write_job
from made_tables import a_table, fitting

from kvr_mpi.cli.plan import Allocation
from kvr_mpi.cli.sbatch import SCRIPT, fill_in, scripts_folder
from kvr_mpi.errors import EXIT_CONFIG, EXIT_OK, EXIT_USAGE
from kvr_mpi.tuning.table import save_table

FOLDER = scripts_folder()
SCRIPTS = sorted(FOLDER.glob("*.sh"))
SUBMITTED = [path for path in SCRIPTS if path.name.startswith("kvr_")]


def directives(script: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE)
    assert len(found) == script.count("#SBATCH"), "written in another way than --option=value"
    assert len(found) == len(dict(found)), "said twice"
    return dict(found)


@pytest.mark.parametrize("path", [*SCRIPTS, FOLDER / "site.sh.example"], ids=lambda path: path.name)
def test_bash_takes_them(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        found = subprocess.run(["shellcheck", "-x", path], cwd=FOLDER, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("path", SUBMITTED, ids=lambda path: path.name)
def test_nothing_is_forced_that_sites_differ_in_and_long_jobs_may_be_queued_again(path: Path) -> None:
    chosen = directives(path.read_text())
    forced = {"partition", "account", "mem", "mem-per-cpu", "qos", "constraint", "reservation", "gpus-per-task", "gres"}
    assert not forced & set(chosen) and chosen["open-mode"] == "append"
    assert not re.search(r"^\s*module ", path.read_text(), re.MULTILINE)
    if path.name in ("kvr_prefill.sh", "kvr_array.sh"):
        assert re.fullmatch(r"B:USR2@\d+", chosen["signal"]) and "requeue" in chosen


def test_fill_in_replaces_what_is_there_and_adds_the_rest(tmp_path: Path) -> None:
    before = (FOLDER / SCRIPT).read_text()
    hostile = "'\ntouch smuggled\n$(touch smuggled) `ls`"
    arguments = ["jobs/a'; touch smuggled #\nb.toml", "--set", f"prompt.system={hostile}"]
    after = fill_in(SCRIPT, {"nodes": "7", "chdir": "/a b/c", "exclusive": ""}, arguments, ["export X=7"])
    chosen = directives(after)
    assert chosen == {**directives(before), "nodes": "7", "chdir": "'/a b/c'", "exclusive": ""}
    # What follows the head is run as it is, but for starting the job, which is printed here.
    (tmp_path / "common.sh").write_text('launch() { printf \'%s\\0\' "$X" "$here" "$@"; }\nconclude() { :; }\n')
    runnable = after.replace(f"KVR_SLURM_DIR={FOLDER}", f"KVR_SLURM_DIR='{tmp_path}'")
    said = subprocess.run(["bash"], input=runnable, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert said.split("\0")[:-1] == ["7", str(tmp_path), "kvr-run", *arguments]
    assert not (tmp_path / "smuggled").exists()


def test_what_gpus_of_two_nodes_show_is_tried_to_the_end_though_a_step_fails(tmp_path: Path) -> None:
    (folder := tmp_path / "slurm").mkdir()
    stand_in = (
        'launch() { echo "$NCCL_DEBUG ${NCCL_MAX_CTAS:-all} $*"; [ "$2" != doctor ]; }\nconclude() { exit "$1"; }\n'
    )
    (folder / "common.sh").write_text(stand_in)
    environ = {**os.environ, "KVR_SLURM_DIR": str(folder), "SLURM_JOB_ID": "7", "KVR_CTAS": "1 16"}
    script = ["bash", FOLDER / "kvr_gpu.sh", "/a b/model", "--repeats", "1"]
    run = subprocess.run(script, env=environ, capture_output=True, text=True, check=False)
    doctor, one, sixteen, verify, first, made, job, hangs = re.findall("^(WARN .*)$", run.stdout, re.MULTILINE)
    assert run.returncode == 1 and "exit code 1: kvr doctor" in run.stdout and doctor == "WARN all kvr doctor"
    assert one == "WARN 1 python -m benchmarks links --json runs/gpu-7/links-1.json" and sixteen.startswith("WARN 16 ")
    assert verify.startswith("WARN all kvr verify") and "path=/a b/model --set model.dtype=bfloat16" in verify
    assert made == "WARN all python tests/gpu/gpu_many.py /a b/model runs/gpu-7" and "kvr-run runs/gpu-7/full" in job
    assert "hanging_rank.py 10" in hangs and "a stopped rank: exit code 0" in run.stdout
    assert first.endswith("--json runs/gpu-7/first-token.json --repeats 1") and (tmp_path / "runs" / "gpu-7").is_dir()


@pytest.mark.parametrize("separator", ["\n", "\r", "\x0b", "\x85", "\u2028"])
def test_nothing_can_be_smuggled_into_the_script(
    tmp_path: Path, run_kvr: Kvr, separator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path)
    hostile = tmp_path / f"a{separator}touch smuggled"
    hostile.mkdir()
    command = ["sbatch", job, "--ranks", "4", "--print"]
    for options, folder, word in [
        (["--time=9"], hostile, "--chdir="),
        ([f"--time=9{separator}touch smuggled"], tmp_path, "--time="),
        (["--time=9", f"--comment=x{separator}touch smuggled"], tmp_path, "--comment="),
        (["--time=9", f"--exclusive{separator}touch smuggled"], tmp_path, "exclusive"),
    ]:
        monkeypatch.chdir(folder)
        code, out, err = run_kvr(*command, *options)
        assert code == EXIT_CONFIG and out == "", out
        assert word in err and len(err.splitlines()) == 1, "before any forecast"


# Arrays


@pytest.fixture
def job(tmp_path: Path, tiny_model_dir: Path, known_footprints: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "corpus").mkdir()
    for number in range(6):
        (tmp_path / "corpus" / f"{number}.txt").write_text("The ferry left at seven. " * (1 + 9 * number))
    monkeypatch.chdir(tmp_path)
    return write_job(tmp_path, text=toml_of(plain_job(tiny_model_dir, "corpus", "the out")))


def test_an_array_and_its_gathering(job: Path, run_kvr: Kvr) -> None:
    words = ["--ranks", "8", "--array", "3%2", "--print", "--hardware", "h200"]
    code, out, err = run_kvr("sbatch", job, *words, "--account=abc", "--exclusive")
    assert code == EXIT_OK
    array, gather = re.split(r"^# Then, submitted with --dependency=afterany:JOB:\n", out, flags=re.MULTILINE)
    for line in ("array=0-2%2", "nodes=1", "ntasks-per-node=8", "gpus-per-node=8", "account=abc", "exclusive"):
        assert array.count(f"#SBATCH --{line}\n") == 1
    assert "#SBATCH --account=abc\n" in gather and "exclusive" not in gather and "gpus" not in gather
    assert "set -- 'the out' 3\n" in gather and "#SBATCH --job-name=kvr-job-gather\n" in gather
    assert "for the longest of 3 shares" in err and re.search(r"predicted cost: \S+ node hours, \S+ GPU hours", err)
    assert re.search(r"GPU memory: at least \S+ \S+ per rank", err)
    assert "host memory" not in err and "keys and values" not in err and "requests no GPUs" not in err
    minutes = re.search(r"requesting (\d+) min", err)
    assert minutes is not None
    most = Allocation(1, 8, 8, 8).hours(3 * 60 * int(minutes[1]))
    assert f"maximum cost: {most} for the time limit of {minutes[1]} min on 1 node for each of 3 shares" in err


@pytest.mark.parametrize("options", [[], ["--time=9"]])
def test_memory_to_ask_for_and_ranks_that_gain_little(
    options: list[str], job: Path, tmp_path: Path, tiny_model_dir: Path, run_kvr: Kvr
) -> None:
    """Also if the user has chosen a time limit, which stays."""
    save_table(fitting(a_table(), tiny_model_dir), tmp_path / "table.json")
    words = ["--ranks", "8", "--print", "--hardware", tmp_path / "table.json", "--set", "output.kv=true", *options]
    code, out, err = run_kvr("sbatch", job, *words)
    assert code == EXIT_OK and ("#SBATCH --time=9\n" in out) == ("requesting" not in err) == bool(options)
    assert re.search(r"keys and values of 6 documents: about \S+ [KM]iB; \S+ [GT]iB are free", err)
    assert re.search(r"memory: at least \S+ MiB per rank, so about --mem=7G", err), err
    assert "; request 4" in err
    assert "mem" not in directives(out), "sites differ"
    assert directives(run_kvr("sbatch", job, *words, "--mem=planned")[1])["mem"] == "7G"


@pytest.mark.parametrize(
    ("arguments", "expected", "why"),
    [
        (["--array", "7"], EXIT_CONFIG, "7 shares of 6 documents: some shares would be empty"),
        (["--array", "2", "--set", "documents.shard=0/2"], EXIT_CONFIG, "remove documents.shard from the job"),
        (["--ranks", "6", "--time=9", "--nodes=4"], EXIT_CONFIG, "--nodes=4: 6 ranks, 1 per node, need 6"),
        (["--ranks", "6", "--ntasks-per-node", "4"], EXIT_CONFIG, "the same number of ranks on every node"),
        (["--hardware", "h20"], EXIT_CONFIG, "did you mean 'h200'?"),
        (["--Partition=gpu"], EXIT_CONFIG, "--'Partition': expected a long option of sbatch"),
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "no GPUs, and 1 core (--cpus-per-task) per rank"),
        (["--gpus-per-node", "0"], None),
        (["--gres=gpu:2"], None),
        (["--set", "model.device=cpu"], None),
    ],
)
def test_what_is_unknown_or_undecided_is_said(
    options: list[str], words: str | None, job: Path, tmp_path: Path, run_kvr: Kvr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVR_CACHE", str(tmp_path / "cache"))
    code, out, err = run_kvr("sbatch", job, "--ranks", "2", "--print", "--time=9", *options)
    assert code == EXIT_OK and "#SBATCH --time=9\n" in out and "#SBATCH --gpus-per-node" not in out
    assert "no forecast of time, cost and memory: the speed of a rank is unknown" in err
    assert ("requests no GPUs" in err) == (words is not None) and (words or "") in err


def test_options_win_over_the_users_defaults(
    job: Path, tmp_path: Path, run_kvr: Kvr, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SBATCH_ACCOUNT and its like win over a script's own lines, so sbatch gets the options themselves."""
    stand_in = tmp_path / "bin" / "sbatch"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/options; echo 7\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(stand_in.parent), prepend=os.pathsep)
    words = ["--ranks", "2", "--hardware", "h200", "--time=9", "--account=b", "--exclusive"]
    assert run_kvr("sbatch", job, *words)[0] == EXIT_OK
    options = (tmp_path / "options").read_text().split()
    assert {"--account=b", "--time=9", "--exclusive", "--nodes=1"} <= set(options)


def test_an_environment_in_one_file_is_named_in_the_script(job: Path, tmp_path: Path, run_kvr: Kvr) -> None:
    packed = tmp_path / "my env.tar"
    words = ("sbatch", job, "--ranks", "2", "--hardware", "h200", "--time=9", "--print", "--environment-file")
    code, _, err = run_kvr(*words, packed)
    assert code == EXIT_CONFIG and "my env.tar: not found" in err
    packed.write_text("")
    code, out, err = run_kvr(*words, packed)
    assert code == EXIT_OK and f"export KVR_ENVIRONMENT_FILE='{packed}'\n" in out, err
    assert "environment-file" not in directives(out)
    code, _, err = run_kvr(*words, tmp_path / "env.zip")
    assert code == EXIT_CONFIG and ".tar.gz" in err


def test_a_file_of_defaults_is_below_variables_and_options(
    job: Path, tmp_path: Path, run_kvr: Kvr, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site's below a user's; what is taken from them is printed."""
    for name in ("site", "user"):
        (tmp_path / name / "kvr-mpi").mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    site, user = (tmp_path / name / "kvr-mpi" / "sbatch.toml" for name in ("site", "user"))
    site.write_text(
        'account = "a"\npartition = "a"\nexclusive = true\nhardware = "h100-80gb"\nsetup = "module load x"\n'
    )
    user.write_text(
        'partition = "b"\nqos = "b"\nexclusive = false\ncpus-per-task = 3\nhardware = "h200"\nsetup = ["ml y"]\n'
    )
    monkeypatch.setenv("SBATCH_QOS", "c")
    code, out, err = run_kvr("sbatch", job, "--ranks", "2", "--print", "--time=2h30m", "--account=d")
    assert code == EXIT_OK and re.search("based on .*h200", err, re.IGNORECASE), err
    chosen = directives(out)
    assert {key: chosen.get(key) for key in ("account", "partition", "cpus-per-task", "time")} == {
        **{"account": "d", "partition": "b", "cpus-per-task": "3", "time": "150"}
    }
    assert not {"qos", "exclusive", "hardware"} & chosen.keys(), "a variable wins, false takes back"
    assert out.index("module load x\nml y\n") < out.index("export KVR_SLURM_DIR=")
    used = "--partition=b --hardware=h200 --cpus-per-task=3 and 2 lines to run first"
    assert f"defaults from {site}, {user}: {used}" in err
    monkeypatch.setenv("SBATCH_TIMELIMIT", "77")
    assert directives(run_kvr("sbatch", job, "--ranks", "2", "--print")[1])["time"] == "77"
    for text, words in (("account = [1]", "expected text"), ("ranks = 3", "on the command line"), ("x", "as TOML")):
        user.write_text(text)
        code, out, err = run_kvr("sbatch", job, "--ranks", "2", "--print")
        assert code == EXIT_CONFIG and words in err and str(user) in err and out == ""


def test_a_plan_says_what_it_takes(job: Path, run_kvr: Kvr) -> None:
    code, out, _ = run_kvr("plan", job, "--ranks", "8", "--hardware", "h200", "--cpus-per-task", "16")
    assert code == EXIT_OK and re.search(r"cost: \S+ node hours, \S+ GPU hours, \S+ core hours on 1 node", out)
    assert "not included: startup and loading the model; kvr sbatch adds 10 min" in out
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
    spent = text[text.index("spent() {") : text.index("trap 'remove_environment; spent' EXIT")]
    environ = {
        "SLURM_JOB_CPUS_PER_NODE": cores,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_GPUS_ON_NODE": gpus,
        "PATH": "/usr/bin:/bin",
    }
    script = f"is_number() {{ [[ ${{1:-}} =~ ^[0-9]+$ ]]; }}\n{spent}\nSECONDS=3600; spent"
    said = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert said.stdout.rstrip().endswith(f"on {nodes} node{'s' * (nodes != '1')}: {hours}") and said.stderr == ""
