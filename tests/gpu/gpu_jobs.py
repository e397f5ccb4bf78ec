"""Steps of whole jobs under mpirun: groups of several GPUs, and stored keys and values that are asked on one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from gpu_machine import WORDS, make_model, nccl_rank_count
from gpu_ranks import launch
from gpu_steps import Absent, Figures, Given

DOCUMENT_TOKENS, NEW_TOKENS = (900, 1700, 60), 12
JOB = """
[model]
path = "{model}"
dtype = "float32"
device = "{device}"
[documents]
path = "{corpus}"
[prompt]
template = "{{text}}\\n\\nw7 w8 w9"
[generation]
max_new_tokens = {new_tokens}
[output]
path = "{output}"
"""
Answers = dict[str, tuple[int, ...]]


def make_job(given: Given, name: str) -> Path:
    """Write a job over three documents, with a model of its own."""
    folder = Path(given.output) / name
    corpus = folder / "corpus"
    shutil.rmtree(folder, ignore_errors=True)  # of an examination before this one
    corpus.mkdir(parents=True)
    for number, tokens in enumerate(DOCUMENT_TOKENS):
        count = tokens // 10 if given.is_small else tokens
        text = " ".join(f"w{(7 * at * at + 31 * at + number) % WORDS}" for at in range(count))
        (corpus / f"{number}.txt").write_text(text)
    words = {"model": make_model(folder / "model"), "corpus": corpus, "output": folder / "alone"}
    path = folder / "job.toml"
    path.write_text(JOB.format(**words, device=given.kind, new_tokens=NEW_TOKENS))
    return path


def answers_of(folder: Path) -> Answers:
    """Token ids of each answer, by its id."""
    from kvr_mpi.store.results import open_results

    return {record.id: record.token_ids for record in open_results(folder)}


def groups_answer_alike(given: Given) -> Figures:
    """A model that two ranks hold together, and two such groups in a chain, against a rank that has all of it."""
    ranks = nccl_rank_count(given)
    if ranks < 2:
        raise Absent("one GPU, and a group is of two")
    job, found = make_job(given, "groups"), dict[str, Any]()
    launch(1, "kvr-run", str(job), timeout_s=30)
    truth = answers_of(job.parent / "alone")
    assert len(truth) == len(DOCUMENT_TOKENS) and all(len(answer) == NEW_TOKENS for answer in truth.values()), truth
    for size in (2, 4):
        if size > ranks:
            continue
        output = job.parent / f"{size // 2}x2"
        settings = [f"output.path={output}", "parallel.tensor_parallel=2", "parallel.partition=even"]
        launch(size, "kvr-run", str(job), *_set(settings), timeout_s=30)
        assert answers_of(output) == truth, f"{size} ranks: other answers than one rank's"
        found[f"answers, {size // 2} groups"] = len(truth)
    return found


def failures_end_sums(given: Given) -> Figures:
    """A rank of a group that fails while the GPU of another waits for it."""
    if nccl_rank_count(given) < 2:
        raise Absent("one GPU, and a group is of two")
    told = launch(2, "python", str(Path(__file__).parent / "failing_sums.py"), timeout_s=25)
    return dict(json.loads(next(line for line in told.splitlines() if line.startswith("{"))))


def stored_is_asked(given: Given) -> Figures:
    """Answers of questions about stored documents: their keys and values loaded, against prefilled again."""
    job = make_job(given, "asking")
    launch(1, "kvr-run", str(job), *_set(["output.kv=true"]), timeout_s=30)
    run = job.parent / "alone"
    asked = [f"generation.max_new_tokens={NEW_TOKENS}", f"model.device={given.kind}", "model.dtype=float32"]
    launch(
        1, "kvr", "ask", str(run), "-q", "w3 w1 w4", "--output", str(job.parent / "loaded"), *_set(asked), timeout_s=30
    )
    again = [f"output.path={job.parent / 'anew'}", "prompt.template={text}\n\nw3 w1 w4"]
    launch(1, "kvr-run", str(job), *_set(again), timeout_s=30)
    loaded = {name.partition("#")[0]: tokens for name, tokens in answers_of(job.parent / "loaded").items()}
    anew = answers_of(job.parent / "anew")
    assert loaded == anew and len(loaded) == len(DOCUMENT_TOKENS), (loaded, anew)
    return {"documents": len(loaded), "tokens of each answer": NEW_TOKENS}


def _set(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]
