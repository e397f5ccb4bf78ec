"""A job that runs in seconds, for the tests that run whole jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_jobs import TEXT


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
