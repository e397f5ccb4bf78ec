"""A rolling cache over the ranks of a chain: what goes from each to the next, and when.

A prompt goes through a chain in steps. In each step every rank has a *stretch* of a few tokens that goes on where the
stretch of the rank before ends; in the next step the first rank goes on where the last one ended. Within a step ranks
compute side by side, layer by layer, as in KV-Runahead (Cho et al. 2024, section 4.1): a layer waits for that layer's
keys and values of the stretches before it, and of these a rank is handed what its tokens still see and it has not had.

A rank so holds the last tokens and a stretch, whatever the prompt's length, and nothing is computed twice. With one
slice for each rank it could not: all of a slice goes through a layer before the next layer (then its states grow with
the prompt), or a few tokens go through all layers before the next ones (then a rank waits until the rank before it has
computed its whole slice, whose last tokens it sees).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import torch

from kvr_mpi.kv.transfers import PromptTransfers, Range
from kvr_mpi.partition import Partition
from kvr_mpi.transport.forwarder import Transfer

# Pieces of a stretch that travel by themselves: its last tokens, and those of the prompt's sinks that are in it.
PIECES = 2
# Waits that are told apart, before they are added up: on a GPU that waits for all that it was told.
WAITS_KEPT = 1000


class RollingRows(Protocol):
    """A layer's keys and values of the last tokens, as the relay sees them."""

    layer_idx: int
    sinks: int  # first tokens of the prompt that are held all the time

    def first_seen(self, position: int) -> int:
        """Position of the first token after the sinks that a token at a position sees, or one after it."""

    def begin_stretch(self, start: int) -> None:
        """Drop what no token from `start` on sees, and leave room for what is missing before it."""

    def held_rows(self, first: int, last: int) -> torch.Tensor:
        """Memory of tokens that are held, or for which there is room (tokens, elements)."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """A prompt cut into steps, and each step over the ranks of a chain.

    partition : how many tokens of the whole prompt each rank has; where they are, the stretches say.
    step_tokens : of the longest stretch. All but the last ones of each rank have one length.
    """

    partition: Partition
    step_tokens: int

    @property
    def steps(self) -> int:
        """Number of steps."""
        return -(-max(self.partition.lengths) // self.step_tokens)

    def bounds(self, step: int, place: int) -> Range:
        """Tokens of one stretch; it may be empty, but not in the last step."""
        edges = self._edges(step)
        return edges[place], edges[place + 1]

    def following(self, step: int, place: int) -> tuple[int, int] | None:
        """Step and place of the stretch after this one; None after the prompt's last."""
        if place + 1 < self.partition.size:
            return step, place + 1
        return (step + 1, 0) if step + 1 < self.steps else None

    def handed(self, step: int, place: int, layer: RollingRows) -> list[tuple[int, Range]]:
        """Say what a rank is handed of a layer in a step, piece by piece: its number and its tokens, the nearest first.

        That is what its stretch sees of the tokens since its last one, of which all before is held. Of a piece the rank
        before has at least as much at its beginning, and as much at its end.
        """
        edges, held = self._edges(step), 0
        before = [(each, edges[each], edges[each + 1]) for each in reversed(range(place))]
        if step:
            last = self._edges(step - 1)
            held = last[place + 1]
            before += [(each, last[each], last[each + 1]) for each in reversed(range(place + 1, self.partition.size))]
        start = edges[place]
        wanted = (max(held, layer.first_seen(start)), start), (held, min(layer.sinks, start))
        return [
            (PIECES * each + kind, (max(first, low), min(last, high)))
            for each, first, last in before
            for kind, (low, high) in enumerate(wanted)
            if max(first, low) < min(last, high)
        ]

    def _edges(self, step: int) -> list[int]:
        """Where the stretches of a step begin, and where the last one ends."""
        before, after = ([self._done(length, each) for length in self.partition.lengths] for each in (step, step + 1))
        return list(
            itertools.accumulate((end - start for start, end in zip(before, after, strict=True)), initial=sum(before))
        )

    def _done(self, length: int, step: int) -> int:
        """Tokens that a rank which has so many computes before a step; one at least is left for the last step."""
        if step == self.steps:
            return length
        each = -(-self.step_tokens * length // max(self.partition.lengths))
        return min(step * each, length - 1)


class RollingRelay:
    """The way of one prompt's rolling caches over one rank.

    Parameters
    ----------
    stretches : Stretches
    place : int
        Of this rank's stretch in each step.
    transfers : PromptTransfers
        For `PIECES` segments of each rank. A number is used again in each step: messages with one tag keep their order.

    Attributes
    ----------
    step : int
        That is being computed; -1 before the first.
    """

    def __init__(self, stretches: Stretches, place: int, transfers: PromptTransfers) -> None:
        self.stretches, self.place, self.transfers, self.step = stretches, place, transfers, -1
        self._posted: dict[int, int] = {}  # by layer, the step
        self._shared: dict[int, int] = {}
        self._arriving: dict[int, list[Transfer]] = defaultdict(list)
        self._under_way: dict[int, list[Transfer]] = defaultdict(list)

    @property
    def layers_ahead(self) -> int:
        """Layers whose receives are posted before they compute."""
        return self.transfers.forwarder.transport.layers_ahead

    @property
    def bounds(self) -> Range:
        """Tokens of this rank's stretch of the step."""
        return self.stretches.bounds(self.step, self.place)

    def begin_step(self, step: int) -> None:
        """Begin a step; once more: nothing."""
        if step != self.step:
            self.step = step
            if len(self.transfers.waits) > WAITS_KEPT:
                self.transfers.waits.add_up()

    def post(self, layer: RollingRows) -> None:
        """Make room in a layer for a step, and post its receives; once more in the same step: nothing."""
        idx, prompt = layer.layer_idx, self.transfers
        if self._posted.get(idx) == self.step:
            return
        self.wait_through(idx)
        self._arriving.pop(idx, None)  # nobody had to wait for it, where the model was left before
        layer.begin_stretch(self.bounds[0])
        self._posted[idx] = self.step
        onward, dest, source = dict(self._onward(layer)), prompt.rank_of(self.place + 1), prompt.rank_of(self.place - 1)
        for piece in onward:
            if self._is_own(piece):
                prompt.forwarder.announce(dest, prompt.tag(idx, piece))
        for piece, (first, last) in self.stretches.handed(self.step, self.place, layer):
            rows, further = layer.held_rows(first, last), onward.get(piece)
            forward_to, skipped = (None, 0) if further is None else (dest, further[0] - first)
            transfer = prompt.forwarder.receive(rows, source, prompt.tag(idx, piece), forward_to, skipped, layer=idx)
            prompt.sent_bytes += 0 if further is None else rows[skipped:].nbytes
            self._arriving[idx].append(transfer)
            self._under_way[idx].append(transfer)

    def share(self, layer: RollingRows) -> None:
        """Send what the next rank's stretch sees of this rank's own; once more in the same step: nothing."""
        idx, prompt = layer.layer_idx, self.transfers
        if self._shared.get(idx) == self.step:
            return
        self._shared[idx] = self.step
        for piece, (first, last) in self._onward(layer):
            if self._is_own(piece):
                rows, dest = layer.held_rows(first, last), prompt.rank_of(self.place + 1)
                self._under_way[idx].append(prompt.forwarder.send(rows, dest, prompt.tag(idx, piece), layer=idx))
                prompt.sent_bytes += rows.nbytes

    def collect(self, layer_idx: int) -> None:
        """Return when all that a layer is handed in this step is here; the time is counted."""
        for transfer in self._arriving.pop(layer_idx, ()):
            with self.transfers.waiting("receive", layer_idx, transfer.peer):
                self.transfers.forwarder.wait(transfer)

    def wait_through(self, layer_idx: int) -> None:
        """Return when a layer's memory is free of transfers; the time is counted."""
        for transfer in self._under_way.pop(layer_idx, ()):
            with self.transfers.waiting("send", layer_idx, transfer.peer):
                self.transfers.forwarder.wait_through(transfer)

    def _onward(self, layer: RollingRows) -> list[tuple[int, Range]]:
        """Say what the rank after this one is handed, for the stretch after this rank's."""
        following = self.stretches.following(self.step, self.place)
        return [] if following is None else self.stretches.handed(*following, layer)

    def _is_own(self, piece: int) -> bool:
        return piece // PIECES == self.place
