"""Stored documents that a chain holds together: each is read once for all of its questions, and given back after them.

A chain asks one document after the other. The rank that answers is the same for all questions of a document, since its
last share is there. Answers under way keep their document's rows; the chain keeps those of the document it is at.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvr_mpi.documents.prompts import Prompt
from kvr_mpi.errors import DocumentError
from kvr_mpi.kv.document_share import DocumentShare, ShareBounds
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.prefill.memory_budget import GIB
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.packed import PACK_TOKENS
from kvr_mpi.prefill.registry import KVR
from kvr_mpi.prefill.stored_shares import prefill_stored, share_out_stored
from kvr_mpi.runtime.planned_prompt import PlannedPrompt
from kvr_mpi.setup.job_setup import JobSetup
from kvr_mpi.topology import Rotation
from kvr_mpi.transport import Transport


class SpreadDocuments:
    """The stored documents of one rank of a chain, where keys and values stay spread over it; the same on every rank.

    Parameters
    ----------
    setup : JobSetup
    chain : Transport

    Attributes
    ----------
    held : DocumentShare or None
        This rank's rows of the document that the chain is at.
    """

    def __init__(self, setup: JobSetup, chain: Transport) -> None:
        self._setup, self._chain = setup, chain
        self._is_used = setup.spec.questions is not None and setup.spec.is_spread
        self._decode_rank = 0  # of the questions about the document
        self._waiting_tokens = 0  # of questions that are planned, and not run yet
        self.held: DocumentShare | None = None

    def is_about(self, prefix: SharedPrefix | None) -> bool:
        """Whether what a prompt begins with is loaded in shares, a rank's by that rank."""
        return self._is_used and prefix is not None and prefix.read is not None

    def holds(self, prefix: SharedPrefix | None) -> bool:
        """Whether the chain is at the document that a prompt begins with."""
        return self.held is not None and self.held.prefix.is_same(prefix)

    def is_other(self, prefix: SharedPrefix | None) -> bool:
        """Whether a prompt has the chain leave the document that it is at, or begin one."""
        return not self.holds(prefix) and (self.held is not None or self.is_about(prefix))

    def pinned_rank(self, prefix: SharedPrefix | None) -> int | None:
        """Say which rank answers what is asked about a document; None if any may."""
        return self._decode_rank if self.holds(prefix) else None

    def plan(self, prompt: Prompt, prefix: SharedPrefix, decode_rank: int, new_tokens: int) -> PlannedPrompt:
        """Say how a question is run with this rank of the chain last."""
        partition = share_out_stored(prefix.tokens, prompt.tokens, self._chain.size)
        return PlannedPrompt(prompt, prefix, decode_rank, KVR, partition, new_tokens)

    def begin(self, plan: PlannedPrompt) -> None:
        """Go on to the document of a plan, or to none; the rows of the last one go with its last answer.

        Nothing is read before the first question is run.
        """
        self.held = None
        if plan.prefix is not None and self.is_about(plan.prefix):
            bounds = self._bounds(plan.prefix, plan.decode_rank, self._chain.rank)
            self.held = DocumentShare(self._setup.loaded, plan.prefix, bounds)
            self._decode_rank, self._waiting_tokens = plan.decode_rank, 0

    def start(self, plan: PlannedPrompt) -> None:
        """Take note of a question that is run with the next row."""
        self._waiting_tokens += plan.row_tokens

    def prefill(self, row: Sequence[PlannedPrompt]) -> list[Prefill]:
        """Prefill questions about one document; every rank of the chain gives the same."""
        assert self.held is not None and self.holds(row[0].prefix), "they are run before another document comes"
        self._waiting_tokens = max(0, self._waiting_tokens - sum(planned.row_tokens for planned in row))
        return prefill_stored(
            self._setup.loaded,
            [planned.prompt.ids for planned in row],
            self.held,
            self._chain,
            reserve_tokens=[planned.new_tokens for planned in row],
            last=self._decode_rank,
        )

    def needs(self, plan: PlannedPrompt) -> list[int]:
        """Bytes each rank of the chain takes for a question beyond what is held: rows, what follows, and to run it."""
        assert plan.prefix is not None
        # Of the row it is run in, with those that wait.
        row_tokens = self._waiting_tokens * self.holds(plan.prefix) + plan.row_tokens
        kept = self.kept_bytes(plan.prefix, plan.prompt.tokens + plan.new_tokens, plan.decode_rank)
        return [each + self._activation_bytes(plan, min(PACK_TOKENS, row_tokens)) for each in kept]

    def kept_bytes(self, prefix: SharedPrefix, tokens: int, decode_rank: int) -> list[int]:
        """Bytes each rank keeps of a prompt until it is answered; a document that is held already is counted once.

        Parameters
        ----------
        tokens : int
            Of the prompt with its answer.
        """
        kept = [0] * self._chain.size if self.holds(prefix) else self._rows_bytes(prefix, decode_rank)
        kept[decode_rank] += (tokens - prefix.tokens) * self._setup.loaded.shape.kv_bytes_per_token
        return kept

    def check_fits(self, plan: PlannedPrompt, free_bytes: int) -> None:
        """Refuse a question if some rank of an empty chain has no room for its share of the document.

        Raises
        ------
        DocumentError
            Saying what it takes.
        """
        assert plan.prefix is not None
        rows = self._rows_bytes(plan.prefix, plan.decode_rank)
        rows[plan.decode_rank] += (plan.row_tokens + plan.new_tokens) * self._setup.loaded.shape.kv_bytes_per_token
        needs = max(rows) + self._activation_bytes(plan, 0)
        if needs > free_bytes:
            raise DocumentError(
                f"a stored prompt of {plan.known_tokens} tokens over {self._chain.size} rank(s): each needs "
                f"{needs / GIB:.2f} GiB in addition to the weights, but has {free_bytes / GIB:.2f} GiB; use more ranks"
            )

    def check_shareable(self, prompt: Prompt, prefix: SharedPrefix | None) -> None:
        """Refuse a prompt of which some rank would have nothing.

        Raises
        ------
        DocumentError
            Saying how many tokens it has.
        """
        known, size = 0 if prefix is None else prefix.tokens, self._chain.size
        tokens = known if self.is_about(prefix) else prompt.tokens - known
        if tokens < size:
            raise DocumentError(
                f"too short: {tokens} tokens cannot be spread over {size} ranks, each of which needs at least one; use "
                f"shorter chains (parallel.ranks_per_chain), or output.kv = true"
            )

    def _activation_bytes(self, plan: PlannedPrompt, row_tokens: int) -> int:
        footprint = self._setup.footprint
        assert footprint is not None, "memory is predicted"
        return footprint.activation_bytes(max(plan.row_tokens, row_tokens))

    def _rows_bytes(self, prefix: SharedPrefix, decode_rank: int) -> list[int]:
        """Bytes of each rank's rows of a document."""
        shape = self._setup.loaded.shape
        each = (self._bounds(prefix, decode_rank, rank) for rank in range(self._chain.size))
        return [bounds.elements(shape.layers) * shape.dtype_bytes for bounds in each]

    def _bounds(self, prefix: SharedPrefix, decode_rank: int, rank: int) -> ShareBounds:
        """Say which of a document's tokens a rank holds, if another has the last."""
        size, known = self._chain.size, prefix.tokens
        place = Rotation.bringing(size, size - 1, decode_rank).place_of(rank)
        partition = share_out_stored(known, known, size)
        longest_question = max(len(frame.tail) for frame in self._setup.question_frames.values())
        longest = known + longest_question + self._setup.longest_answer
        return ShareBounds(partition.start(place), partition.stop(place), place == size - 1, longest)
