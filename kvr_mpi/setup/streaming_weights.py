"""A job whose weights are streamed: loaded on every rank, what a pass costs, and a trial on the first layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from kvr_mpi.decode.batch import MAX_SEQUENCES
from kvr_mpi.errors import ConfigError
from kvr_mpi.job import JobSpec
from kvr_mpi.model import LoadedModel, choose_device
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.load_streamed import load_streamed, sample_of
from kvr_mpi.model.streamed import BLOCKS_HELD, StreamedWeights
from kvr_mpi.prefill.in_pass import pass_bytes_per_token
from kvr_mpi.prefill.memory_budget import GIB
from kvr_mpi.prefill.self_check import Say, check_chain
from kvr_mpi.schedule.forecast import MEMORY_SHARE
from kvr_mpi.setup.host_memory import free_bytes, keep_heap, ranks_on_device
from kvr_mpi.transport import Transport, together

# Of the memory that is left, what blocks may take: prompts get the rest.
BLOCKS_SHARE = 0.25


def load_in_blocks(spec: JobSpec, world: Transport, *, offline: bool, cache_dir: Path, say: Say) -> LoadedModel:
    """Load a model whose layers stay on disk, on every rank, and say what each pass will read; every rank calls this.

    Raises
    ------
    FailedTogetherError
        On all ranks: `ModelError` if the model cannot be streamed, `ConfigError` if not even two layers fit.
    """
    model = spec.model
    if together(world, lambda: choose_device(model.device, world.local_rank)).type != "cpu":
        raise ConfigError("model.stream_weights = true: layers are read into host memory; set model.device = 'cpu'")
    load = partial(load_streamed, model.path, dtype=model.dtype, offline=offline, cache_dir=cache_dir)
    loaded = together(world, load)
    keep_heap()
    weights = loaded.streamed
    assert weights is not None
    sharers = ranks_on_device(world, loaded.device)
    free = free_bytes(loaded.device, sharers)
    together(world, lambda: split_blocks(weights, free))
    given = spec.parallel.memory_gib
    room = int(MEMORY_SHARE * free) - weights.reserved_bytes if given is None else int(given * GIB)
    for line in together(world, lambda: describe_blocks(weights, max(0, room // pass_bytes_per_token(loaded.shape)))):
        say(line)
    return loaded


def split_blocks(weights: StreamedWeights, free: int) -> None:
    """Cut the layers into blocks of which two fit into a share of the memory that is left.

    Raises
    ------
    ConfigError
        If not even two layers do fit into all of it.
    """
    if BLOCKS_HELD * weights.layer_bytes > free:
        raise ConfigError(
            f"model.stream_weights = true: two layers of {weights.layer_bytes / GIB:.2f} GiB each are held at a time, "
            f"but a rank has only {free / GIB:.2f} GiB; start fewer ranks per host"
        )
    weights.split(max(1, int(BLOCKS_SHARE * free / BLOCKS_HELD) // weights.layer_bytes))


def describe_blocks(weights: StreamedWeights, room_tokens: int) -> list[str]:
    """Say what a pass reads, how long that takes by a layer that is read now, and for how many tokens."""
    bytes_per_s = weights.measure_reading()
    return [
        f"weights are streamed: {weights.resident_bytes / 1e9:.2f} GB stay in memory, and {len(weights.blocks)} "
        f"block(s) of up to {len(weights.blocks[0])} layer(s) are read in turn, two at a time "
        f"({weights.reserved_bytes / 1e9:.2f} GB)",
        f"a pass reads {weights.pass_bytes / 1e9:.2f} GB, in {weights.pass_bytes / bytes_per_s:.1f} s at "
        f"{bytes_per_s / 1e6:.0f} MB/s (measured with one layer, which may be cached by the system), for up to "
        f"{MAX_SEQUENCES} prompts at once with up to {room_tokens} tokens in total",
    ]


def check_streamed(loaded: LoadedModel, say: Say) -> LoadedModel:
    """Prove the way this model's attention is taken over on its first layers, which are held for that, and go.

    Raises
    ------
    ConfigError
        If it runs only as a whole, or the logits differ.
    """
    sample = check_chain(sample_of(loaded), say=say)
    prepare_model(loaded.model, chain=True, in_parts=sample.attends_in_parts)
    return replace(loaded, cuts_last_layer=sample.cuts_last_layer, attends_in_parts=sample.attends_in_parts)
