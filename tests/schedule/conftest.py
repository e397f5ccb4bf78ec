"""A job over documents of very different length, and a tiny model that can read the longest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from made_jobs import TEXT

# Sentences of each document: one is worth a chain, the others are not.
SENTENCES = [1, 2, 3, 1, 5, 8, 2, 1, 285, 3, 1, 20]


@pytest.fixture(scope="module")
def long_model_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A tiny random Llama of 8192 tokens: a long prompt takes visibly longer than a short one."""
    folder = tmp_path_factory.mktemp("long-llama")
    shutil.copytree(tiny_model_dir, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def job(job: Path, tmp_path: Path, tiny_model_dir: Path, long_model_dir: Path, known_footprints: None) -> Path:
    """A planned job over documents of very different length, one that is empty and one that is too long."""
    corpus = tmp_path / "corpus"
    shutil.rmtree(corpus)
    corpus.mkdir()
    for number, count in enumerate(SENTENCES):
        (corpus / f"doc-{number:02d}.txt").write_text(f"Document {number}. " + TEXT * count)
    (corpus / "empty.txt").write_text(" \n")
    (corpus / "too-long.txt").write_text(TEXT * 500)
    planned = job.read_text().replace('partition = "even"', 'ranks_per_chain = "auto"')
    job.write_text(planned.replace(str(tiny_model_dir), str(long_model_dir)))
    return job
