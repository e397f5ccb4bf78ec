"""One prompt's way over one rank: its neighbours, its messages' tags, and each layer's segments under way.

Stands between the strategies (``exchange``), which say what goes where, and the `Courier`, which carries it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from kvr_mpi.transport.courier import Courier, Parcel

Range = tuple[int, int]


class Passage:
    """What all layers of a prompt share on a rank that is one of several, and what the transfers took.

    Parameters
    ----------
    courier : Courier
        To the other ranks of the chain.
    segments : int
        Number of segments the prompt is cut into, over all ranks.
    layers : int
    rotation : int
        The rank of the chain that has the first slice; the others follow.
    """

    def __init__(self, courier: Courier, segments: int, layers: int, rotation: int) -> None:
        self.courier, self.segments, self.layers, self.rotation = courier, segments, layers, rotation
        self.wait_s = 0.0  # for other ranks' keys and values
        self.stalled_s = 0.0  # for the link to take what is sent
        self.sent_bytes = 0  # what is passed on included
        self._tags = 0

    def begin(self) -> None:
        """Begin, when no more than one earlier prompt is under way on this rank."""
        began = time.perf_counter()
        self._tags = self.courier.begin() * (self.layers + 1) * self.segments
        self.stalled_s += time.perf_counter() - began

    def rank_of(self, place: int) -> int:
        """Tell which rank of the chain has the slice at this place."""
        return (place + self.rotation) % self.courier.transport.size

    def tag(self, layer_idx: int, segment: int) -> int:
        """Tell a segment's messages from all others of this prompt and of its neighbours."""
        return self._tags + layer_idx * self.segments + segment


class LayerSegments:
    """One layer's segments on their way to, over and from this rank; ranks are named by the place of their slice.

    Asking twice for the same is asking once, so that a post that was broken off can be repeated.
    """

    def __init__(self, passage: Passage, layer_idx: int) -> None:
        self.passage, self.layer_idx = passage, layer_idx
        self.buffer: torch.Tensor | None = None  # (tokens, elements)
        self._scratch: torch.Tensor | None = None
        self._elements = 0
        self._arriving: dict[int, tuple[Parcel, Range]] = {}  # by segment, in the order they were posted
        self._parcels: list[Parcel] = []
        self._asked: set[tuple[str, int, int]] = set()

    def announce(self, dest: int, segment: int, bounds: Range) -> None:
        """Say that a segment will be sent, in the order in which `dest` receives from here."""
        if self._is_new("announce", dest, segment):
            self.passage.courier.announce(self.passage.rank_of(dest), self.passage.tag(self.layer_idx, segment))
            self._asked.add(("announce", dest, segment))
        if self._scratch is not None:  # there is nothing to compute first
            self.send(bounds, dest, segment)

    def send(self, bounds: Range, dest: int, segment: int) -> None:
        """Send a segment."""
        if not self._is_new("send", dest, segment):
            return
        passage, rows = self.passage, self._rows(bounds)
        parcel = passage.courier.send(rows, passage.rank_of(dest), passage.tag(self.layer_idx, segment))
        self._asked.add(("send", dest, segment))
        passage.sent_bytes += rows.nbytes
        self._watch(parcel)

    def receive(self, bounds: Range, source: int, segment: int, forward_to: int | None = None) -> None:
        """Post the receive of a segment, to be passed on or not."""
        if not self._is_new("receive", source, segment):
            return
        passage, rows = self.passage, self._rows(bounds)
        onward = None if forward_to is None else passage.rank_of(forward_to)
        tag = passage.tag(self.layer_idx, segment)
        parcel = passage.courier.receive(rows, passage.rank_of(source), tag, onward)
        self._asked.add(("receive", source, segment))
        passage.sent_bytes += 0 if onward is None else rows.nbytes
        self._arriving[segment] = parcel, bounds
        self._watch(parcel)

    def wait_for(self, segment: int) -> None:
        """Return when a segment is here; the time is counted."""
        began = time.perf_counter()
        self.passage.courier.wait(self._arriving.pop(segment)[0])
        self.passage.wait_s += time.perf_counter() - began

    def collect(self) -> None:
        """Return when all segments are here."""
        for segment in list(self._arriving):
            self.wait_for(segment)

    def arrivals(self) -> Iterator[Range]:
        """Yield the ranges of the segments to come, each when it is here, in the order their receives were posted.

        A fixed order, whatever comes first: sums in another order differ in their last bits, and the same job is to
        give the same answers every time.
        """
        for segment, (_, bounds) in list(self._arriving.items()):
            self.wait_for(segment)
            yield bounds

    def are_through(self) -> bool:
        """Say whether all of them are here and gone on, and help them along."""
        return all(self.passage.courier.is_through(parcel) for parcel in self._parcels)

    def wait_through(self) -> None:
        """Return when all of them are here and gone on; the time is counted."""
        began = time.perf_counter()
        for parcel in self._parcels:
            self.passage.courier.wait_through(parcel)
        self.passage.stalled_s += time.perf_counter() - began

    def do_without(self, scratch: torch.Tensor, elements: int) -> None:
        """Have memory for one segment only: each transfer is over before the next begins, and none has a meaning.

        Parameters
        ----------
        scratch : Tensor
            Flat.
        elements : int
            Of K and V of all heads, of a token.
        """
        self._scratch, self._elements = scratch, elements

    def _is_new(self, what: str, peer: int, segment: int) -> bool:
        return (what, peer, segment) not in self._asked

    def _rows(self, bounds: Range) -> torch.Tensor:
        if self._scratch is not None:
            return self._scratch[: (bounds[1] - bounds[0]) * self._elements]
        assert self.buffer is not None
        return self.buffer[bounds[0] : bounds[1]]

    def _watch(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        if self._scratch is not None:
            self.passage.courier.wait_through(parcel)
