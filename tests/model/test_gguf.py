"""GGUF files run as llama.cpp runs them, or are refused by the name of what is not known."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llama_cpp import LlamaCpp
from made_gguf import CONTROL, LAYERS, PROBE, MadeGguf, byte_level, made_gguf

from kvr_mpi.errors import ModelError
from kvr_mpi.model import load_model
from kvr_mpi.model.gguf_convert import ARCHITECTURES, llama3_divisors
from kvr_mpi.model.gguf_tokenizer import SPLITS, build_tokenizer
from kvr_mpi.model.metadata import Metadata

# llama.cpp takes GELU from a table in float16.
NEAR, NEAR_GELU = 1e-3, 2e-2
TEXTS = (PROBE, f" {PROBE}", "a<|turn|>\nb<think> c<start_of_turn>\n  d</s>")
LENGTHS = 3, 17, 40


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[LlamaCpp]:
    with LlamaCpp() as reference:
        yield reference


@pytest.fixture
def write(tmp_path: Path) -> Callable[[MadeGguf], Path]:
    return lambda model: model.write(tmp_path / "made.gguf")


def logprobs(path: Path, prompts: list[list[int]]) -> tuple[list[list[int]], np.ndarray, Any]:
    """Return the ids of TEXTS and the log probabilities after each prompt by our conversion, and what was loaded."""
    loaded = load_model(str(path), device="cpu", cache_dir=path.parent / "cache")
    ids = [loaded.tokenizer(text)["input_ids"] for text in TEXTS]
    with torch.inference_mode():
        rows = [loaded.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for prompt in prompts]
    return ids, np.array([row.numpy() for row in rows]), loaded


def prompts_of(model: MadeGguf, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    tokens = len(model.tensors.get("token_embd.weight", []))
    return [[(37 * position + 11) % max(tokens, 1) for position in range(length)] for length in lengths]


def differences(
    reference: LlamaCpp, model: MadeGguf, path: Path, lengths: tuple[int, ...] = LENGTHS, context: int = 256
) -> list[str]:
    """Return how our results differ from llama.cpp's; raise `ModelError` if the file is refused."""
    prompts = prompts_of(model, lengths)
    ids, ours, _ = logprobs(path, prompts)
    letter = model.metadata["tokenizer.ggml.tokens"].index("a")
    found = reference.ask(path, texts=TEXTS, prompts=prompts, letter=letter, context=context)
    if found is None:
        return ["llama.cpp refuses the file"]
    theirs = np.array(found["logprobs"])
    assert theirs.std() > 0.1  # otherwise a comparison shows nothing
    takes_gelu = model.metadata["general.architecture"] in ("gemma", "gemma2", "gemma3")
    off = np.abs(ours - theirs).max()
    wrong = [f"logits differ by {off}"] if off > (NEAR_GELU if takes_gelu else NEAR) else []
    return wrong + [f"other ids of {text!r}" for text, a, b in zip(TEXTS, ids, found["ids"], strict=True) if a != b]


def with_tensor(name: str, values: Any, model: MadeGguf) -> MadeGguf:
    model.tensors[name] = np.asarray(values, np.float32)
    return model


def without(model: MadeGguf, *names: str) -> MadeGguf:
    for name in names:
        assert model.metadata.pop(name, None) is not None or model.tensors.pop(name, None) is not None
    return model


def with_biases(model: MadeGguf, *parts: str) -> MadeGguf:
    values = np.random.default_rng(1)
    for layer in range(LAYERS):
        for part in parts:
            rows = len(model.tensors[f"blk.{layer}.{part}.weight"])
            with_tensor(f"blk.{layer}.{part}.bias", values.standard_normal(rows), model)
    return model


def with_long(long: np.ndarray, short: np.ndarray, model: MadeGguf) -> MadeGguf:
    return with_tensor("rope_factors_long.weight", long, with_tensor("rope_factors_short.weight", short, model))


def scaled(name: str, kind: str, **keys: Any) -> MadeGguf:
    return made_gguf(name, rope__scaling__type=kind, **{f"rope__scaling__{key}": value for key, value in keys.items()})


def changed(name: str, **keys: Any) -> MadeGguf:
    model = made_gguf(name)
    model.metadata |= keys
    return model


ARCHITECTURE_NAMES = sorted({*ARCHITECTURES, "mixtral"})  # Mixtral files say "llama"
SOME = 1 + np.arange(8) / 5
VARIANTS: dict[str, Callable[[], MadeGguf]] = {
    "pre-tokenizer of another class": lambda: changed("qwen2", **{"tokenizer.ggml.pre": "tekken"}),
    "biases": lambda: with_biases(made_gguf("llama"), "attn_q", "attn_k", "attn_v", "attn_output"),
    "qkv biases": lambda: with_biases(made_gguf("llama"), "attn_q", "attn_k", "attn_v"),
    "mlp biases": lambda: with_biases(made_gguf("llama"), "ffn_gate", "ffn_up", "ffn_down"),
    "tied": lambda: without(made_gguf("llama"), "output.weight"),
    "defaults": lambda: without(made_gguf("llama"), "llama.rope.dimension_count", "llama.rope.freq_base"),
    "base": lambda: made_gguf("llama", rope__freq_base=5e5),
    "linear": lambda: scaled("llama", "linear", factor=4.0),
    "linear without type": lambda: made_gguf("llama", rope__scaling__factor=4.0),
    "old linear": lambda: made_gguf("llama", rope__scale_linear=4.0),
    "none": lambda: scaled("llama", "none", factor=4.0),
    "yarn": lambda: scaled("qwen2", "yarn", factor=4.0, original_context_length=128, finetuned=True),
    "yarn attention": lambda: scaled("llama", "yarn", factor=4.0, original_context_length=128, attn_factor=0.8),
    "yarn betas": lambda: scaled(
        "llama", "yarn", factor=4.0, original_context_length=128, yarn_beta_fast=16.0, yarn_beta_slow=2.0
    ),
    "llama 3": lambda: with_tensor(
        "rope_freqs.weight",
        llama3_divisors(5e5, 8.0, 16),
        made_gguf("llama", rope__freq_base=5e5, context_length=16384),
    ),
    "llama 3 short": lambda: with_tensor("rope_freqs.weight", llama3_divisors(1e4, 8.0, 16), made_gguf("llama")),
    "frequencies": lambda: with_tensor("rope_freqs.weight", SOME, made_gguf("mixtral")),
    "longrope": lambda: with_long(SOME[:4] * 2, SOME[:4], scaled("phi3", "longrope", original_context_length=256)),
    "longrope without type": lambda: with_long(
        SOME[:4] * 2,
        SOME[:4],
        made_gguf("phi3", **{"rope__scaling__original_context_length": 256, "rope__scaling__attn_factor": 1.19}),
    ),
    "partial": lambda: made_gguf("phi3", rope__dimension_count=4),
    "gemma 3 linear": lambda: scaled("gemma3", "linear", factor=8.0),
    "gemma 3 bases": lambda: made_gguf("gemma3", rope__freq_base=1e6, rope__freq_base_swa=5e3),
    "gemma 3 cap": lambda: made_gguf("gemma3", final_logit_softcapping=3.0),
    "gemma 2 caps": lambda: without(
        made_gguf("gemma2"), "gemma2.attn_logit_softcapping", "gemma2.final_logit_softcapping"
    ),
    "per layer": lambda: made_gguf("llama", attention__head_count=[4] * 3, attention__head_count_kv=[2] * 3),
}


@pytest.mark.parametrize("name", ARCHITECTURE_NAMES)
def test_every_architecture_computes_what_llama_cpp_computes(
    name: str, llama_cpp: LlamaCpp, write: Callable[[MadeGguf], Path]
) -> None:
    model = made_gguf(name)
    assert differences(llama_cpp, model, write(model)) == []


@pytest.mark.parametrize("name", VARIANTS)
def test_every_setting_has_the_effect_that_it_has_in_llama_cpp(
    name: str, llama_cpp: LlamaCpp, write: Callable[[MadeGguf], Path]
) -> None:
    model = VARIANTS[name]()
    assert differences(llama_cpp, model, write(model)) == []


def test_long_factors_hold_for_long_prompts(llama_cpp: LlamaCpp, write: Callable[[MadeGguf], Path]) -> None:
    """llama.cpp chooses by the size of its context, the model's own code by the prompt."""
    model = with_long(SOME[:4] * 2, SOME[:4], scaled("phi3", "longrope", original_context_length=24))
    assert differences(llama_cpp, model, write(model), lengths=(30, 40)) == []


@pytest.mark.parametrize("name", SPLITS)
def test_every_pre_tokenizer_gives_the_ids_of_llama_cpp(
    name: str, llama_cpp: LlamaCpp, write: Callable[[MadeGguf], Path]
) -> None:
    choose = random.Random(name)
    pieces = [*"aB1249 .,_-$/(", "é", "'s", "'LL", "  ", "\n", "\r\n", "\t", "漢", "か", "한", "🙂", "\u00a0", "Ⅷ", "Ω"]
    texts = [*TEXTS, *("".join(choose.choices(pieces, k=12)) for _ in range(60))]
    model = made_gguf("llama")
    for key in [key for key in model.metadata if key.startswith("tokenizer.")]:
        del model.metadata[key]
    model.metadata |= without(MadeGguf(dict(byte_level(name))), "tokenizer.ggml.add_bos_token").metadata
    for tensor in ("token_embd.weight", "output.weight"):
        model.tensors[tensor] = np.zeros((len(model.metadata["tokenizer.ggml.tokens"]), 32))
    found = llama_cpp.ask(write(model), texts=texts, prompts=[], letter=0)
    tokenizer = build_tokenizer(Metadata(model.metadata))
    assert [tokenizer(text)["input_ids"] for text in texts] == found["ids"]
    assert tokenizer.decode(tokenizer(PROBE, add_special_tokens=False)["input_ids"]) == PROBE


@pytest.mark.parametrize(
    "changes",
    [
        {"add_space_prefix": False},
        {"add_bos_token": False, "add_eos_token": True},
        {"add_bos_token": None, "bos_token_id": None},
    ],
)
def test_switches_of_sentencepiece_have_their_effects(
    changes: dict[str, Any], llama_cpp: LlamaCpp, write: Callable[[MadeGguf], Path]
) -> None:
    model = made_gguf("llama")
    model.metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    model.metadata = {key: value for key, value in model.metadata.items() if value is not None}
    assert differences(llama_cpp, model, write(model)) == []


def test_ends_and_the_chat_template_are_kept(write: Callable[[MadeGguf], Path]) -> None:
    """Answers end at the end of a turn, not only at the end of the text."""
    model = made_gguf("qwen2")
    tokens = model.metadata["tokenizer.ggml.tokens"]
    model.metadata |= {
        "tokenizer.ggml.eos_token_id": tokens.index("<|pad|>"),
        "tokenizer.ggml.eot_token_id": tokens.index("<|turn|>"),
        "tokenizer.chat_template": "{{ messages[0].content }}<|turn|>",
    }
    _, _, loaded = logprobs(write(model), [])
    ends = {"<|pad|>", "<|turn|>", "<|im_end|>"}  # the last one by its text
    assert {tokens[token] for token in loaded.model.generation_config.eos_token_id} == ends
    assert loaded.tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x<|turn|>"


def split(model: MadeGguf, path: Path, count: int) -> list[Path]:
    """Write a model in parts, as llama-gguf-split does."""
    names, files = sorted(model.tensors), []
    for part in range(count):
        keys = {"split.no": part, "split.count": count, "split.tensors.count": len(names)}
        tensors = {name: model.tensors[name] for name in names[part::count]}
        name = f"{path.stem}-{part + 1:05}-of-{count:05}.gguf"
        files.append(MadeGguf({**(model.metadata if part == 0 else {}), **keys}, tensors).write(path.with_name(name)))
    return files


def test_a_model_in_parts_is_read_from_all_parts(llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    model = made_gguf("llama")
    first, second = split(model, tmp_path / "made.gguf", 2)
    assert differences(llama_cpp, model, first) == []
    second.rename(tmp_path / "away")
    with pytest.raises(ModelError, match="made-00002-of-00002"):
        logprobs(first, [])
    first = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match="llama-gguf-split --merge"):
        logprobs(first, [])


REFUSED: dict[str, tuple[Callable[[], MadeGguf], str]] = {
    "lacks a layer": (
        lambda: without(
            made_gguf("llama"), *(name for name in made_gguf("llama").tensors if name.startswith("blk.2."))
        ),
        "blk.2.",
    ),
    "lacks a tensor": (lambda: without(made_gguf("qwen3"), "blk.1.attn_q_norm.weight"), "blk.1.attn_q_norm.weight"),
    "unknown tensor": (lambda: with_tensor("blk.0.attn_sinks.weight", SOME, made_gguf("llama")), "attn_sinks"),
    "old experts": (lambda: with_tensor("blk.0.ffn_gate.0.weight", SOME, made_gguf("llama")), "blk.0.ffn_gate.0"),
    "unknown key": (lambda: made_gguf("llama", logit_scale=0.5), "llama.logit_scale = 0.5"),
    "partial rotation": (lambda: made_gguf("llama", rope__dimension_count=8), "dimension_count = 8, but heads have 16"),
    "unknown scaling": (lambda: scaled("llama", "dynamic", factor=2.0), "rope.scaling.type = 'dynamic'"),
    "attention factor": (lambda: made_gguf("llama", rope__scaling__attn_factor=0.8), "attn_factor = 0.8"),
    "one of two factors": (
        lambda: with_tensor("rope_factors_long.weight", SOME[:4], made_gguf("phi3")),
        "rope_factors_short",
    ),
    "window": (lambda: made_gguf("llama", attention__sliding_window=8), "sliding_window = 8"),
    "two-way": (lambda: made_gguf("llama", attention__causal=False), "attention.causal = False"),
    "lacks a key": (lambda: without(made_gguf("llama"), "llama.block_count"), "llama.block_count"),
    "wrong type": (lambda: made_gguf("llama", block_count="3"), "llama.block_count = '3'"),
    "other shape": (lambda: made_gguf("llama", feed_forward_length=40), "ffn_gate.weight"),
    "other architecture": (lambda: changed("llama", **{"general.architecture": "mamba"}), "'mamba'.*gemma2, gemma3"),
    "adapter": (lambda: changed("llama", **{"general.type": "adapter"}), "'adapter'"),
    "pre-tokenizer": (lambda: changed("qwen3", **{"tokenizer.ggml.pre": "deepseek-llm"}), "pre = 'deepseek-llm'"),
    "tokenizer": (lambda: changed("llama", **{"tokenizer.ggml.model": "t5"}), "tokenizer.ggml.model = 't5'"),
    "tokenizer key": (lambda: changed("llama", **{"tokenizer.ggml.lowercase": True}), "tokenizer.ggml.lowercase"),
    "no experts used": (lambda: made_gguf("mixtral", expert_used_count=0), "expert_used_count = 0"),
    "no experts": (lambda: made_gguf("qwen3moe", expert_count=0), "expert_count = 0"),
    "frequencies that llama.cpp ignores": (
        lambda: with_tensor("rope_freqs.weight", SOME, made_gguf("qwen3")),
        "rope_freqs.weight",
    ),
    "no such token": (lambda: changed("llama", **{"tokenizer.ggml.eos_token_id": 10**6}), "eos_token_id = 1000000"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_its_name(name: str, write: Callable[[MadeGguf], Path]) -> None:
    make, told = REFUSED[name]
    with pytest.raises(ModelError, match=told):
        logprobs(write(make()), [])


def test_a_file_that_is_cut_short_is_refused(write: Callable[[MadeGguf], Path]) -> None:
    path = write(made_gguf("llama"))
    content = path.read_bytes()
    for size in (3, 20, 1000, len(content) // 2, len(content) - 100):
        path.write_bytes(content[:size])
        with pytest.raises(ModelError):
            logprobs(path, [])


def test_a_replaced_file_is_converted_again(write: Callable[[MadeGguf], Path]) -> None:
    """Also if its name, size and times stay, and only one tensor in its middle differs."""
    model = made_gguf("llama", embedding_length=32)
    path = write(model)
    prompts, state = prompts_of(model), path.stat()
    _, before, loaded = logprobs(path, prompts)
    _, again, _ = logprobs(path, prompts)
    assert len(list((path.parent / "cache").iterdir())) == 1 and np.array_equal(before, again)
    model.tensors["blk.1.attn_v.weight"] = model.tensors["blk.1.attn_v.weight"][::-1]
    write(model)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    _, after, replaced = logprobs(path, prompts)
    assert np.abs(after - before).max() > 0.1 and replaced.fingerprint != loaded.fingerprint
    assert path.stat().st_size == state.st_size
    model.tensors["blk.1.attn_v.weight"][0, 0] += 1  # not in the sample
    write(model)
    _, touched, _ = logprobs(path, prompts)
    assert not np.array_equal(touched, after)


# Keys of llama.cpp's that the files do not have, with values that change what it computes, or not.
MORE_KEYS: dict[str, Any] = {
    "rope.scaling.type": "linear", "rope.scaling.factor": 2.0, "rope.freq_base_swa": 5000.0, "rope.scale_linear": 3.0,
    "attention.scale": 0.3, "logit_scale": 0.5, "attention.sliding_window": 4, "final_logit_softcapping": 2.0,
    "attn_logit_softcapping": 2.0, "expert_weights_scale": 2.0, "attention.clamp_kqv": 0.1, "embedding_scale": 2.0,
    "rope.dimension_sections": [2, 2, 2, 2], "use_parallel_residual": True, "leading_dense_block_count": 1,
    "attention.causal": True, "rope.scaling.finetuned": False, "expert_used_count": 1, "expert_count": 0,
    "nextn_predict_layers": 1, "pooling_type": 0, "tensor_data_layout": "x",
}  # fmt: skip
MORE_TENSORS = (
    "rope_freqs.weight", "blk.0.attn_q.bias", "blk.1.attn_output.bias", "blk.1.ffn_up.bias", "blk.3.attn_q.weight",
    "blk.0.attn_norm_2.weight", "blk.0.attn_sinks.weight", "output.bias", "blk.0.attn_q.scale", "token_types.weight",
    "blk.0.layer_output_scale.weight", "output_norm.bias", "token_embd_norm.weight", "rope_factors_long.weight",
)  # fmt: skip


def mutate(model: MadeGguf, choose: random.Random) -> str:
    """Remove, rename, add or change one tensor or key; return what was done."""
    metadata, tensors = model.metadata, model.tensors
    architecture = metadata["general.architecture"]
    key = choose.choice([key for key in metadata if not key.startswith("general.")])
    name = choose.choice(sorted(tensors))
    what = choose.choice(
        (
            "drop key",
            "rename key",
            "add key",
            "change key",
            "change key",
            "change key",
            "drop",
            "rename",
            "add",
            "token",
        )
    )
    if what == "drop key":
        del metadata[key]
        return f"{what} {key}"
    if what == "rename key":
        other = choose.choice((f"{key}s", f"x.{key}", key.replace("length", "len"), key.replace(".", "_", 1)))
        metadata[other] = metadata.pop(key)
        return f"{what} {key} to {other}"
    if what == "add key":
        key, value = choose.choice(sorted(MORE_KEYS.items(), key=str))
        metadata[f"{architecture}.{key}"] = value
        return f"{what} {key} = {value}"
    if what == "change key":
        key = choose.choice([key for key, value in metadata.items() if isinstance(value, (int, float))])
        value = metadata[key]
        changed = not value if isinstance(value, bool) else choose.choice((value * 2, value + 1, type(value)(0)))
        metadata[key] = changed
        return f"{what} {key} = {changed}"
    if what == "drop":
        del tensors[name]
        return f"{what} {name}"
    if what == "rename":
        other = choose.choice(
            (f"{name}x", re.sub(r"blk\.\d", "blk.7", name), name.replace("weight", "bias"), name.replace("attn", "ffn"))
        )
        tensors[other] = tensors.pop(name)
        return f"{what} {name} to {other}"
    if what == "add":
        name = choose.choice(MORE_TENSORS)
        like = tensors.get(name.replace("bias", "weight"), np.ones(8))
        size = 8 if name.startswith("rope") else len(like)
        shape = (size,) if name.endswith("bias") or like.ndim == 1 else like.shape
        tensors[name] = np.random.default_rng(1).uniform(1, 2, shape)
        return f"{what} {name}"
    token, kind = choose.randrange(len(metadata["tokenizer.ggml.tokens"])), choose.choice((1, CONTROL, 4, 5))
    metadata["tokenizer.ggml.token_type"] = list(metadata["tokenizer.ggml.token_type"])
    metadata["tokenizer.ggml.token_type"][token] = kind
    return f"{what} {token} has type {kind}"


def check_mutants(seeds: range, reference: LlamaCpp, folder: Path) -> None:
    accepted, wrong = 0, []
    for seed in seeds:
        choose = random.Random(seed)
        name = ARCHITECTURE_NAMES[seed % len(ARCHITECTURE_NAMES)]
        model = made_gguf(name).copy()
        done = [mutate(model, choose) for _ in range(choose.choice((1, 1, 1, 2)))]
        try:
            path = model.write(folder / f"{seed}.gguf")
        except KeyError:  # two mutations of one thing
            continue
        try:
            found = differences(reference, model, path, lengths=(12,))
        except ModelError:
            continue
        accepted += 1
        if found:
            wrong.append(f"{seed} {name}: {', '.join(done)}: {'; '.join(found)}")
    assert not wrong, "\n".join(wrong)
    assert accepted > len(seeds) / 10  # some changes have an effect that is known, or none


def test_mutants_are_right_or_refused(llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    check_mutants(range(30), llama_cpp, tmp_path)


@pytest.mark.long
def test_many_mutants_are_right_or_refused(llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    check_mutants(range(30, 230), llama_cpp, tmp_path)
