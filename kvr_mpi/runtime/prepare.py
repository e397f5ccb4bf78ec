"""Prepares a job's model on all ranks: loads it, checks the settings, and measures what they require.

This happens once, before the first document. `ChainRunner` then uses the result on one chain.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from kvr_mpi.compress.compression import Compression, open_compression
from kvr_mpi.compress.repeating import INSTRUCTION
from kvr_mpi.costs.solve import Rates
from kvr_mpi.decode.grammar import Grammars
from kvr_mpi.decode.group import HeadSharing
from kvr_mpi.decode.reasoning import reasoning_format
from kvr_mpi.decode.sampling import describe_generation, ends_of, make_generation_config
from kvr_mpi.documents.conversations import check_has_chat_template
from kvr_mpi.documents.prompts import Frame
from kvr_mpi.errors import ConfigError, ModelError, counted
from kvr_mpi.fairkv.sharing import open_sharing
from kvr_mpi.job import EQUAL_TIME, JobSpec
from kvr_mpi.job.combinations import PROMPTS, check_combinations, why_no_effect, why_not_heads
from kvr_mpi.job.model_kinds import kinds_of
from kvr_mpi.job.readout import Readout, readout_of
from kvr_mpi.kv.attention import why_no_flex
from kvr_mpi.kv.flex import compiles
from kvr_mpi.kv.pool import PAGE_ROWS, Pool, pages_for
from kvr_mpi.kv.relay import Relay
from kvr_mpi.kv.rolling import Rolling, rolling_of
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.logs import RankLogger
from kvr_mpi.model import LoadedModel, find_model, hash_weights, is_unconverted, tokenizer_fingerprint
from kvr_mpi.model.adapter import with_adapter
from kvr_mpi.model.kernels import kernel_bytes, kernels_of, name_ways
from kvr_mpi.model.rope import depends_on_length
from kvr_mpi.model.shape import logits_width
from kvr_mpi.model.tp_group import TensorParallelGroup, alone
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.memory_budget import GIB, Footprint, footprint_of
from kvr_mpi.prefill.one_prompt import compute_prefix, own_pool
from kvr_mpi.prefill.packed import PACK_TOKENS
from kvr_mpi.prefill.reading import Reading
from kvr_mpi.prefill.self_check import check_chain, check_chunks, check_plain, check_spread, why_not_packed
from kvr_mpi.prefill.streaming import prove_rolling
from kvr_mpi.report.style import bytes_text
from kvr_mpi.runtime.asking import frame_questions
from kvr_mpi.runtime.host_memory import free_bytes, ranks_on_device
from kvr_mpi.runtime.job_ranks import JobRanks, warn_of_hosts
from kvr_mpi.runtime.loading import load_on_all, readable
from kvr_mpi.runtime.requests import PromptConfig
from kvr_mpi.runtime.session import Machine, Session, header_of, whole_identity
from kvr_mpi.schedule.forecast import MEMORY_SHARE, frame_of
from kvr_mpi.store.log import software
from kvr_mpi.topology import Topology, cores_per_rank, least_of_each
from kvr_mpi.transport import Transport, check_alike, gather_json, on_root, share_json, together
from kvr_mpi.tuning.measure import measure_rates
from kvr_mpi.tuning.rates import describe_rates, measured_costs, table_of

LEAST_PREFIX_TOKENS = 32  # shorter instructions are computed with every prompt, since copying them would take as long
MOST_COUNTED = 1 << 20  # longer prompts, such as those of models without a maximum length, may need chunks in any case
EXAMPLE_TOKENS = 8192  # slices are shown for this length if the model's configuration has no maximum length

# Share of the prompt memory on a GPU that is allocated for keys and values, if it is too small for the longest prompt
# and its prefill, which may then run in chunks.
POOL_SHARE = 1 / 2


def prepare(
    spec: JobSpec,
    machine: Machine,
    ranks: JobRanks,
    chain: Transport,
    logger: RankLogger,
    *,
    loaded: LoadedModel | None = None,
) -> Session:
    """Prepare a job's model; every rank calls this. Raises `ConfigError` if the settings do not suit the model.

    chain : the ranks that share this chain's prompts, one from each tensor-parallel group.
    loaded : the job's model, if it is loaded already.
    """
    world, own_logger, logger = ranks.world, logger, logger.root
    loaded, once_s = (loaded, 0.0) if loaded else _load(spec, machine, ranks, chain, logger)
    check_together = partial(_together_alone, world, loaded.tp_group)
    loaded, frame, reduce_frame, generation = check_together(partial(_check, spec, loaded, logger))
    readout = together(world, lambda: readout_of(spec, loaded.shape.hidden_size))
    compression = together(world, partial(_open_compression, spec, loaded))
    rolling = together(world, partial(_open_rolling, spec, loaded, logger))
    why_alone, in_pages = None, False
    if not spec.is_plain:
        why_alone, in_pages = check_together(partial(try_rows, spec, loaded, logger))
    if compression is not None:
        logger.info(f"keys and values are compressed before answers are decoded ({compression.describe()})")
    if (chunk_tokens := spec.chunk_tokens) != "auto":
        longest = frame.max_tokens
        whole = f"; no prompt is longer than {longest} tokens, so slices stay whole" if chunk_tokens >= longest else ""
        logger.info(f"slices are computed in chunks of {chunk_tokens} tokens{whole}")
    if why_alone is not None:
        logger.info(f"documents are decoded one by one: {why_alone}")
    over_nccl = "NCCL is not used for small messages in every layer" if chain.in_streams else None
    why_not = why_not_heads(spec) or why_alone or over_nccl
    sharing = together(world, partial(open_sharing, spec.decode, loaded, why_not))
    check_alike(
        world,
        {
            "the model's weights": loaded.fingerprint,
            "the model's dtype": str(loaded.dtype),
            "the tokenizer": tokenizer_fingerprint(loaded.tokenizer),
            "the prompt's frame": str((frame, reduce_frame)),
            "generation": str(generation.to_diff_dict()),
            "compression": "" if compression is None else str(compression.identity),
            "what keeps prompts from being packed": str(why_alone),
            "sharing of heads": str(sharing if sharing is None or isinstance(sharing, str) else type(sharing).__name__),
            "software": str(software()),
        },
    )
    weights = _hash_weights(spec, machine, world, logger)
    question_frames = together(world, partial(_question_frames, spec, loaded, weights, logger))
    frames = [frame, *question_frames.values(), *([reduce_frame] if spec.prompt.too_long == "split" else [])]
    pool = own_pool(loaded)
    prefixes = together(world, partial(_compute_prefixes, spec, loaded, frames, pool, readout, logger))
    free_bytes = _room(spec, loaded, ranks, sharing)
    if readout is not None and readout.pooling is None:
        of_logits = [min(each // 4, Reading.most_logits_bytes(loaded)) for each in free_bytes]
        free_bytes = [each - less for each, less in zip(free_bytes, of_logits, strict=True)]
        readout = replace(readout, logits_bytes=of_logits[ranks.lane.rank])
    longest = max(each.max_tokens for each in frames), spec.generation.max_new_tokens
    footprint = None
    if not spec.is_plain:
        footprint = check_together(partial(_footprint_of, loaded, *longest, min(free_bytes)))
        footprint = replace(footprint, keeps_kv=spec.keeps_kv)
    if in_pages:  # into which prefixes are copied
        pool = check_together(partial(_make_pool, loaded, sum(longest), footprint, free_bytes[ranks.lane.rank]))
    is_chosen = spec.decode.mode == "auto" and not isinstance(sharing, str | None)
    costs = measured_costs(loaded, world, logger) if world.size > 1 and (spec.planned or is_chosen) else None
    rates: list[Rates] = []
    if spec.parallel.partition == EQUAL_TIME and costs is not None:
        rates = costs.rates(ranks.lane.size)
    elif spec.parallel.partition == EQUAL_TIME and chain.size > 1:
        logger.info("measuring the speed of the ranks, for slices of equal time")
        rates = measure_rates(loaded, ranks.lane)
    if rates and rolling is None:
        mine = rates if spec.planned else rates[ranks.lane.rank - chain.rank :][: chain.size]
        logger.debug(describe_rates(mine, frame.max_tokens if loaded.shape.max_tokens else EXAMPLE_TOKENS))
    session = Session(
        spec=spec,
        machine=machine,
        ranks=ranks,
        logger=own_logger,
        loaded=loaded,
        prompt_config=PromptConfig(
            loaded.tokenizer,
            spec.prompt,
            frame,
            reduce_frame,
            spec.generation.max_new_tokens,
            question_frames,
            spec.generation.of_answers,
            spec.generation.score_column,
            spec.generation.seed,
            why_no_effect(PROMPTS, spec, kinds_of(loaded)) is None,
            spec.output.check_answers,
            readout,
        ),
        generation=generation,
        header=header_of(spec, loaded, whole_identity(spec, loaded, frame, compression, rolling), weights),
        why_alone=why_alone,
        prefixes=prefixes,
        footprint=footprint,
        free_bytes=free_bytes,
        costs=costs,
        rates=rates,
        table=table_of(spec, loaded, world, ranks.lane, chain, logger),
        compression=compression,
        sharing=sharing,
        pool=pool,
        rolling=rolling,
        once_s=once_s,
    )
    if spec.generation.lookup == "auto" and spec.generation.max_new_tokens and session.why_no_lookup is not None:
        logger.info(f"answers are decoded without prompt lookup: {session.why_no_lookup}")
    return session


def _open_compression(spec: JobSpec, loaded: LoadedModel) -> Compression | None:
    """Prepare the job's compression method, with the words that ask for a text again if it needs them."""
    if spec.compress is None:
        return None
    instruction: Sequence[Any] = ()
    if spec.compress.rule.repeats:
        instruction = frame_of(spec, loaded.tokenizer, loaded.shape, spec.prompt.first_template, INSTRUCTION).tail
    return open_compression(spec.compress, loaded, instruction)


def _together_alone(world: Transport, tp_group: TensorParallelGroup | None, work: Callable[[], Any]) -> Any:
    """Call a function on every rank, without all-reduces over its group; fail on all ranks if it fails on any.

    Checks run chains of threads, which cannot sum over a group. A result for some of the heads holds for all.
    """
    with alone(tp_group):
        return together(world, work)


def _load(
    spec: JobSpec, machine: Machine, ranks: JobRanks, chain: Transport, logger: RankLogger
) -> tuple[LoadedModel, float]:
    """Load the model, or its part in a tensor-parallel group; return it with `Session.once_s`."""
    world = ranks.world
    if spec.parallel.tensor_parallel > 1 and ranks.tp_group is None:
        raise ConfigError(
            f"parallel.tensor_parallel = {spec.parallel.tensor_parallel}: tensor-parallel groups are for jobs only "
            f"(kvr-run); set it to 1 here"
        )
    torch.set_num_threads(machine.threads or cores_per_rank(machine.cores, world.local_size))
    cores = sorted(os.sched_getaffinity(0))[: machine.cores] if hasattr(os, "sched_getaffinity") else []
    for line in describe_few_cores(gather_json(world, [socket.gethostname(), cores])):
        logger.warning(line)
    source = spec.model
    arguments: dict[str, Any] = source.model_dump(exclude={"path", "kernels"})
    arguments |= {"offline": machine.offline, "cache_dir": machine.cache_dir}
    arguments["needs_head"] = spec.output.embedding is None
    kernels = "plain" if spec.is_plain else source.kernels
    conversion = on_root(world, lambda: _conversion(source.path, machine.cache_dir))
    logger.info(f"loading {source.path}{conversion or ''}")
    began_s = time.perf_counter()
    loaded = load_on_all(world, source.path, kernels=kernels, logger=logger, tp_group=ranks.tp_group, **arguments)
    once_s = time.perf_counter() - began_s if conversion else 0.0
    logger.info(_describe(spec, loaded, ranks.lane, chain))
    if ranks.tp_group is not None:
        warn_of_hosts(ranks, logger)
    return loaded, once_s


def describe_few_cores(ranks: Sequence[tuple[str, Sequence[int]]]) -> list[str]:
    """Return warnings about hosts with more ranks than cores; `ranks` has each rank's host and the cores it may use."""
    hosts: dict[str, list[Sequence[int]]] = {}
    for host, cores in ranks:
        hosts.setdefault(host, []).append(cores)
    crowded = {host: len({core for one in allowed for core in one}) for host, allowed in hosts.items() if all(allowed)}
    return [
        f"{len(hosts[host])} ranks on {host} may use only {counted(cores, 'core')}, and will wait for each "
        f"other: start fewer, or give them more cores"
        for host, cores in crowded.items()
        if cores < len(hosts[host])
    ][:1]


def _conversion(path: str, cache_dir: Path) -> str:
    """Return a notice that a GGUF file is converted first, which takes time; otherwise an empty string."""
    if not is_unconverted(find_model(path), cache_dir):
        return ""
    return (
        f", which is converted to safetensors first, once: up to half a minute for small models (kept in {cache_dir})"
    )


def _describe(spec: JobSpec, loaded: LoadedModel, lane: Transport, chain: Transport) -> str:
    """Describe the loaded model and its ranks in one line."""
    unit = counted(chain.size, "rank" if loaded.tp_group is None else "tensor-parallel group")
    chains = f"{counted(Topology(lane.size, chain.size).chains, 'chain')} of {unit}"
    if loaded.tp_group is not None:
        chains += f" of {loaded.tp_group.size} ranks"
    if spec.planned:
        chains = f"{counted(lane.size, 'rank')} in chains as planned"
    copied = kernel_bytes(loaded.model)
    kernels = f", {name_ways(loaded.model)}" if kernels_of(loaded.model) and loaded.device.type == "cpu" else ""
    weights = f", copies of weights ({bytes_text(copied)} more)" if copied else ""
    return (
        f"{loaded.shape.architecture}, {len(loaded.shape.layers)} layers, "
        f"{str(loaded.dtype).removeprefix('torch.')} on {loaded.device.type}{kernels}{weights}; {chains}, "
        f"{counted(torch.get_num_threads(), 'thread')} per rank; "
        f"{loaded.shape.kv_bytes_per_token / 1024:.0f} KiB of keys and values per token"
    )


def _check(
    spec: JobSpec, loaded: LoadedModel, logger: RankLogger
) -> tuple[LoadedModel, Frame, Frame, GenerationConfig]:
    """Check that model, strategy, prompt and generation settings are compatible."""
    if spec.is_plain:
        check_plain(loaded)
    else:
        loaded = check_chain(loaded, logger=logger)
        for line in describe_portable(loaded):
            logger.info(line)
    check_combinations(spec, kinds_of(loaded))
    if spec.chunk_tokens != "auto":
        check_chunks(loaded)
    if spec.is_sharded:
        check_spread(loaded)
    tokenizer, shape = loaded.tokenizer, loaded.shape
    template = spec.prompt.first_template
    if spec.documents.format == "messages":
        check_has_chat_template(tokenizer)
    frame = frame_of(spec, tokenizer, shape, template)
    reduce_frame = frame_of(spec, tokenizer, shape, spec.prompt.reduce_template or template)
    reduce_frame = replace(reduce_frame, overlap=0)
    generation = make_generation_config(loaded.model, spec.generation.transformers_settings())
    if spec.generation.max_new_tokens:
        for level, line in describe_generation(loaded.model, tokenizer, generation):
            logger.log(level, line)
        if (reasoning := reasoning_format(tokenizer)) is not None and spec.prompt.chat_template is not False:
            follows_schema = spec.generation.json_schema is not None
            ids = [each for each in frame.tail if isinstance(each, int)]
            most = spec.generation.max_new_tokens
            if (warning := reasoning.describe(tokenizer, ids, most, follows_schema=follows_schema)) is not None:
                logger.warning(warning)
    if spec.generation.json_schema is not None:
        width = logits_width(loaded.config)
        if len(tokenizer) > width:
            raise ConfigError(
                f"generation.json_schema: the model computes {width} logits, but its tokenizer has {len(tokenizer)} "
                f"tokens, so answers cannot follow a JSON schema: leave it out, or use another model"
            )
        Grammars(tokenizer, ends_of(generation)).matcher(spec.generation.json_schema, width)
    return loaded, frame, reduce_frame, generation


def _question_frames(spec: JobSpec, loaded: LoadedModel, weights: str, logger: RankLogger) -> dict[str, Frame]:
    """Make the frame of each question, or of each of the job's prompts, by name."""
    if not spec.prompts:
        return frame_questions(spec, loaded, weights)
    frames = {name: frame_of(spec, loaded.tokenizer, loaded.shape, template) for name, template in spec.prompts.items()}
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, frame in frames.items():
        groups.setdefault((frame.head, frame.text), []).append(name)
    if why := why_no_effect(PROMPTS, spec, kinds_of(loaded)):
        logger.info(f"each document is prefilled {len(frames)} times, once per prompt: {why}")
    elif len(groups) > 1:
        told = "; ".join(", ".join(names) for names in groups.values())
        logger.info(
            f"each document is prefilled {len(groups)} times, for the prompts {told}: they differ before {{text}}, so "
            "nothing after that can be shared. Move the parts that differ behind {text}"
        )
    return frames


def _hash_weights(spec: JobSpec, machine: Machine, world: Transport, logger: RankLogger) -> str:
    """Hash the weights if keys and values are stored or reused; one rank reads them."""
    if not spec.output.kv and spec.questions is None and spec.documents.reuse is None:
        return ""
    logger.info("hashing the weights, to identify the model of stored keys and values")
    options = spec.model.model_dump(include={"trust_remote_code"})
    hashing = partial(hash_weights, spec.model.path, offline=machine.offline, cache_dir=machine.cache_dir, **options)
    found = on_root(world, lambda: readable(spec.model.path, lambda: with_adapter(hashing(), spec.model.adapter)))
    return str(share_json(world, found))


def _compute_prefixes(
    spec: JobSpec, loaded: LoadedModel, frames: Sequence[Frame], pool: Pool, readout: Readout | None, logger: RankLogger
) -> tuple[SequenceKV, ...]:
    """Compute what all prompts of a frame begin with, once for all documents."""
    is_repeated = not spec.is_plain and spec.questions is None and not spec.cache.is_rolling
    if not is_repeated or depends_on_length(loaded.model):  # then keys depend on each prompt's length
        return ()
    if readout is not None and readout.pooling != "last":  # states of all tokens are read, also of the first ones
        return ()
    heads = {frame.shared_head for frame in frames if len(frame.shared_head) >= LEAST_PREFIX_TOKENS}
    if heads:
        logger.info("computing the common prefix of all prompts")
    return tuple(compute_prefix(loaded, head, pool) for head in sorted(heads, key=len, reverse=True))


def _open_rolling(spec: JobSpec, loaded: LoadedModel, logger: RankLogger) -> Rolling | None:
    """Make the rolling cache that the job requests, if any; refuse a model that does not support it."""
    rolling = rolling_of(spec.cache.kind, spec.cache.tokens, spec.parallel.chunk_tokens)
    try:
        if rolling is not None:
            prove_rolling(loaded, rolling)
            logger.info(f"prompts use a {rolling.name}; each rank has its own documents")
    except ModelError as error:
        raise ConfigError(f"cache.kind = {spec.cache.kind!r}, cache.tokens = {spec.cache.tokens}: {error}") from error
    return rolling


def _footprint_of(loaded: LoadedModel, max_tokens: int, new_tokens: int, free_bytes: int) -> Footprint:
    """Return the memory model of prompts, after checking whether chunks can reduce it, if a prompt may need them.

    max_tokens, new_tokens : of the longest prompt and its answer.
    free_bytes : bytes for prompts on the rank with the least memory.
    """
    on_gpu = loaded.device.type == "cuda"
    footprint = footprint_of(
        loaded.model.config, loaded.dtype, shape=loaded.shape, on_gpu=on_gpu, in_parts=loaded.attends_in_parts
    )
    if not footprint.takes_chunks:
        return footprint
    whole = replace(footprint, takes_chunks=False)
    if max_tokens <= MOST_COUNTED:
        alone = Relay(Partition((0, max_tokens)), 0)  # no rank of a chain needs twice as much
        if 2 * footprint.slice_bytes(alone, reserve_tokens=new_tokens) <= free_bytes:
            return whole
    try:
        check_chunks(loaded)
    except ModelError:
        return whole
    return footprint


def _make_pool(loaded: LoadedModel, longest: int, footprint: Footprint | None, free_bytes: int) -> Pool:
    """Make a paged pool of this rank's documents, with all memory that a prefill leaves.

    longest : tokens of the longest prompt and its answer; many short prompts in one row may need more.
    """
    each = loaded.shape.kv_bytes_per_token
    room = free_bytes
    if footprint is not None:
        packed = PACK_TOKENS[loaded.device.type]
        tokens = max(1, min(longest, MOST_COUNTED, free_bytes // each))
        kept = tokens if footprint.keeps_kv else 0
        rest = footprint.slice_bytes(Relay(Partition((0, tokens)), 0)) - kept * each
        room -= max(rest, footprint.activation_bytes(max(tokens, packed)))
        if room < (pages_for(kept or packed) + 1) * PAGE_ROWS * each:
            room = int(POOL_SHARE * free_bytes)
    pages = room // (each * PAGE_ROWS)
    return Pool(loaded.shape.layers, loaded.dtype, loaded.device, max(1, pages) * PAGE_ROWS)


def _room(spec: JobSpec, loaded: LoadedModel, ranks: JobRanks, sharing: HeadSharing | str | None) -> list[int]:
    """Bytes for prompts on each group's rank with the least memory: most of what is free, minus copies of weights."""
    if spec.parallel.memory_gib is not None:
        return [int(spec.parallel.memory_gib * GIB)] * ranks.lane.size
    sharers = ranks_on_device(ranks.world, loaded.device)
    part = 0 if isinstance(sharing, str | None) else sharing.extra_bytes(loaded)
    mine = max(0, int(MEMORY_SHARE[loaded.device.type] * free_bytes(loaded.device, sharers)) - part)
    return least_of_each(share_json(ranks.world, gather_json(ranks.world, mine)), ranks.lane.size)


def try_rows(spec: JobSpec, loaded: LoadedModel, logger: RankLogger) -> tuple[str | None, bool]:
    """Try two documents in one row; return why they cannot run in one, and whether they are decoded from pages.

    If pages work, separate memory is not tried. Without pages, each document is read from its own memory, which is as
    fast on CPUs. Sharded documents are decoded by all ranks, without pages.
    """
    why_no_pages = None
    if loaded.device.type == "cuda" and not spec.is_sharded and not spec.cache.is_rolling:
        trial = Pool(loaded.shape.layers, loaded.dtype, loaded.device, 2 * PAGE_ROWS)
        if (why_no_pages := why_not_packed(loaded, trial)) is None:
            return None, True
    why_alone = why_not_packed(loaded)
    if why_alone is None and why_no_pages is not None:
        logger.info(
            f"documents decoded together use separate memory and a separate attention call each: {why_no_pages}"
        )
    return why_alone, False


def describe_portable(loaded: LoadedModel) -> Iterator[str]:
    """Explain why soft-capped attention uses portable float32 code instead of FlexAttention."""
    config, device = loaded.model.config.get_text_config(), loaded.device
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is None or device.type != "cuda" or loaded.dtype == torch.float32:
        return
    layer = next(layer for layer in loaded.shape.layers if layer.elements)
    dims = layer.key_dim, layer.value_dim
    if not compiles(device):
        why: str | None = "torch has no compiler for this GPU (triton), or it is older than Ampere"
    else:  # cached by the self-check
        why = why_no_flex(device, loaded.dtype, config.num_attention_heads, layer.num_kv_heads, dims, softcap)
    if why is not None:
        yield f"soft-capped attention is computed in blocks, in float32, which is slower than FlexAttention: {why}"
