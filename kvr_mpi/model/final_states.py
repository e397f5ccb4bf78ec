"""The two halves of a language model's forward pass: its final hidden states, and the logits of some of them.

The final hidden states are those after the last norm, as in transformers' ``last_hidden_state``. Reading them leaves
the model before its head, so no logits are computed; the head then runs on as many tokens at a time as memory allows.
Both halves are the model's own code, including whatever it does to states or logits (scaling, soft-capping): only the
``forward`` of the model without its head is replaced, as ``layer_chunks`` replaces those of layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from kvr_mpi.errors import ModelError

# What this thread does with the final hidden states: None: nothing; "read": leave the model with them; a tensor
# (1, tokens, hidden): take these instead of computing any.
STATES: ContextVar[torch.Tensor | str | None] = ContextVar("kvr_states", default=None)
READ = "read"


class _StatesError(Exception):
    """Raised to leave a model with its final hidden states (1, tokens, hidden)."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states


class _Output:
    """The output of a model without its head: its final hidden states, and None for all else."""

    def __init__(self, states: torch.Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, number: int) -> torch.Tensor:
        return (self.last_hidden_state,)[number]


class _BodyForward:
    """The ``forward`` of a model without its head."""

    def __init__(self, body: torch.nn.Module) -> None:
        self._body = body

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wanted = STATES.get()
        if isinstance(wanted, torch.Tensor):
            return _Output(wanted)
        out = type(self._body).forward(self._body, *args, **kwargs)
        if wanted == READ:
            raise _StatesError(out[0])
        return out


def final_states(model: Any, run: Callable[[], object]) -> torch.Tensor:
    """Call a function that runs the model on one row; return the row's final hidden states (tokens, hidden).

    Raises `ModelError` if the model has no part without its head.
    """
    _prepare(model)
    token = STATES.set(READ)
    try:
        run()
    except _StatesError as read:
        return read.states[0]
    finally:
        STATES.reset(token)
    raise ModelError(f"{type(model).__name__} has no final hidden states that can be read")


def logits_of(model: Any, states: torch.Tensor) -> torch.Tensor:
    """Compute the logits (tokens, vocab_size), float32, of final hidden states (tokens, hidden) of `final_states`."""
    tokens, options = len(states), dict[str, Any]()
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 0  # of all tokens
    token = STATES.set(states.unsqueeze(0))
    try:
        ids = torch.zeros(1, tokens, dtype=torch.long, device=states.device)
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, **options).logits[0]
    finally:
        STATES.reset(token)
    return logits.float()


def _prepare(model: Any) -> None:
    """Replace the ``forward`` of the model without its head; idempotent."""
    for body in (model.base_model, model.get_decoder()):  # some models call one of them, some the other
        if body is not model and not isinstance(vars(body).get("forward"), _BodyForward):
            body.forward = _BodyForward(body)
