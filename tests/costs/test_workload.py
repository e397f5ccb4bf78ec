"""Work counted from configurations, and its shares in groups of ranks; profiles of hardware."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from models import CONFIGS, SINGLE_ONLY, STATES, WHOLE

from benchmarks.tiny import shrink
from kvr_mpi.costs.costmodel import single_seconds
from kvr_mpi.costs.hardware import Hardware, load_hardware, profiles
from kvr_mpi.costs.layer_costs import costs_of
from kvr_mpi.costs.workload import check_heads, named_workload, workload_of
from kvr_mpi.errors import ConfigError, DataError
from kvr_mpi.model import probe_shape

LLAMA_31 = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
REAL: dict[str, Any] = {
    "Llama 3.1 8B": lambda: tf.LlamaConfig(**LLAMA_31, max_position_embeddings=131072),
}


@pytest.mark.parametrize("name", REAL)
def test_named_shapes_are_what_their_configurations_say(name: str) -> None:
    named, counted = named_workload(name), workload_of(REAL[name](), dtype_bytes=2)
    for field in ("layers", "qkv_flop", "rest_flop", "pair_flop", "heads", "kv_bytes", "head_flop"):
        assert getattr(named, field) == getattr(counted, field), field
    assert named.weight_bytes == pytest.approx(counted.weight_bytes, rel=1e-3)  # norms are left out


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "deepseek-latents"])
def test_every_architecture_is_counted(name: str) -> None:
    config = CONFIGS[name]()
    work = workload_of(config, dtype_bytes=4)
    assert (work.layers, work.heads, work.max_tokens) == (3, 6, 512)
    assert work.pair_flop == 2 * 6 * 2 * 8 and work.head_flop == 2 * 48 * 199
    assert work.rest_flop >= 2 * (48 * 48 + 2 * 48 * 64)
    assert work.qkv_flop == 2 * 48 * (48 + work.kv_bytes / 4) or name.startswith("falcon-gqa")  # it repeats its keys


def test_latents_count_with_the_keys_and_values_that_they_are_expanded_to() -> None:
    work = workload_of(CONFIGS["deepseek-latents"](), dtype_bytes=4)
    assert work.pair_flop == 2 * 6 * (16 + 8)  # keys have 8 dimensions without and 8 with rotary embedding
    down, up = 48 * 24 + 48 * (16 + 8), 24 * 6 * 16 + 16 * 6 * (8 + 8)  # queries, then keys and values
    assert work.qkv_flop == 2 * (down + up) and work.kv_bytes == 4 * (16 + 8)


def test_only_the_experts_a_token_visits_count() -> None:
    def rest_flop(experts: int, visited: int) -> float:
        config: Any = CONFIGS["mixtral-moe"]()
        config.num_local_experts, config.num_experts_per_tok = experts, visited
        return workload_of(config, dtype_bytes=2).rest_flop

    an_expert = 2 * 3 * 48 * 64
    assert rest_flop(4, 2) - rest_flop(4, 1) == an_expert
    assert rest_flop(8, 2) - rest_flop(4, 2) == 2 * 48 * 4, "the router only"


# What a query and a key cost a layer with attention: all have 4 heads of 8, latent attention keys of 16.
SAME = ("granitemoehybrid", "jamba", "lfm2_moe", "nemotron_h", "qwen3_5_text", "gemma3n_text")
HYBRIDS = {"kimi_linear": 192} | dict.fromkeys(SAME, 128)


@pytest.mark.parametrize("name", HYBRIDS)
def test_recurrent_layers_are_no_attention(name: str) -> None:
    config = shrink(name)
    work, layers = workload_of(config, dtype_bytes=4), probe_shape(config, torch.float32).layers
    attending = sum(layer.elements > 0 for layer in layers) if work.has_states else len(layers)
    assert work.heads == 4 and work.pair_flop * work.layers == pytest.approx(HYBRIDS[name] * attending)
    assert 0 < work.qkv_flop < work.rest_flop, "the layers before the first attention are not that layer's"
    # A product takes two operations for a weight; embeddings are looked up, and of experts a token visits some.
    products = work.layers * (work.qkv_flop + work.rest_flop) + work.head_flop
    assert products <= 1.2 * 2 * work.weight_bytes / 4


H100 = load_hardware("h100-80gb").model_dump()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (H100 | {"gemm_flop_per_s": -1.0}, "gemm_flop_per_s.*greater than or equal to 1.*-1"),
        ({name: value for name, value in H100.items() if name != "gemm_flop_per_s"}, "gemm_flop_per_s: Field required"),
        (H100 | {"link_latency_s": float("nan")}, "link_latency_s.*finite"),
        (H100 | {"link_gbit_per_s": 400}, "link_gbit_per_s.*valid keys: .*link_bytes_per_s"),
        (H100 | {"\x1b[2J": 1}, r"\\x1b\[2J"),
        (H100 | {"source": "x" * (2 << 20)}, "larger than 1048576 bytes"),
        (b'{"name": "mine", ', "mine.json.*JSON"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_profiles_no_machine_has_are_refused(tmp_path: Path, content: Any, words: str) -> None:
    file = tmp_path / "mine.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(DataError, match=words):
        load_hardware(str(file))


def test_what_attends_and_what_hands_on_states() -> None:
    own, other = workload_of(WHOLE["bloom-own-attention"](), 2), workload_of(shrink("inkling2_text"), 4)
    assert (own.heads, own.pair_flop) == (6, 4 * 48)
    assert (other.heads, other.pair_flop) == (4, 128), "attention to other layers is none to tokens"
    assert workload_of(STATES["qwen3-next-delta-rule"](), dtype_bytes=2).has_states
    alone = workload_of(SINGLE_ONLY["mamba-no-attention"](), dtype_bytes=2)
    assert alone.has_states and alone.pair_flop == 0 and alone.kv_bytes == 0 and alone.rest_flop > 0


def test_names_are_found_however_written() -> None:
    for name in ("llama-3.1-8b", "LLAMA3.1 8B", "8B Llama 3.1"):
        assert named_workload(name).name == "Llama 3.1 8B"
    with pytest.raises(ConfigError, match=r"'Llama 8B'.*Mistral 7B, .*Llama 3.1 405B"):
        named_workload("Llama 8B")
    # parameters, as the names tell them; a named shape has 16-bit weights
    for name, billions in {
        "Mistral 7B": 7.2,
        "Llama 3.1 70B": 70.6,
        "Llama 3.1 405B": 406.0,
        "SmolLM2 135M": 0.135,
    }.items():
        assert named_workload(name).weight_bytes / 2e9 == pytest.approx(billions, rel=0.03), name


def test_profiles(tmp_path: Path) -> None:
    assert profiles() == ["a100-80gb", "h100-80gb", "h200"]
    for name in profiles():
        profile = load_hardware(name)
        assert profile.name == name
        assert profile.group_link(8)[0] > 2 * profile.link_bytes_per_s
    (tmp_path / "mine.json").write_text(json.dumps(H100 | {"name": "mine", "link_bytes_per_s": 12.5e9}))
    assert load_hardware(str(tmp_path / "mine.json")).link_bytes_per_s == 12.5e9
    os.mkfifo(tmp_path / "pipe")
    for name, words in ((tmp_path / "pipe", "no such profile or file"), ("b300", "'b300'.*a100-80gb, h100-80gb, h200")):
        with pytest.raises(ConfigError, match=words):
            load_hardware(str(name))


# Groups of several ranks

WORK = named_workload("Llama 3.1 70B")
PROFILE = load_hardware("h100-80gb")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shares_make_up_the_whole(size: int) -> None:
    part = WORK.of_group(size)
    for name in ("qkv_flop", "rest_flop", "pair_flop", "kv_bytes", "head_flop", "weight_bytes"):
        assert size * getattr(part, name) == pytest.approx(getattr(WORK, name)), name
    assert size * part.heads == WORK.heads


def test_of_too_few_kv_heads_several_ranks_have_one() -> None:
    part = WORK.of_group(32)
    assert part.kv_bytes == WORK.kv_bytes / 8 and 32 * part.pair_flop == WORK.pair_flop
    kv_flop = 2 * 8192 * (2 * 8 * 128)  # a token's keys and values: 8 heads of 128 each
    assert 32 * part.qkv_flop == pytest.approx(WORK.qkv_flop - kv_flop + 32 / 8 * kv_flop)
    assert 32 * part.weight_bytes == pytest.approx(WORK.weight_bytes + (32 / 8 - 1) * 80 * kv_flop)


def test_a_layer_sums_twice_over_the_group() -> None:
    alone, shared = costs_of(WORK, PROFILE), costs_of(WORK, PROFILE, tensor_parallel=4)
    assert PROFILE.host_link_bytes_per_s is not None
    sums_s = 2 * (2 * 3 / 4) * 8192 * 2 / PROFILE.host_link_bytes_per_s
    assert shared.rest_token_s == pytest.approx(alone.rest_token_s / 4 + sums_s)
    assert shared.kv_bytes == alone.kv_bytes / 4 and shared.link_bytes_per_s == alone.link_bytes_per_s

    # Over hosts they take the slower links.
    def times(hardware: Hardware) -> list[float]:
        return [single_seconds(costs_of(WORK, hardware, tensor_parallel=size), 131072) for size in (8, 16)]

    few = PROFILE.model_copy(update={"link_bytes_per_s": 1e9})
    assert times(few)[0] == times(PROFILE)[0], "within a host nothing goes over them"
    assert times(few)[1] > 2 * times(PROFILE)[1]


def test_groups_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be divided by it; set it to 1, 2, 4, 8, 16, 32 or 64"):
        check_heads(WORK, 3)
