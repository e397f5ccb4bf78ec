"""Full chunks by code of their one size: compiled on CPUs, captured as CUDA graphs on GPUs; or else said why not.

Stands between a model that is ready for chains and its first document. It is tried before every batch, and whatever
goes wrong, the layers' own code goes on. What is compiled is kept in ``KVR_CACHE`` (`compiled`), for a processor, a
model's configuration and a size; the weights are not in it. What is captured is gone with the process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from kvr_mpi.errors import ModelError
from kvr_mpi.kv.contents import layer_kv
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import ATTENTION
from kvr_mpi.model.captured_pieces import CapturedPiece, PieceMemory
from kvr_mpi.model.graph_capture import Capture, GraphCapture
from kvr_mpi.model.layer_chunks import decoder_layers
from kvr_mpi.model.layer_pieces import (
    LayerInputs,
    LayerPieces,
    forget_pieces,
    give_pieces,
    pieces_of,
    without_pieces,
)
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr
from kvr_mpi.prefill.self_check import FAILURES, allowed_error, error_share
from kvr_mpi.transport import Transport, gather_json, host_by_host, share_json, together
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.tuning.compile_layers import AFTER, BEFORE, REQUEST, Request, request_of
from kvr_mpi.tuning.compiled import LIMIT_S, Order, can_compile, folder_of, open_packages
from kvr_mpi.tuning.layer_kinds import kinds_of, layer_inputs

# A model of more kinds of layers has settings that differ in every layer, or something else that is not known here.
MOST_KINDS = 4
# A layer is followed up to its attention over so many tokens, to see what it tells it.
FEW_TOKENS = 2

Say = Callable[[str], None]


def compile_layers(
    loaded: LoadedModel,
    chunk_tokens: int,
    world: Transport,
    cache_dir: Path,
    say: Say,
    *,
    capture: Capture | None = None,
) -> bool:
    """Have chunks of so many tokens computed by compiled or captured code, if that can be; every rank calls this.

    The last layer keeps its own code: of most prompts it computes one token. The model has to be ready for chains.

    Parameters
    ----------
    loaded : LoadedModel
    chunk_tokens : int
    world : Transport
    cache_dir : Path
    say : callable
        For a line of text.
    capture : Capture, optional
        What captures; by default CUDA graphs on GPUs, where nothing is compiled, and nothing elsewhere.

    Returns
    -------
    bool
        Whether this rank's chunks are.
    """
    if capture is None and loaded.device.type == "cuda":
        capture = GraphCapture(loaded.device)
    opened = host_by_host(
        world, lambda: _open(loaded, chunk_tokens, cache_dir, say, capture, compiles=world.local_rank == 0)
    )
    why = together(world, lambda: opened or why_other(loaded, chunk_tokens))
    if why:
        forget_pieces(loaded.model)
    found: list[str] = share_json(world, gather_json(world, why))
    for each in sorted({*found} - {""}):
        say(f"chunks are computed by the layers' own code on {found.count(each)} of {world.size} rank(s): {each}")
    if "" in found:
        layers, ranks = len(decoder_layers(loaded.model)), f"on {found.count('')} of {world.size} rank(s)"
        way = "computed by compiled code" if capture is None else "launched as CUDA graphs"
        say(f"chunks of {chunk_tokens} tokens are {way} in {layers - 1} of {layers} layers, {ranks}")
    return not why


def _open(
    loaded: LoadedModel, tokens: int, cache_dir: Path, say: Say, capture: Capture | None, *, compiles: bool
) -> str:
    """Give layers their pieces; say why not, nothing if they have them."""
    model = loaded.model
    if why := _why_never(loaded, captured=capture is not None):
        return why
    try:
        layers = decoder_layers(model)[:-1]
        few, full = layer_inputs(loaded, FEW_TOKENS), layer_inputs(loaded, tokens)
        kinds = kinds_of(layers, full[:-1])
        if not 0 < len(kinds) <= MOST_KINDS:
            return f"{loaded.shape.architecture} has {len(kinds)} kinds of layers before its last, of 1 to {MOST_KINDS}"
        if capture is not None:
            _give_captured(layers, kinds, few, full, capture)
            return ""
        firsts = [kind[0] for kind in kinds]
        request = request_of(loaded.dtype, {idx: layers[idx] for idx in firsts}, {idx: full[idx] for idx in firsts})
        packages = open_packages(_order(model.config, request, cache_dir), say, compiles=compiles)
        with torch.inference_mode():
            for kind in kinds:
                before, after = (packages.get(f"{kind[0]}-{place}") for place in (BEFORE, AFTER))
                if before is None or after is None:
                    forget_pieces(model)
                    return "there is no compiled code for them"
                for idx in kind:
                    give_pieces(layers[idx], LayerPieces(layers[idx], few[idx], full[idx], before, after))
    except (ModelError, *FAILURES) as error:
        forget_pieces(model)
        return f"{loaded.shape.architecture}: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return ""


def _why_never(loaded: LoadedModel, *, captured: bool) -> str:
    """Say why there is nothing to try; nothing if there is."""
    if not captured and (loaded.device.type != "cpu" or not can_compile(loaded.dtype)):
        return f"nothing is compiled for {str(loaded.dtype).removeprefix('torch.')} on {loaded.device.type}"
    if loaded.model.config._attn_implementation != ATTENTION:
        return f"{loaded.shape.architecture} calls its attention itself"
    if captured and loaded.stage is not None:
        return "the ranks of a stage talk to each other in every layer"
    if captured and loaded.streamed is not None:
        return "its weights come from disk"
    return ""


@torch.inference_mode()
def _give_captured(
    layers: Sequence[torch.nn.Module],
    kinds: Sequence[Sequence[int]],
    few: Sequence[LayerInputs],
    full: Sequence[LayerInputs],
    capture: Capture,
) -> None:
    """Capture two pieces of every layer: a graph reads the weights of one."""
    for kind in kinds:
        memory = PieceMemory(layers[kind[0]], full[kind[0]])
        for idx in kind:
            layer = layers[idx]
            before, after = (
                CapturedPiece(layer, full[idx], memory, capture, is_after=is_after) for is_after in (False, True)
            )
            give_pieces(layer, LayerPieces(layer, few[idx], full[idx], before, after))


def _order(config: Any, request: Request, cache_dir: Path) -> Order:
    """Say what is to be compiled: two pieces of each kind of layer."""
    names = [f"{idx}-{place}" for idx in request.given for place in (BEFORE, AFTER)]
    known = f"transformers {transformers.__version__} {request.model_dump_json()} {config.to_json_string()}"
    return Order(
        f"layers for chunks of {request.tokens} tokens",
        folder_of(cache_dir, known),
        names,
        partial(_command, config, request),
        LIMIT_S * len(request.given),
    )


def _command(config: Any, request: Request, work: Path, names: Sequence[str]) -> list[str]:
    copy.deepcopy(config).to_json_file(work / "config.json")
    (work / REQUEST).write_text(request.model_dump_json())
    return [f"{__package__}.compile_layers", str(work), *names]


def why_other(loaded: LoadedModel, chunk_tokens: int) -> str:
    """Run two full chunks by code of their size, and by the layers' own; say what differs, nothing if all is right.

    All keys and values are compared, and the logits. Of a prompt that is not that long the second is shorter.
    """
    pieces = [found for layer in decoder_layers(loaded.model) if (found := pieces_of(layer)) is not None]
    try:
        with without_pieces(loaded.model):
            truth = _prefill(loaded, chunk_tokens)
        before = [each.runs for each in pieces]
        tried = _prefill(loaded, chunk_tokens)
    except (ModelError, *FAILURES) as error:
        return f"code of one size fails ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
    full = truth.partition.tokens // chunk_tokens
    if any(each.runs != runs + full for each, runs in zip(pieces, before, strict=True)):
        return "layers are given something else for a chunk than for a prompt of its size"
    pairs = [(tried.logits, truth.logits, "logits")]
    for idx in range(len(loaded.shape.layers)):
        mine, theirs = layer_kv(tried.cache, idx), layer_kv(truth.cache, idx)
        both = zip(mine or (), theirs or (), strict=True)
        pairs += [(one, other, f"keys or values of layer {idx}") for one, other in both]
    for one, other, what in pairs:
        assert one is not None and other is not None
        share, allowed = error_share(one, other), allowed_error(loaded.dtype)
        if not share <= allowed:
            return f"{what} by code of one size differ by {share:.1e} of their spread (allowed {allowed:.0e})"
    return ""


def _prefill(loaded: LoadedModel, chunk_tokens: int) -> Prefill:
    tokens = 2 * chunk_tokens
    ids = loaded.shape.sample_ids(min(tokens, loaded.shape.max_tokens or tokens))
    partition = Partition((0, len(ids)))
    return prefill_kvr(loaded, ids, partition, LocalTransport(), chunk_tokens=chunk_tokens, keeps_all=True)
