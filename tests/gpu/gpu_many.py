"""Steps for several GPUs of one host: times by the number of ranks, links, whole jobs, and ranks that hang or die."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from random import Random

from gpu_machine import WORDS, make_tokenizer, nccl_rank_count, random_model, rank_count
from gpu_ranks import find_launcher, launch
from gpu_steps import Absent, Figures, Given, end_all, family_of

RANKS = (1, 2, 4, 8)
CONTEXTS = (16_384, 65_536)
# Seconds without a sign of life that end a job here, and for how long it may then take to end.
PEER_TIMEOUT_S, END_S = 10, 40
DOCUMENTS, NEW_TOKENS, SHORTEST, LONGEST = 200, 64, 100, 12_000
HERE = Path(__file__).parent
JOB = """
[model]
path = "{model}"
dtype = "{dtype}"
device = "{device}"
[documents]
path = "{corpus}"
[prompt]
template = "{{text}}"
[generation]
max_new_tokens = {new_tokens}
temperature = 0.8
stop = ["w7 w8"]
[output]
path = "{output}"
"""


def model_folder(given: Given) -> str:
    """The user's model, or a random one of the 8B shape, which the first step that needs it writes to memory.

    Raises
    ------
    Absent
        If there is no room for it.
    """
    if given.model:
        return given.model
    folder = memory_folder() / "model"
    if not (folder / "tokenizer.json").exists():
        if not given.is_small and shutil.disk_usage(memory_folder()).free < 20 << 30:
            raise Absent(f"less than 20 GiB are free in {memory_folder()} for a model (--model FOLDER)")
        loaded = random_model(given)
        loaded.model.config.eos_token_id = loaded.model.generation_config.eos_token_id = None
        loaded.model.config.bos_token_id = loaded.model.generation_config.bos_token_id = None
        loaded.model.save_pretrained(folder)
        make_tokenizer(folder)
    return str(folder)


def memory_folder() -> Path:
    """Where that model is; `run_all` removes it in the end."""
    shared = Path("/dev/shm")
    folder = (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"kvr-gpu-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    return folder


def first_tokens_by_ranks(given: Given) -> Figures:
    """Seconds to the first token of a prompt on 1, 2, 4 and 8 ranks, and how much faster than on one that is."""
    most, model = rank_count(given), model_folder(given)
    contexts = (256,) if given.is_small else CONTEXTS
    times: dict[int, dict[int, float]] = {tokens: {} for tokens in contexts}
    for ranks in (ranks for ranks in RANKS if ranks <= most):
        file = Path(given.output) / f"first-token-{ranks}.json"
        words = ["--model", model, "--device", given.kind, "--dtype", _dtype(given), "--json", str(file)]
        words += ["--contexts", ",".join(map(str, contexts)), "--strategies", "kvr-e", "--repeats", "3"]
        launch(ranks, "python", "-m", "benchmarks", "first-token", *words, timeout_s=110)
        found = json.loads(file.read_text())
        for row in found["rows"] if isinstance(found, dict) else found:
            times[row["context_tokens"]][ranks] = row["ttft_s"]
    table: Figures = {"ranks": " ".join(f"{ranks:>16}" for ranks in times[contexts[0]])}
    for tokens, by_ranks in times.items():
        rows = (f"{seconds:8.3f} s {by_ranks[1] / seconds:4.2f} x" for seconds in by_ranks.values())
        table[f"{tokens} tokens"] = " ".join(rows)
    return table | {f"seconds, {tokens}, {ranks}": s for tokens, each in times.items() for ranks, s in each.items()}


def every_link(given: Given) -> Figures:
    """Slowest and fastest link by the size of a message, in GB/s."""
    if (ranks := rank_count(given)) < 2:
        raise Absent("one GPU")
    file, sizes = Path(given.output) / "links.json", ["--sizes", "65536"] if given.is_small else []
    told = launch(ranks, "python", "-m", "benchmarks", "links", "--json", str(file), *sizes, timeout_s=40)
    found: dict[int, list[float]] = {}
    for row in json.loads(file.read_text())["links"]:
        found.setdefault(row["bytes"], []).append(row["gigabytes_per_s"])
    slow = [line for line in told.splitlines() if line.startswith("warning")]
    figures: Figures = {f"{size} bytes": f"{min(each):.2f} to {max(each):.2f} GB/s" for size, each in found.items()}
    return figures | ({"warning": slow[0]} if slow else {})


def connections_take_memory(given: Given) -> Figures:
    """Memory of a GPU and seconds that the connections to neighbors take, and those to all ranks for sums."""
    if (ranks := nccl_rank_count(given)) < 2:
        raise Absent("one GPU")
    told = launch(ranks, "python", str(HERE / "connections.py"), timeout_s=40)
    return dict(json.loads(next(line for line in told.splitlines() if line.startswith("{"))))


def job_of(given: Given, name: str, documents: int, longest: int) -> Path:
    """Write a job over documents of different lengths; answers are sampled, and some end at a stop string."""
    folder = Path(given.output) / name
    shutil.rmtree(folder, ignore_errors=True)
    (corpus := folder / "corpus").mkdir(parents=True)
    draw = Random(7)
    for number in range(documents):
        count = int(SHORTEST * (longest / SHORTEST) ** draw.random())
        (corpus / f"{number}.txt").write_text(" ".join(f"w{draw.randrange(WORDS)}" for _ in range(count)))
    words = {"model": model_folder(given), "corpus": corpus, "output": folder / "out", "device": given.kind}
    path, new_tokens = folder / "job.toml", 4 if given.is_small else NEW_TOKENS
    path.write_text(JOB.format(**words, dtype=_dtype(given), new_tokens=new_tokens))
    return path


def job_fills_memory(given: Given) -> Figures:
    """All ranks answer documents of different lengths, with room for few of them at once; a few stop early."""
    from kvr_mpi.store.results import open_results

    documents, longest = (6, 110) if given.is_small else (DOCUMENTS, LONGEST)
    job = job_of(given, "full", documents, longest)
    began = time.monotonic()
    room = ["--set", "parallel.memory_gib=6"] if not given.is_small else []
    launch(rank_count(given), "kvr-run", str(job), *room, timeout_s=110)
    seconds = time.monotonic() - began
    results = open_results(job.parent / "out")
    records = list(results.records())
    assert len(records) == documents and not any(each.error for each in records), [each.error for each in records][:5]
    return {
        "seconds, start included": seconds,
        "documents/hour, start included": 3600 * documents / seconds,
        "prompt tokens": sum(each.prompt_tokens for each in records),
        "stopped early": sum(each.finish_reason == "stop" for each in records),
        "ms a token of an answer": 1e3 * statistics.median(each.decode_s / each.new_tokens for each in records),
    }


def groups_decode(given: Given) -> Figures:
    """Milliseconds a step of eight answers together, by a tensor-parallel group of 4, or 2, and by one rank."""
    from kvr_mpi.store.results import open_results

    size = next((size for size in (4, 2) if size <= nccl_rank_count(given)), 1)
    if size == 1:
        raise Absent("one GPU")
    job, found = job_of(given, "group", 2 if given.is_small else 8, SHORTEST + 10 if given.is_small else 2048), {}
    for ranks in (1, size):
        output = job.parent / f"group-of-{ranks}"
        settings = [f"output.path={output}", f"parallel.tensor_parallel={ranks}", "generation.temperature=0"]
        told = launch(ranks, "kvr-run", str(job), *_set(settings), timeout_s=45)
        assert "without CUDA graphs" not in told, told[-2000:]
        records = list(open_results(output).records())
        steps = statistics.median(each.decode_s / max(1, each.new_tokens - 1) for each in records)
        found[f"ms a step, {ranks} ranks"] = 1e3 * steps
    return found


def hanging_ranks_end_jobs(given: Given) -> Figures:
    """A rank that is stopped, and one that is killed: the job ends, and says which; nobody waits for ever."""
    found: Figures = {}
    ranks = max(2, min(4, rank_count(given)))
    for number in (signal.SIGSTOP, signal.SIGKILL):
        job = job_of(given, f"hanging-{number.name}", 400, 150 if given.is_small else 4000)
        words = [*find_launcher(), "-n", str(ranks), str(Path(sys.executable).parent / "kvr-run"), str(job)]
        file = job.parent / "log.txt"
        environ = {**os.environ, "KVR_PEER_TIMEOUT": str(PEER_TIMEOUT_S)}
        with file.open("w") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, env=environ, start_new_session=True)
        try:
            victim = _wait_for_rank(process, file, ranks - 1)
            os.kill(victim, number)
            began = time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                process.wait(PEER_TIMEOUT_S + END_S)
            assert process.returncode, f"{number.name}: the job goes on, or ended well: {file.read_text()[-2000:]}"
            found[f"seconds after {number.name}"] = time.monotonic() - began
            found[f"exit code after {number.name}"] = process.returncode
        finally:
            end_all(process.pid)
        if number == signal.SIGSTOP:
            told = next(line for line in file.read_text().splitlines() if "has not responded" in line)
            found["said"] = told.strip()
    return found


def _wait_for_rank(process: subprocess.Popen[bytes], file: Path, rank: int) -> int:
    """Return the process of a rank, once the job works on its documents."""
    until = time.monotonic() + 60
    while "documents: " not in file.read_text() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(2)
    assert process.poll() is None, file.read_text()[-2000:]
    for member in family_of(process.pid):
        with suppress(OSError):
            environ = dict(each.split("=", 1) for each in _read(member, "environ") if "=" in each)
            is_ours = any(each.endswith("kvr-run") for each in _read(member, "cmdline")[:2])
            if is_ours and str(rank) in (environ.get(name) for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")):
                return member
    raise Absent("the launcher starts ranks elsewhere, so this process cannot stop one")


def _read(process: int, name: str) -> list[str]:
    return Path(f"/proc/{process}/{name}").read_bytes().decode(errors="replace").split("\0")


def _dtype(given: Given) -> str:
    return "float32" if given.is_small else "bfloat16"


def _set(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def remove_model() -> None:
    """Remove what `model_folder` has written."""
    shutil.rmtree(memory_folder(), ignore_errors=True)


if __name__ == "__main__":  # of many ranks, one writes it (`slurm/kvr_gpu.sh`)
    from kvr_mpi.transport.mpi import launched_rank

    if launched_rank(os.environ) == 0:
        job_of(Given(model=sys.argv[1], output=sys.argv[2]), "full", DOCUMENTS, LONGEST)
