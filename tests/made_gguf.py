"""Small random GGUF files of each architecture, with tokenizers that are sensitive to how a text is split."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED, EXPERTS, EXPERT_FEED, CONTEXT = 32, 4, 2, 3, 48, 4, 24, 512
PROBE = (
    "It's 12345 o'clock, they'll WE'RE don't\n\n\n  x = 1.50;\t\tif (a) {\n    return 'b';\n}\r\n"
    "漢字とかな 한국어 ÄÖü naïve 𝒳 🙂 ٣٤ \u00a0end   "
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TYPES = gguf.GGUFValueType
SPLIT_TYPES = {"split.no": TYPES.UINT16, "split.count": TYPES.UINT16, "split.tensors.count": TYPES.INT32}


@dataclass
class MadeGguf:
    """The content of a GGUF file: metadata with their types where Python's are ambiguous, and float32 tensors."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def copy(self) -> MadeGguf:
        return replace(self, metadata=dict(self.metadata), tensors=dict(self.tensors))

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, "")
        writer.kv_data[0].clear()
        for key, value in self.metadata.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            else:
                writer.add_key_value(key, value, SPLIT_TYPES.get(key) or type_of(value))
        for name, values in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def type_of(value: object) -> gguf.GGUFValueType:
    """Return the type that llama.cpp expects of a key with such a value."""
    kinds = {bool: TYPES.BOOL, int: TYPES.UINT32, float: TYPES.FLOAT32, str: TYPES.STRING}
    return kinds[type(value)]


@functools.cache
def byte_level(pre: str = "llama-bpe") -> dict[str, Any]:
    """Return the keys of a byte-level tokenizer whose merges cross all borders between words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "".join(piece for piece, _ in level.pre_tokenize_str(PROBE))
    trained = Tokenizer(models.BPE())
    # Pairs of all parts of the text, so that short tokens are merged before long ones.
    parts = [text[start : start + size] for size in (2, 3, 4, 6, 9) for start in range(len(text) - size)]
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    trained.train_from_iterator(parts, trainer)
    vocab = sorted(trained.get_vocab(), key=lambda token: trained.token_to_id(token) or 0)
    merges = [" ".join(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    whole = [
        token for token in ("Ġnaïve", "Ġ漢", "Ġreturn", "ĠRE") if token not in vocab and set(token) <= set(alphabet)
    ]
    control = ["<|begin|>", "<|im_end|>", "<|pad|>", "<|turn|>"]
    tokens = [*vocab, *whole, *control, "<think>"]
    types = [NORMAL] * (len(vocab) + len(whole)) + [CONTROL] * len(control) + [USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|begin|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|pad|>"),
        "tokenizer.ggml.add_bos_token": False,
    }


@functools.cache
def sentencepiece() -> dict[str, Any]:
    """Return the keys of a SentencePiece tokenizer; characters that are not in it become bytes."""
    text = "▁" + PROBE.replace(" ", "▁")
    known = sorted({char for char in text if ord(char) < 0x300 or char == "▁"} - {"\n", "\r", "\t"})
    parts = [text[start : start + size] for size in (2, 3, 4, 6, 9) for start in range(len(text) - size)]
    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=known, limit_alphabet=len(known), show_progress=False
    )
    trained.train_from_iterator(parts, trainer)
    merged = sorted(trained.get_vocab(), key=lambda token: trained.token_to_id(token) or 0)
    merged = [token for token in merged if set(token) <= set(known)]
    special = ["<unk>", "<s>", "</s>"]
    octets = [f"<0x{byte:02X}>" for byte in range(256)]
    control = ["<start_of_turn>", "<end_of_turn>"]
    tokens = [*special, *octets, *merged, *control, "\n\n", "    "]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(merged), CONTROL, CONTROL]
    types += [USER_DEFINED, USER_DEFINED]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(idx) for idx in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }


def made_gguf(name: str, seed: int = 0, **changes: Any) -> MadeGguf:
    """Return a random model of an architecture; `changes` are metadata keys without its name, dots as ``__``."""
    architecture = "llama" if name == "mixtral" else name
    is_gemma, is_moe = architecture.startswith("gemma"), name in ("mixtral", "qwen3moe")
    tokenizer = sentencepiece() if name in ("llama", "mixtral", "phi3") or is_gemma else byte_level("qwen2")
    layers = 5 if name == "smollm3" else LAYERS  # the fourth layer of SmolLM3 is special
    head_dim = 8 if name in ("qwen2", "phi3", "olmo2", "smollm3") else 16  # llama.cpp asks for the hidden size of these
    keys: dict[str, Any] = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": layers,
        "feed_forward_length": FEED,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": head_dim,
        "rope.freq_base": 10000.0,
    }
    if is_moe:
        keys |= {"expert_count": EXPERTS, "expert_used_count": 2}
    if name == "qwen3moe":
        keys["expert_feed_forward_length"] = EXPERT_FEED
    if name == "gemma2":
        keys |= {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
    if name in ("gemma2", "gemma3"):
        keys |= {"attention.sliding_window": 8}
    if name == "granite":
        keys |= {"logit_scale": 2.0, "residual_scale": 0.5, "embedding_scale": 3.0, "attention.scale": 0.2}
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {"general.architecture": architecture, "general.name": "made", "general.file_type": 0}
    metadata |= {f"{architecture}.{key}": value for key, value in keys.items()} | tokenizer
    model = MadeGguf(metadata)
    random = np.random.default_rng(seed)

    def add(tensor: str, *shape: int, scale: float = 0.3, mean: float = 0.0) -> None:
        model.tensors[tensor] = (mean + scale * random.standard_normal(shape)).astype(np.float32)

    add("token_embd.weight", len(metadata["tokenizer.ggml.tokens"]), HIDDEN, scale=1.0)
    add("output_norm.weight", HIDDEN, mean=1.0)
    if not is_gemma:
        add("output.weight", len(metadata["tokenizer.ggml.tokens"]), HIDDEN)
    query, kv, experts_feed = HEADS * head_dim, KV_HEADS * head_dim, FEED if name == "mixtral" else EXPERT_FEED
    for layer in (f"blk.{idx}." for idx in range(layers)):
        if name != "olmo2":
            add(f"{layer}attn_norm.weight", HIDDEN, mean=1.0)
            add(f"{layer}ffn_norm.weight", HIDDEN, mean=1.0)
        if name in ("gemma2", "gemma3", "olmo2"):
            add(f"{layer}post_attention_norm.weight", HIDDEN, mean=1.0)
            add(f"{layer}post_ffw_norm.weight", HIDDEN, mean=1.0)
        if name == "phi3":
            add(f"{layer}attn_qkv.weight", query + 2 * kv, HIDDEN)
        else:
            for part, size in (("q", query), ("k", kv), ("v", kv)):
                add(f"{layer}attn_{part}.weight", size, HIDDEN)
                if name == "qwen2":
                    add(f"{layer}attn_{part}.bias", size)
        if name in ("qwen3", "qwen3moe", "gemma3"):
            add(f"{layer}attn_q_norm.weight", head_dim, mean=1.0)
            add(f"{layer}attn_k_norm.weight", head_dim, mean=1.0)
        if name == "olmo2":
            add(f"{layer}attn_q_norm.weight", query, mean=1.0)
            add(f"{layer}attn_k_norm.weight", kv, mean=1.0)
        add(f"{layer}attn_output.weight", HIDDEN, query)
        if is_moe:
            add(f"{layer}ffn_gate_inp.weight", EXPERTS, HIDDEN, scale=1.0)
            add(f"{layer}ffn_gate_exps.weight", EXPERTS, experts_feed, HIDDEN)
            add(f"{layer}ffn_up_exps.weight", EXPERTS, experts_feed, HIDDEN)
            add(f"{layer}ffn_down_exps.weight", EXPERTS, HIDDEN, experts_feed)
        else:
            if name != "phi3":
                add(f"{layer}ffn_gate.weight", FEED, HIDDEN)
            add(f"{layer}ffn_up.weight", FEED * (2 if name == "phi3" else 1), HIDDEN)
            add(f"{layer}ffn_down.weight", HIDDEN, FEED)
    return model
