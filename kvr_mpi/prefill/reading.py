"""What is read of a prompt instead of the logits after its last token: a pooled state, or log-probabilities of tokens.

Every rank reads its own slice, and sends a few numbers to the rank with the last slice with its status (``failure``).
The state of a token predicts the token after it. So a rank also scores the first token of the next slice, whose id it
knows, and no rank needs another one's states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvr_mpi.model import LoadedModel
from kvr_mpi.model.final_states import logits_of

Pooling = Literal["last", "mean"]
# Logits that are computed at a time, by device type.
LOGITS = {"cpu": 1 << 24, "cuda": 1 << 26}
# Copies of them, in float32, that exist at the same time: in the model's dtype, in float32, and their exponentials.
COPIES = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read of one prompt.

    pooling : last: the final hidden state of the last token; mean: the mean over all tokens; None: log-probabilities.
    scored : bounds of the tokens whose log-probabilities are read. The first token of a prompt has none.
    logits_bytes : memory for the logits of some tokens; None: as much as they take at most.
    """

    pooling: Pooling | None
    scored: tuple[int, int] = (0, 0)
    logits_bytes: int | None = None

    @property
    def reads_all(self) -> bool:
        """Whether the final hidden states of all tokens are needed, on every rank."""
        return self.pooling != "last"

    def targets(self, start: int, stop: int) -> tuple[int, int]:
        """Bounds of the tokens that the states of tokens `start` to `stop` predict, and that are scored."""
        first = max(self.scored[0], start + 1)
        return first, max(first, min(self.scored[1], stop + 1))

    def size(self, hidden_size: int, start: int, stop: int, tokens: int) -> int:
        """Count the values that the slice from `start` to `stop` of a prompt of `tokens` contributes."""
        if self.pooling is None:
            first, last = self.targets(start, stop)
            return last - first
        return hidden_size if self.pooling == "mean" or stop == tokens else 0

    def read(self, loaded: LoadedModel, ids: Sequence[int], start: int, states: torch.Tensor) -> torch.Tensor:
        """Read the final hidden states (tokens, hidden) of a prompt's tokens from `start` on; float64 (values,)."""
        if self.pooling == "last":
            has_last = start + len(states) == len(ids)
            return states[-1].double() if has_last else states.new_empty(0, dtype=torch.float64)
        if self.pooling == "mean":
            return states.sum(0, dtype=torch.float64)
        first, last = self.targets(start, start + len(states))
        room = self.most_logits_bytes(loaded) if self.logits_bytes is None else self.logits_bytes
        step = max(1, room // (4 * COPIES * int(loaded.config.get_text_config().vocab_size)))
        found = [states.new_empty(0, dtype=torch.float64)]
        for at in range(first, last, step):
            stop = min(last, at + step)
            logits = logits_of(loaded.model, states[at - 1 - start : stop - 1 - start])
            wanted = torch.tensor(ids[at:stop], device=states.device).unsqueeze(1)
            found.append((logits.gather(1, wanted)[:, 0] - logits.logsumexp(-1)).double())
        return torch.cat(found)

    def join(self, parts: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
        """Combine what the slices of a prompt contributed, in order; float64 on the CPU."""
        parts = [part.cpu() for part in parts]
        if self.pooling == "mean":
            return torch.stack(parts).sum(0) / tokens
        return torch.cat(parts)

    @staticmethod
    def most_logits_bytes(loaded: LoadedModel) -> int:
        """Bytes that the logits of some tokens take on a rank while it scores, if it has them."""
        return 4 * COPIES * max(LOGITS[loaded.device.type], int(loaded.config.get_text_config().vocab_size))
