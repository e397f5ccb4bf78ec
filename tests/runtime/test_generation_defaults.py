"""Defaults of a model's own generation_config.json: applied, or named before the first document."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvr_mpi.errors import EXIT_CONFIG

SHORT = ("documents.limit=1", "generation.max_new_tokens=3")


@pytest.fixture
def model_with(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., str]:
    """Copy the tiny model with other generation defaults; None removes one."""

    def make(**settings: Any) -> str:
        folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
        given = {"eos_token_id": 2, "bos_token_id": 1} | settings
        given = {name: value for name, value in given.items() if value is not None}
        (folder / "generation_config.json").write_text(json.dumps(given))
        return f"model.path={folder}"

    return make


def test_defaults_that_are_not_followed_are_named(model_with: Callable[..., str], run_job: Any) -> None:
    model = model_with(num_beams=4, penalty_alpha=0.6, guidance_scale=2.0, chat_format="x", length_penalty=1.0)
    run, plain = run_job(2, model, *SHORT), run_job(1, *SHORT)
    (line,) = [line for line in run.log.splitlines() if "not supported" in line]  # once for all ranks
    for name in ("num_beams = 4", "penalty_alpha", "guidance_scale", "chat_format"):
        assert name in line
    assert "length_penalty" not in line and run.tokens == plain.tokens
    assert "not supported" not in plain.log


def test_penalties_and_several_ends_are_applied(model_with: Callable[..., str], run_job: Any) -> None:
    plain = run_job(1, *SHORT)
    (tokens,) = plain.tokens.values()
    model = model_with(eos_token_id=[2, tokens[1]], suppress_tokens=[tokens[0]])
    assert not set(tokens[:2]) & set(next(iter(run_job(1, model, *SHORT).tokens.values()))[:1])
    only_end = model_with_end(model, tokens[1])
    assert next(iter(run_job(1, only_end, *SHORT).tokens.values())) == tokens[:1]


def model_with_end(model: str, end: int) -> str:
    """The same model with two ends, one of them the second token of its answer."""
    file = Path(model.removeprefix("model.path=")) / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [2, end]}))
    return model


@pytest.mark.parametrize("ends", [None, [7]])
def test_ends_that_the_tokenizer_has_are_missed(model_with: Callable[..., str], run_job: Any, ends: Any) -> None:
    model = model_with(eos_token_id=ends)
    if ends is None:  # transformers would take it from there
        file = Path(model.removeprefix("model.path=")) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": None}))
    log = run_job(1, model, *SHORT).log
    lines = log.splitlines()
    (at,) = [at for at, line in enumerate(lines) if "warning" in line and "eos_token_id" in line]
    assert ("max_new_tokens" in lines[at]) == (ends is None)
    assert "eos_token_id" not in run_job(1, *SHORT).log
    assert "asks for sampling" not in log


def test_warnings_of_transformers_are_logged_once(tiny_model_dir: Path, tmp_path: Path, run_job: Any) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "attention_factor": 1}
    rope["original_max_position_embeddings"] = 256
    config = json.loads((folder / "config.json").read_text()) | {"rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(config))
    log = run_job(2, f"model.path={folder}", *SHORT).log
    assert len([line for line in log.splitlines() if "warning: transformers: " in line]) == 1
    assert log.count("attention_factor field must be") == 1  # by no other handler, either


def test_schemas_need_logits_of_all_tokens(tiny_model_dir: Path, tmp_path: Path, run_job: Any) -> None:
    import transformers as tf

    folder = shutil.copytree(tiny_model_dir, tmp_path / "narrow")
    model = tf.AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.resize_token_embeddings(model.config.vocab_size - 9)
    model.save_pretrained(folder)
    schema = 'generation.json_schema={"type": "object"}'
    log = run_job(1, f"model.path={folder}", schema, code=EXIT_CONFIG).log
    assert "generation.json_schema" in log and "doc-0.txt" not in log
