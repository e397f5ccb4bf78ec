"""Decode one document on the rank that holds its cache.

Which token is next is transformers' business: a `GenerationConfig` and the logits processors it makes. Stands
between the prefill and the outputs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, StopStringCriteria

from kvr_mpi.errors import ConfigError
from kvr_mpi.prefill.seam import run_model
from kvr_mpi.prefill.strategies import Prefill


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote."""

    token_ids: tuple[int, ...]  # without the end-of-text token
    text: str
    finish_reason: str  # "stop": end-of-text or a stop string; "length": max_new_tokens
    seconds: float  # from the first logits to the last token


def make_generation_config(model: Any, settings: dict[str, Any]) -> GenerationConfig:
    """Lay a job's settings over the model's own generation defaults.

    Raises
    ------
    ConfigError
        If transformers refuses a value.
    """
    try:
        config = GenerationConfig.from_dict({**model.generation_config.to_dict(), **settings})
        config.validate(user_set_attributes=set(settings))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"[generation]: transformers refuses {settings}: {error}") from error
    return config


@torch.inference_mode()
def generate(
    model: Any,
    tokenizer: Any,
    prefill: Prefill,
    prompt_ids: Sequence[int],
    config: GenerationConfig,
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    seed: int = 0,
) -> Answer:
    """Decode until the model ends, a stop string appears, or `max_new_tokens` are written.

    Parameters
    ----------
    prefill : Prefill
        Of the last rank: with logits and the whole cache.
    prompt_ids : sequence of int
        For the processors that look back (repetition penalties).
    stop : sequence of str
        Stop strings; the answer ends before the first one.
    seed : int
        For sampling: the same seed, prompt and settings give the same answer.
    """
    began = time.perf_counter()
    logits = prefill.logits
    assert logits is not None, "only the last rank of a chain can decode"
    device = logits.device
    ids = torch.tensor([prompt_ids], device=device)
    ends = {config.eos_token_id} if isinstance(config.eos_token_id, int) else set(config.eos_token_id or ())
    # Private, but what generate() itself does; it makes every processor that a configuration can ask for.
    config._eos_token_tensor = torch.tensor(sorted(ends), device=device) if ends else None
    processors = model._get_logits_processor(config, input_ids_seq_length=len(prompt_ids), device=device)
    stop_strings = StopStringCriteria(tokenizer, list(stop)) if stop else None
    generator = torch.Generator(device=device).manual_seed(seed)
    written: list[int] = []
    finish_reason = "length"
    while len(written) < max_new_tokens:
        scores = processors(ids, logits.unsqueeze(0))
        if config.do_sample:
            token = int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=generator))
        else:
            token = int(scores.argmax())
        if token in ends:
            finish_reason = "stop"
            break
        written.append(token)
        ids = torch.cat([ids, ids.new_tensor([[token]])], dim=1)
        if stop_strings is not None and bool(stop_strings(ids[:, len(prompt_ids) :], None)[0]):
            finish_reason = "stop"
            break
        if len(written) < max_new_tokens:
            logits = run_model(model, ids[:, -1:], prefill.cache)
    text = tokenizer.decode(written, skip_special_tokens=True)
    cuts = [at for at in (text.find(end) for end in stop) if at >= 0]
    return Answer(
        token_ids=tuple(written),
        text=text[: min(cuts)] if cuts else text,
        finish_reason=finish_reason,
        seconds=time.perf_counter() - began,
    )
