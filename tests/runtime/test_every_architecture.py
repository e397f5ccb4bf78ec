"""Whole jobs of every architecture in every mode: each is refused by name, or answers as a rank alone does.

`architectures` compares what strategies compute. Here goes all that a job adds: planning, memory, kernels,
storing, decoding together. By default a few architectures; `make test-long PARTS=architectures` takes all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from made_jobs import TEXT
from made_jobs import with_settings as options
from transformers import AutoModelForCausalLM

from benchmarks.architectures import catalogue
from benchmarks.tiny import shrink
from kvr_mpi.model.shape import VOCABULARIES
from kvr_mpi.store.results import open_results

ENTRIES = catalogue()
# Answers that are made to end; states first; one group of experts; a rule that is no attention.
SOME = ("bart", "lfm2", "mimo_v2_flash", "qwen3_5_text")
WANTED = os.environ.get("KVR_TEST_ARCHITECTURES", ",".join(SOME))
NAMES = sorted(ENTRIES) if WANTED == "all" else WANTED.split(",")

# Modes whose answers are those of a rank alone, and modes that change answers on purpose.
EXACT = {
    "planned": ("parallel.ranks_per_chain=auto",),
    "stored": ("output.kv=true",),
    "stored-single": ("parallel.strategy=single", "output.kv=true"),
    "chunks": ("parallel.chunk_tokens=48",),
    "sharded": ("output.kv=sharded",),
    "heads": ("decode.mode=head-parallel",),
    "groups": ("parallel.tensor_parallel=2",),
}
OTHER = {
    "compressed": ("compress.method=snapkv", "compress.budget=96", "compress.window=16"),
    "rolling": (
        "cache.kind=streaming-llm",
        "cache.tokens=64",
        "parallel.chunk_tokens=32",
    ),
    "sampled": ("generation.temperature=1.0", "generation.n=2"),
}
DONE, ERRORS, REFUSED = 0, 65, 78
ROUNDING = 1e-5


@pytest.fixture
def tiny_model_dir(name: str, tmp_path: Path, tokenizer: Any) -> Path:
    """A tiny random model of the architecture, with all tokens of a real tokenizer."""
    entry, size = ENTRIES[name], len(tokenizer)
    values = {"vocab_size": size, **entry.changes}
    torch.manual_seed(0)
    try:
        config = shrink(entry.model_type, **values)
        for other in VOCABULARIES:
            if getattr(config.get_text_config(), other, None):
                setattr(config.get_text_config(), other, size)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
        shaken = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    except Exception as error:  # what transformers cannot build without packages of its own, or cannot save or load
        pytest.skip(f"{type(error).__name__}: {error}"[:200])
    tokenizer.save_pretrained(tmp_path / "model")
    # The same but for roundings: documents that it answers differently are decided by them, such as by which of two
    # experts with almost equal scores runs.
    for parameter in shaken.parameters():
        parameter.data *= 1 + ROUNDING * torch.randn_like(parameter)
    shaken.save_pretrained(tmp_path / "shaken")
    tokenizer.save_pretrained(tmp_path / "shaken")
    return tmp_path / "model"


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # transformers' own
@pytest.mark.parametrize("name", NAMES)
def test_jobs_of_an_architecture(name: str, job: Path, tmp_path: Path, run_here: Any, ask_about: Any) -> None:
    (tmp_path / "corpus" / "long.txt").write_text(TEXT * 60)
    job.write_text(job.read_text() + 'prompt.too_long = "keep-head"\n')
    wrong: dict[str, Any] = {}
    refused: list[str] = []

    def run(mode: str, of: Path, *settings: str) -> dict[str, tuple[int, ...]] | None:
        """Give what a mode answers; None if it is refused."""
        folder = tmp_path / mode
        done = run_here(2, [of, *options(*settings, f"output.path={folder}")])
        if done.returncode not in (DONE, ERRORS, REFUSED) or "Traceback" in done.stderr:
            wrong[mode] = done.returncode, done.stderr[-3000:]
            return None
        if done.returncode == REFUSED:
            refused.append(mode)
            return None
        if not folder.exists():
            return {}
        return {record.id: record.token_ids for record in open_results(folder) if record.status == "done"}

    alone = run("alone", job, "parallel.strategy=single")
    shaken = run("shaken", job, "parallel.strategy=single", f"model.path={tmp_path / 'shaken'}")
    sure = None if alone is None or shaken is None else {each for each in alone if alone[each] == shaken.get(each)}
    for mode, settings in EXACT.items():
        found = run(mode, job, *settings)
        if found is not None and (alone is None or found.keys() != alone.keys()):
            wrong[mode] = found, alone
        elif found is not None and alone is not None and sure is not None:
            if unlike := {each for each in sure if found[each] != alone[each]}:
                wrong[mode] = unlike, found, alone
    for mode, settings in OTHER.items():
        run(mode, job, *settings)
    asking = ask_about(tmp_path / "stored", "When?")
    anew = None if "stored" in refused else run("anew", job, "prompt.template=Summarise: {text}\n\nWhen?")
    if anew is not None:
        anew = {f"{name}#q1": tokens for name, tokens in anew.items()}
        for mode, settings in {"asked": (), "asked-sharded": ("parallel.ranks_per_chain=all",)}.items():
            found = run(mode, asking, *settings)
            # A stored text that leaves the question no room is an error; a new prompt is cut instead.
            errors = [record.error for record in open_results(tmp_path / mode)] if found == {} else [""]
            has_no_room = bool(errors) and all("too long: its" in error for error in errors)
            if found is not None and (not (found or has_no_room) or found != {each: anew[each] for each in found}):
                wrong[mode] = found, anew
    assert not wrong
    assert alone is not None or "alone" in refused
    if name in SOME:
        assert sure is not None and len(sure) == 6 and "planned" not in refused
