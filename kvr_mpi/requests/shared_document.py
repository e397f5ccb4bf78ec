"""What several prompts about one document begin with: prefilled once, and kept on the rank that decodes them.

The document's text and the words before it are run over the chain like any prompt. The rank with the last slice then
has all of their keys and values; every prompt's own buffers are filled from there, and only what follows the text is
computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvr_mpi.documents.prompts import Frame
from kvr_mpi.job import JobSpec
from kvr_mpi.job.combinations import PROMPTS, why_no_effect
from kvr_mpi.job.model_kinds import kinds_of
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.model import LoadedModel
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, prefix_of_cache


@dataclass(slots=True)
class SharedDocument:
    """What prompts of a document begin with, on one rank of its chain; every rank knows whose turn it is.

    ids : of the words before the text, and of the text.
    decode_rank : the rank that has their keys and values.
    prefill : how they were prefilled, on that rank.
    """

    ids: tuple[int, ...]
    decode_rank: int
    prefill: Prefill | None = None
    _prefix: SharedPrefix | None = None
    _is_charged: bool = False

    @property
    def tokens(self) -> int:
        """How many tokens they are."""
        return len(self.ids)

    @property
    def prefix(self) -> SharedPrefix:
        """What the prompts go on from, on the decode rank."""
        assert self.prefill is not None, "only the decode rank has it"
        if self._prefix is None:
            self._prefix = prefix_of_cache(self.ids, self.prefill.cache)
        return self._prefix

    @property
    def error(self) -> str | None:
        """Why there is nothing to go on from; None if there is."""
        return None if self.prefill is None else self.prefill.error

    def failed(self, prompts: Sequence[Sequence[int]]) -> list[Prefill]:
        """Let all prompts fail, for the same reason."""
        assert self.prefill is not None
        return [replace(self.prefill, partition=Partition((0, len(ids))), logits=None) for ids in prompts]

    def charge(self, prefills: Sequence[Prefill]) -> None:
        """Count what was done for all prompts in the first of them: its time, its slices, its tokens."""
        shared = self.prefill
        if shared is None or self._is_charged or not prefills:
            return
        first, self._is_charged = prefills[0], True
        first.seconds += shared.seconds
        first.wait_s += shared.wait_s
        first.send_wait_s += shared.send_wait_s
        first.known_tokens = shared.known_tokens
        first.strategy = shared.strategy
        first.partition = Partition((*shared.partition.bounds[:-1], first.partition.tokens))


def describe_sharing(spec: JobSpec, loaded: LoadedModel, frames: Mapping[str, Frame]) -> list[str]:
    """Say in lines how often a document is prefilled for its prompts, where that is more than once."""
    if why := why_no_effect(PROMPTS, spec, kinds_of(loaded)):
        return [f"each document is prefilled {len(frames)} times, once per prompt: {why}"]
    groups: dict[object, list[str]] = {}
    for name, frame in frames.items():
        groups.setdefault((frame.head, frame.head_gaps), []).append(name)
    if len(groups) == 1:
        return []
    told = "; ".join(", ".join(names) for names in groups.values())
    return [
        f"each document is prefilled {len(groups)} times, for the prompts {told}: they differ before {{text}}, so "
        f"nothing after that can be shared. Move what differs behind {{text}}"
    ]
