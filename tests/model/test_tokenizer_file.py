"""transformers' class for a tokenizer is compared with tokenizer.json, of which it may use only the vocabulary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvr_mpi.errors import ModelError
from kvr_mpi.model import load_outline

NUMBERS = "In 1234567 it's"


def change(folder: Path, **settings: Any) -> Path:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    return tmp_path / "model"


def test_a_class_that_ignores_the_pre_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    triples = pre_tokenizers.Split(pattern="123", behavior="isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([triples, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    raw.save(str(folder / "tokenizer.json"))
    change(folder, tokenizer_class="Qwen2Tokenizer")
    assert type(AutoTokenizer.from_pretrained(folder)).__name__ == "Qwen2Tokenizer", "or this tests nothing"
    with pytest.raises(ModelError, match=r"Qwen2Tokenizer.*tokenizer_class.*tokenizer_config\.json"):
        load_outline(str(folder), cache_dir=tmp_path)
    change(folder, tokenizer_class="PreTrainedTokenizerFast")
    tokenizer = load_outline(str(folder), cache_dir=tmp_path).tokenizer
    assert tokenizer.encode(NUMBERS, add_special_tokens=False) == raw.encode(NUMBERS, add_special_tokens=False).ids
    # Without a file, the class is right.
    AutoTokenizer.from_pretrained(change(folder, tokenizer_class="Qwen2Tokenizer")).save_pretrained(folder)
    load_outline(str(folder), cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [({"legacy": False}, False), ({"add_prefix_space": False}, False), ({"unk_token": "<unk>"}, True)],
)
def test_settings_may_explain_another_space(
    folder: Path, tmp_path: Path, settings: dict[str, Any], is_refused: bool
) -> None:
    """As in Llama 2, whose file is older than the setting."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    merges = [("▁", "a")]
    pieces.append("▁a")
    model = models.BPE(
        {piece: number for number, piece in enumerate(pieces)}, merges, fuse_unk=True, byte_fallback=True
    )
    raw = Tokenizer(model)
    added = [normalizers.Prepend("▁")] if "unk_token" not in settings else []
    raw.normalizer = normalizers.Sequence([*added, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.save_pretrained(folder)
    change(folder, tokenizer_class="LlamaTokenizer", **settings)
    assert type(AutoTokenizer.from_pretrained(folder)).__name__ == "LlamaTokenizer", "or this tests nothing"
    if is_refused:
        with pytest.raises(ModelError, match="LlamaTokenizer"):
            load_outline(str(folder), cache_dir=tmp_path)
    else:
        load_outline(str(folder), cache_dir=tmp_path)
