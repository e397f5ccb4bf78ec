"""Models without tokenizer.json have the ids of their own tokenizer, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import AutoTokenizer
from transformers import utils as transformers_utils

from kvr_mpi.documents.encoding import encode_text
from kvr_mpi.errors import ModelError
from kvr_mpi.model.tokenizer_file import PROBE, load_tokenizer

TEXTS = ("two  spaces", "a   b", "x = [\n        1,\n    ]\n", "Größe 北京 😀", "end  ", "don't stop", PROBE)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model as Llama 2 has it: BPE, with pieces of several spaces, which are merged last."""
    folder = tmp_path_factory.mktemp("pieces")
    lines = [line for line in PROBE.splitlines() if line.strip()] * 3
    lines += ["two spaces stop the end, and others go on"] * 20
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=700,
        hard_vocab_limit=False,
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString((folder / "tokenizer.model").read_bytes())
    first = next(number for number, piece in enumerate(model.pieces) if piece.type == 1)
    known = {piece.piece for piece in model.pieces}
    spaces = [text for text in ("\u2581" * 2, "\u2581" * 4) if text not in known]
    for text in reversed(spaces):
        model.pieces.insert(first, model.SentencePiece(piece=text, score=-1e9))
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    return folder / "tokenizer.model"


def folder_with(pieces: Path, folder: Path, kind: str) -> Path:
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(pieces.read_bytes())
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    named = {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "legacy": False}))
    return folder


def test_ids_are_those_of_sentencepiece(pieces: Path, tmp_path: Path) -> None:
    folder = folder_with(pieces, tmp_path / "llama", "llama")
    truth, loaded = SentencePieceProcessor(model_file=str(pieces)), load_tokenizer(str(folder), local_files_only=True)
    for text in TEXTS:
        assert encode_text(loaded, text) == truth.encode(text)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs("two  spaces", add_special_tokens=False)["input_ids"] != truth.encode("two  spaces"), "not needed"


def test_a_class_with_other_ids_is_refused(pieces: Path, tmp_path: Path) -> None:
    folder = folder_with(pieces, tmp_path / "mistral", "mistral")  # transformers' class puts no space before texts
    with pytest.raises(ModelError, match=r"tokenizer\.model is not the tokenizer .*transformers<5"):
        load_tokenizer(str(folder), local_files_only=True)


def test_a_missing_library_is_named(pieces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **options: Any) -> None:
        raise ValueError("`tiktoken` is required to read a `tiktoken` file")

    folder = folder_with(pieces, tmp_path / "llama", "llama")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    monkeypatch.setattr(transformers_utils, "is_protobuf_available", lambda: False)
    with pytest.raises(ModelError, match="pip install sentencepiece protobuf"):
        load_tokenizer(str(folder), local_files_only=True)
    (folder / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")  # tiktoken's format, as Llama 3 has it
    with pytest.raises(ValueError, match="tiktoken"):
        load_tokenizer(str(folder), local_files_only=True)


def test_the_tokenizer_of_mistral_common_gives_way_to_the_file(
    small_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MistralCommonBackend:
        """What transformers returns for folders with tekken.json where mistral-common is installed."""

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **options: MistralCommonBackend())
    small_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    loaded = load_tokenizer(str(tmp_path), local_files_only=True)
    assert encode_text(loaded, PROBE) == encode_text(small_tokenizer, PROBE)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="only tekken.json"):
        load_tokenizer(str(tmp_path), local_files_only=True)


def test_a_folder_with_tekken_json_only_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **options: Any) -> None:
        raise ImportError("MistralConverter requires the mistral-common library")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    (tmp_path / "tekken.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    with pytest.raises(ModelError, match="only tekken.json"):
        load_tokenizer(str(tmp_path), local_files_only=True)
