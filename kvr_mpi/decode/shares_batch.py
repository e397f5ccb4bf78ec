"""Decode prompts whose keys and values stay spread over the ranks of a chain: all ranks step together.

Every rank runs the model on the last tokens, attends to its shares (``kv.shares``), and ends with the same logits. The
rank that has a prompt's last share chooses its token, and tells it to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from transformers import GenerationConfig

from kvr_mpi.decode.batch import MAX_SEQUENCES, Finished
from kvr_mpi.decode.sampling import DecodeSequence, SamplingParams
from kvr_mpi.documents.document import AS_THE_JOB, OwnGeneration
from kvr_mpi.errors import ConfigError
from kvr_mpi.kv.document_share import DocumentShare
from kvr_mpi.kv.shares import Share, SharesCache
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.rope import begins_anew_at
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.self_check import why_not_spread
from kvr_mpi.prefill.stored_shares import run_shares
from kvr_mpi.transport import Transport
from kvr_mpi.transport.collectives import all_gather

K = TypeVar("K")
_Running = tuple[K, Prefill, Share, DecodeSequence]
# Instead of a token, by a rank that does not choose it.
NOT_MINE = -1


def check_shareable(loaded: LoadedModel) -> None:
    """Refuse models whose keys and values cannot stay spread over ranks; it is tried on a few tokens.

    Raises
    ------
    ConfigError
        Saying why.
    """
    why: str | None = "its rotary embedding has it compute the whole cache anew at some length"
    if begins_anew_at(loaded.model) is None:
        why = why_not_spread(loaded)
    if why is not None:
        raise ConfigError(
            f"keys and values of {loaded.shape.architecture} cannot be spread over ranks: {why}. Leave output.kv = "
            f"'sharded' and questions.sharded out"
        )


class SharesBatch(Generic[K]):
    """Prompts that are being answered by a chain; every rank of it makes the same calls in the same order.

    Parameters
    ----------
    loaded : LoadedModel
    config : GenerationConfig
    stop : sequence of str
        Stop strings.
    max_new_tokens : int
    chain : Transport
        The ranks that have the shares.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: GenerationConfig,
        *,
        stop: Sequence[str],
        max_new_tokens: int,
        chain: Transport,
    ) -> None:
        self._loaded, self._chain = loaded, chain
        self._rules = SamplingParams(loaded.model, loaded.tokenizer, config, stop=stop, max_new_tokens=max_new_tokens)
        self._running: list[_Running[K]] = []
        self._rows = MAX_SEQUENCES  # of one step
        self._finished: list[Finished[K]] = []

    @property
    def running(self) -> int:
        """Prompts that `step` has not handed out yet."""
        return len(self._running) + len(self._finished)

    @property
    def keys(self) -> list[K]:
        """Keys of the prompts that `step` has not handed out yet."""
        return [key for key, *_ in self._running] + [one.key for one in self._finished]

    def held_bytes(self, document: DocumentShare | None = None) -> int:
        """Memory that this rank's shares take, with a document that is held besides; each document counts once."""
        shares = [share for _, _, share, _ in self._running]
        shares += [one.prefill.share for one in self._finished if one.prefill.share is not None]
        documents = {share.document for share in shares} | {document}
        return sum(share.bytes for share in shares) + sum(one.bytes for one in documents if one is not None)

    @torch.inference_mode()
    def add(
        self, key: K, prefill: Prefill, prompt_ids: Sequence[int], seed: int, own: OwnGeneration = AS_THE_JOB
    ) -> None:
        """Take in a prompt after its prefill; its first token is chosen by the rank that has the logits.

        Parameters are those of `DecodeBatch.add`; every prefill has a share.
        """
        assert prefill.share is not None, "it stays spread"
        device = self._loaded.device
        own = replace(own, seed=None)
        rules = self._rules if own == AS_THE_JOB else self._rules.adapted(own)
        writing = DecodeSequence(rules, prompt_ids, seed, device)
        if device.type == "cpu":
            prefill.share.lay_by_heads()
        self._running.append((key, prefill, prefill.share, writing))
        if writing.finish_reason is None:
            mine = torch.tensor([NOT_MINE], device=device)
            if prefill.logits is not None:
                mine = writing.choose(prefill.logits).view(1)
            writing.write(self._agree(mine)[0])
        self._let_go()

    @torch.inference_mode()
    def step(self) -> list[Finished[K]]:
        """Write one token of every prompt, and hand out those that are answered: the same on every rank."""
        running = list(self._running)
        for start in range(0, len(running), rows := self._rows):
            self._step(running[start : start + rows])
        self._let_go()
        finished, self._finished = self._finished, []
        return finished

    def _step(self, group: list[_Running[K]]) -> None:
        """Write one token of each of a group; if a rank has no memory for that, in halves, from now on."""
        shares, sequences = [share for _, _, share, _ in group], [one for *_, one in group]
        cache = SharesCache(self._loaded, shares, [1] * len(shares), self._chain)
        device = self._loaded.device
        last = torch.tensor([[one.token_ids[-1] for one in sequences]], device=device)
        logits, short = run_shares(self._loaded, last, cache, torch.arange(len(shares), device=device))
        if logits is not None:
            cache.lengthen()
            nobody = torch.tensor(NOT_MINE, device=device)
            chosen = [
                one.choose(row) if share.is_last else nobody
                for share, one, row in zip(shares, sequences, logits, strict=True)
            ]
            for one, token in zip(sequences, self._agree(torch.stack(chosen)), strict=True):
                one.write(token)
        elif len(group) > 1:
            half = self._rows = -(-len(group) // 2)
            self._step(group[:half])  # which may halve `_rows` again
            self._step(group[half:])
        else:
            self._running.remove(group[0])
            key, prefill, *_ = group[0]
            error = f"not enough memory for its next token, even with no other document: {short}"
            self._finished.append(Finished(key, replace(prefill, share=None), None, error))

    def _agree(self, mine: torch.Tensor) -> list[int]:
        """Put together the tokens (prompts,) that each rank has chosen."""
        found: list[int] = torch.stack(all_gather(self._chain, mine)).amax(0).tolist()
        return found

    def _let_go(self) -> None:
        """Take out what is answered."""
        for one in [one for one in self._running if one[3].finish_reason is not None]:
            self._running.remove(one)
            key, prefill, _, writing = one
            self._finished.append(Finished(key, prefill, writing.answer()))
