"""Jobs that read documents instead of answering them: embeddings, and log-probabilities of their tokens."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas
import pytest
import torch
import transformers as tf
from constants import Kvr
from made_jobs import TEXT, load, plain_job, refusal, toml_of, with_settings

from kvr_mpi.documents.prompts import PromptText
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG
from kvr_mpi.job.inputs import identity_of
from kvr_mpi.job.readout import readout_of
from kvr_mpi.model import final_states
from kvr_mpi.prefill import reading
from kvr_mpi.store.results import open_results

CLOSE = 2e-5  # float32, of values around 1
ONE_BAD = EXIT_BAD_DATA
WINDOW = 512  # of the models here
TEXTS = {f"doc-{number}": f"  Document {number}. " + TEXT * (1 + 5 * number) for number in range(4)}


@pytest.fixture
def texts_job(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A job over texts of 20 to 330 tokens, and an empty one."""
    rows = [{"id": name, "text": text} for name, text in {**TEXTS, "doc-2b": ""}.items()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = plain_job(tiny_model_dir, tmp_path / "rows.jsonl", tmp_path / "out")
    (path := tmp_path / "texts.toml").write_text(
        toml_of({**job, "model.dtype": "float32", "model.kernels": "plain", "parallel.partition": "even"})
    )
    return path


def states_of(folder: Path) -> Callable[[Sequence[int]], tuple[torch.Tensor, torch.Tensor]]:
    """transformers' last hidden states, and the log-probability of every token but the first."""
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def run(ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        row = torch.tensor([list(ids)])
        with torch.inference_mode():
            found = model(row, output_hidden_states=True)
        logprobs = torch.log_softmax(found.logits[0, :-1], -1).gather(1, row[0, 1:, None])[:, 0]
        return found.hidden_states[-1][0], logprobs

    return run


def close(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(np.array(found, np.float32)), expected.float(), atol=CLOSE, rtol=1e-4)


def test_embeddings_are_those_of_transformers_and_lie_beside_the_records(
    texts_job: Path, tmp_path: Path, run_job: Any, run_kvr: Kvr, small_tokenizer: Any
) -> None:
    run = states_of(Path(load(texts_job).model.path))
    begun = run_job(2, "output.embedding=mean", "documents.limit=2", of=texts_job, to="mean")
    assert len(begun.records) == 2
    mean = run_job(3, "output.embedding=mean", of=texts_job, to="mean", words=["--resume"], code=ONE_BAD)
    last = run_job(2, "output.embedding=last", "output.dimensions=8", of=texts_job, code=ONE_BAD)
    ids, found = open_results(mean.folder).embeddings()
    assert ids == sorted(TEXTS) and found.dtype == np.float32
    assert mean.records["doc-2b"].status == "error" and not mean.records["doc-2b"].embedding
    assert max(record.ranks for record in mean.records.values()) == 3
    for name, row in zip(ids, found, strict=True):
        states, _ = run(small_tokenizer(TEXTS[name])["input_ids"])
        close(row, states.mean(0))
        close(last.records[name].embedding, torch.nn.functional.normalize(states[-1][:8], dim=0))
        assert last.records[name].new_tokens == 0 and last.records[name].answer == ""
    with h5py.File(mean.folder / "results.h5") as file:
        stored = file["embeddings"][:]
    order = sorted(mean.records)
    np.testing.assert_array_equal(stored[[order.index(name) for name in ids]], found)
    assert np.isnan(stored[order.index("doc-2b")]).all()
    for kind in ("npy", "parquet"):
        code, _, _ = run_kvr("export", mean.folder, "--format", kind, "-o", tmp_path / f"all.{kind}")
        assert code == 0
    array = np.load(tmp_path / "all.npy")
    assert list(array["id"]) == ids
    np.testing.assert_array_equal(array["embedding"], found)
    table = pandas.read_parquet(tmp_path / "all.parquet").set_index("id")
    np.testing.assert_array_equal(np.array(table.loc[ids, "embedding"].tolist()).astype(np.float32), found)


def own_model(folder: Path, tokenizer: Any) -> Path:
    """A model of Qwen3-Embedding's kind: without head, with its modules and prompts, and an end behind every text."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    config = tf.Qwen3Config(vocab_size=len(tokenizer), max_position_embeddings=WINDOW, **sizes, **heads)
    tf.Qwen3Model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    files: dict[str, Any] = {
        "modules.json": [
            {
                "idx": at,
                "name": str(at),
                "path": path,
                "type": f"sentence_transformers.models.{path.partition('_')[2] or 'Transformer'}",
            }
            for at, path in enumerate(("", "1_Pooling", "2_Normalize"))
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": 32,
            "pooling_mode_mean_tokens": False,
            "pooling_mode_lasttoken": True,
        },
        "config_sentence_transformers.json": {"prompts": {"query": "Find the boat\nQuery:", "document": ""}},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    tables = json.loads((folder / "tokenizer.json").read_text())
    end = next(one for one in tables["added_tokens"] if one["content"] == "<|im_end|>")
    tables["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end["content"], "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {end["content"]: {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tables))
    return folder


def test_the_models_own_embeddings_are_those_of_sentence_transformers(
    texts_job: Path, tmp_path: Path, run_job: Any, small_tokenizer: Any
) -> None:
    sentences = pytest.importorskip("sentence_transformers")
    folder = own_model(tmp_path / "own", small_tokenizer)
    theirs = sentences.SentenceTransformer(str(folder), device="cpu")
    word = theirs.tokenizer.encode(" boat", add_special_tokens=False)
    assert len(word) == 1
    filling = theirs.tokenizer.decode(word * (WINDOW - 1))
    texts = {**TEXTS, "whole-window": filling, "one-more": f"{filling} boat"}
    rows = "".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items())
    (tmp_path / "rows.jsonl").write_text(rows)
    model, too_long = f"model.path={folder}", {"document": {"one-more"}, "query": {"one-more", "whole-window"}}
    for kind, encode in {"query": theirs.encode_query, "document": theirs.encode_document}.items():
        found = run_job(2, model, f"output.embedding={kind}", of=texts_job, code=ONE_BAD).records
        assert {name for name, record in found.items() if record.status == "error"} == too_long[kind]
        for name in texts.keys() - too_long[kind]:
            close(found[name].embedding, torch.from_numpy(encode(texts[name])))
    refused = run_job(1, "output.embedding=query", of=texts_job, code=EXIT_CONFIG)
    assert "modules.json" in refused.log and "'last' or 'mean'" in refused.log
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    assert "cls_token" in run_job(1, model, "output.embedding=query", of=texts_job, code=EXIT_CONFIG).log
    whole = readout_of(load(texts_job, "output.embedding=mean", "output.dimensions=32"), 32)
    assert whole is not None
    stored = whole.fields(PromptText((1,)), torch.full((32,), 3.0))
    np.testing.assert_allclose(np.linalg.norm((stored or {})["embedding"]), 1, rtol=1e-6)
    too_many = run_job(1, "output.embedding=mean", "output.dimensions=33", of=texts_job, code=EXIT_CONFIG)
    assert "32 dimensions" in too_many.log


def test_requests_for_embeddings_get_responses_in_openais_format(
    tmp_path: Path, texts_job: Path, run_job: Any, run_kvr: Kvr, small_tokenizer: Any
) -> None:
    text = TEXTS["doc-1"]
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "plain": ("/v1/embeddings", {"input": text}),
        "base64": ("/v1/embeddings", {"input": [text], "encoding_format": "base64", "dimensions": 5, "user": "u"}),
        "too-many": ("/v1/embeddings", {"input": text, "dimensions": 100}),
        "several": ("/v1/embeddings", {"input": [text, text]}),
        "sampled": ("/v1/embeddings", {"input": text, "temperature": 1}),
        "answer": ("/v1/completions", {"prompt": text}),
    }
    lines = [
        {"custom_id": name, "method": "POST", "url": url, "body": {"model": "m", **body}}
        for name, (url, body) in bodies.items()
    ]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = (f"documents.path={tmp_path / 'asked.jsonl'}", "documents.format=openai-batch")
    run = run_job(2, *batch, "output.embedding=mean", of=texts_job, code=ONE_BAD)
    code, out, _ = run_kvr("export", run.folder, "--format", "openai-batch")
    found = {one["custom_id"]: one for one in map(json.loads, out.splitlines())}
    assert code == 0 and {name for name, one in found.items() if one["error"] is None} == {"plain", "base64"}
    for name, said in {
        "too-many": "32",
        "several": "list of 2",
        "sampled": "temperature",
        "answer": "embeddings",
    }.items():
        assert said in found[name]["error"]["message"]
    states, _ = states_of(Path(load(texts_job).model.path))(small_tokenizer(text)["input_ids"])
    body = found["plain"]["response"]["body"]
    assert body["object"] == "list" and body["model"] == "m" and body["usage"]["total_tokens"] == len(states)
    close(body["data"][0]["embedding"], states.mean(0))
    short = np.frombuffer(base64.b64decode(found["base64"]["response"]["body"]["data"][0]["embedding"]), "<f4")
    close(short, torch.nn.functional.normalize(states.mean(0)[:5], dim=0))
    asked = run_job(1, *batch, "generation.max_new_tokens=2", of=texts_job, code=ONE_BAD).records
    assert asked["answer"].status == "done" and "output.embedding" in asked["plain"].error


def test_documents_are_as_likely_as_transformers_says(texts_job: Path, run_job: Any, small_tokenizer: Any) -> None:
    run = states_of(Path(load(texts_job).model.path))
    asked = "output.text_logprobs=true"
    each = run_job(3, asked, of=texts_job, code=ONE_BAD).records
    sums = run_job(2, "output.text_logprobs=50", of=texts_job, code=ONE_BAD).records
    framed = run_job(2, asked, "prompt.template=Read this: {text}\nThe end", of=texts_job, code=ONE_BAD).records
    assert max(record.ranks for record in each.values()) == 3
    before, after = (small_tokenizer(text)["input_ids"] for text in ("Read this: ", "\nThe end"))
    for name, text in TEXTS.items():
        ids = small_tokenizer(text)["input_ids"]
        _, logprobs = run(ids)
        close(each[name].text_logprobs, logprobs)
        assert each[name].scored_tokens == len(ids) - 1
        assert each[name].text_logprob == pytest.approx(float(logprobs.sum()), abs=0.01)
        close(
            sums[name].text_logprobs,
            torch.nn.functional.pad(logprobs, (1, -len(ids) % 50)).view(-1, 50).sum(1),
        )
        _, known = run([*before, *ids, *after])
        close(framed[name].text_logprobs, known[len(before) - 1 : -len(after)])
        assert framed[name].scored_tokens == len(ids)


def test_logits_of_fewer_tokens_are_computed_in_little_memory(
    texts_job: Path, run_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()

    def logits_of(model: Any, states: torch.Tensor) -> torch.Tensor:
        found = final_states.logits_of(model, states)
        sizes.append(4 * found.numel())
        return found

    monkeypatch.setattr(reading, "logits_of", logits_of)
    little = 0.004
    done = run_job(2, "output.text_logprobs=true", f"parallel.memory_gib={little}", of=texts_job, code=ONE_BAD).records
    assert done["doc-3"].scored_tokens == len(done["doc-3"].text_logprobs) > 300
    assert 0 < max(sizes) <= little * 2**30 / 4 / reading.COPIES


def test_settings_of_answers_are_refused_by_name(texts_job: Path) -> None:
    for asked in ("output.embedding=last", "output.text_logprobs=true"):
        name = asked.partition("=")[0]
        assert load(texts_job, asked).generation.max_new_tokens == 0
        words = refusal(texts_job, asked, "generation.max_new_tokens=5")
        assert name in words and "generation.max_new_tokens" in words
        assert name in refusal(texts_job, asked, "prompt.too_long=split")
    assert "output.dimensions" in refusal(texts_job, "output.dimensions=4")
    reads = ("embedding=last", "embedding=mean", "text_logprobs=true", "text_logprobs=9")
    identities = [identity_of(load(texts_job, *(f"output.{one}" for one in more))) for more in ((), *zip(reads))]
    assert not {"embedding", "text_logprobs"} & identities[0].keys()
    assert len({json.dumps(one, sort_keys=True) for one in identities}) == len(identities)


def test_ranks_that_are_processes_read_the_same(
    texts_job: Path, tmp_path: Path, mpirun: Any, kvr_run: Path, small_tokenizer: Any
) -> None:
    done = mpirun(2, [kvr_run, texts_job, *with_settings("output.text_logprobs=true")])
    assert done.returncode == ONE_BAD, done.stderr
    run = states_of(Path(load(texts_job).model.path))
    for record in open_results(tmp_path / "out").records("done"):
        close(record.text_logprobs, run(small_tokenizer(TEXTS[record.id])["input_ids"])[1])
