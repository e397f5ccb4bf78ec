"""A job that runs in seconds, for the tests that run whole jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from made_jobs import TEXT
from models import CONFIGS, WHOLE

MODELS = {**CONFIGS, **WHOLE}


@pytest.fixture
def job(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A job over five good documents of 20 to 300 tokens, with a tiny model."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(5):
        (corpus / f"doc-{number}.txt").write_text(f"Document {number}. " + TEXT * (1 + 3 * number))
    path = tmp_path / "job.toml"
    path.write_text(
        f"""
        [model]
        path = "{tiny_model_dir}"
        dtype = "float32"
        [documents]
        path = "{corpus}"
        [prompt]
        template = "Summarise: {{text}} Summary:"
        [generation]
        max_new_tokens = 8
        [parallel]
        partition = "even"
        [output]
        path = "{tmp_path / "out"}"
        """
    )
    return path


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[[str], Path]:
    """A folder with a tiny random model of a kind, and a real tokenizer."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        config = MODELS[name]()
        config.vocab_size = len(tokenizer)
        config.eos_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        torch.manual_seed(0)
        tf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make
