"""Costs of one layer on one rank: a model's work divided by a machine's rates, or measured.

The event models (``events``) and the cost model compute with these costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field, with_config

from kvr_mpi.costs.solve import Rates
from kvr_mpi.errors import PartitionError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvr_mpi.costs.hardware import Hardware
    from kvr_mpi.costs.workload import Workload

    Array = npt.NDArray[np.float64]

# Limits for values read from files.
RateS = Annotated[float, Field(ge=0, lt=1e7)]


@with_config(ConfigDict(extra="ignore", strict=True, allow_inf_nan=False))
@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one layer on one rank, in seconds; lookup tables store them.

    layers : of the model.
    qkv_token_s, rest_token_s : time of a token before and after attention.
    pair_s : time for one query to attend to one key, all heads.
    layer_s : overhead per layer with more than one rank.
    launch_floor_s : minimum time of a layer, to launch its kernels.
    kv_bytes : keys and values of a token in a layer.
    link_bytes_per_s, link_latency_s : of the link between neighbors, one direction.
    copy_token_s : time to copy a received token of the prefix, however many queries attend to it.
    head_s : time of the LM head for one token.
    kept_token_s : time to attend to one key in decoding, which is memory-bound. None: unknown, `pair_s` is used.
    weights_s : time to read all weights in decoding. 0: included in `launch_floor_s` and `head_s` as measured.
    speeds : of each rank, relative to nominal speed 1; None: all ranks have nominal speed.
    has_states : a rank begins a layer only after the previous rank has ended it (recurrent layers, slices in chunks).
    """

    layers: Annotated[int, Field(ge=1, le=100_000)]
    qkv_token_s: RateS
    rest_token_s: RateS
    pair_s: RateS
    layer_s: RateS
    launch_floor_s: RateS
    kv_bytes: Annotated[float, Field(ge=0, lt=1e15)]
    link_bytes_per_s: Annotated[float, Field(gt=0, lt=1e18)]
    link_latency_s: RateS
    copy_token_s: RateS = 0.0
    head_s: RateS = 0.0
    kept_token_s: RateS | None = None
    weights_s: RateS = 0.0
    speeds: tuple[Annotated[float, Field(gt=0, lt=1e6)], ...] | None = None
    has_states: bool = False

    def __post_init__(self) -> None:
        """Refuse tokens without costs, such as those of a damaged file; pydantic checks each value that is read."""
        if self.token_s + self.pair_s == 0:
            raise PartitionError("costs: token_s and pair_s are both 0; expected tokens that cost time")

    @property
    def token_s(self) -> float:
        """Time of a token in a layer, without attention."""
        return self.qkv_token_s + self.rest_token_s

    @property
    def step_s(self) -> float:
        """Time of a decode step of one document, in all layers, without attention."""
        return max(self.layers * self.launch_floor_s + self.head_s, self.weights_s)

    @property
    def step_floor_s(self) -> float:
        """Part of a step that does not depend on the number of weights; 0 if it was not measured separately."""
        return self.layers * self.launch_floor_s if self.weights_s else 0.0

    @property
    def row_s(self) -> float:
        """Time that another document adds to a decode step."""
        return self.layers * self.token_s

    @property
    def decode_key_s(self) -> float:
        """Time to attend to one key in all layers in decoding."""
        return self.layers * (self.pair_s if self.kept_token_s is None else self.kept_token_s)

    def around_attention(self, tokens: Array, speed: Array | float, ranks: int) -> tuple[Array, Array]:
        """Return the times of slices in a layer before and after attention, on ranks of this speed in a chain."""
        overhead_s = self.layer_s / 2 if ranks > 1 else 0.0
        return overhead_s + tokens * self.qkv_token_s / speed, overhead_s + tokens * self.rest_token_s / speed

    def rates(self, ranks: int, token_weight: float = 1.0) -> list[Rates]:
        """Rates of each rank, with `token_s` multiplied by `token_weight`."""
        token_s = token_weight * self.token_s
        return [Rates(token_s / speed, self.pair_s / speed) for speed in self.speeds or (1.0,) * ranks]

    def after(self, tokens: int) -> Costs:
        """Return the costs of tokens that follow `tokens` cached tokens, to which they also attend."""
        return replace(self, rest_token_s=self.rest_token_s + tokens * self.pair_s) if tokens else self

    def scaled(self, factor: float) -> Costs:
        """Return costs with which everything takes `factor` times as long."""
        times = [name for name in self.__dataclass_fields__ if name.endswith("_s") and not name.endswith("_per_s")]
        taken = {name: factor * value for name in times if (value := getattr(self, name)) is not None}
        return replace(self, link_bytes_per_s=self.link_bytes_per_s / factor, **taken)

    def in_chunks(self, chunks: int) -> Costs:
        """Return the costs of slices that are computed in `chunks`, each launched separately."""
        if chunks < 2:
            return self
        return replace(self, launch_floor_s=chunks * self.launch_floor_s, has_states=True)


def costs_of(
    work: Workload, hardware: Hardware, *, link_bytes_per_s: float | None = None, tensor_parallel: int = 1
) -> Costs:
    """Divide a whole model's work by a machine's rates; `link_bytes_per_s` replaces the profile's.

    `tensor_parallel` is the number n of ranks of a group. A layer has two all-reduces: each sends 2 (n - 1) / n of the
    hidden states over every link (Patarasuk and Yuan 2009), in at least 2 log2(n) steps. Each rank has its own link to
    the next group, for its own heads.
    """
    if link_bytes_per_s is not None:
        hardware = hardware.model_copy(update={"link_bytes_per_s": link_bytes_per_s})
    if tensor_parallel > 1:
        costs = costs_of(work.of_group(tensor_parallel), hardware)
        bytes_per_s, latency_s = hardware.group_link(tensor_parallel)
        carried = 2 * (tensor_parallel - 1) / tensor_parallel * work.hidden_size * work.dtype_bytes
        steps = 2 * math.ceil(math.log2(tensor_parallel))
        return replace(
            costs,
            rest_token_s=costs.rest_token_s + 2 * carried / bytes_per_s,
            # Latency does not depend on the prompt's length; earlier groups' latencies overlap with the last one's.
            head_s=costs.head_s + 2 * steps * work.layers * latency_s,
        )
    return Costs(
        layers=work.layers,
        qkv_token_s=work.qkv_flop / hardware.gemm_flop_per_s,
        rest_token_s=work.rest_flop / hardware.gemm_flop_per_s,
        pair_s=work.pair_flop / hardware.attention_flop_per_s,
        layer_s=hardware.layer_overhead_s,
        launch_floor_s=hardware.launch_floor_s,
        kv_bytes=work.kv_bytes,
        link_bytes_per_s=hardware.link_bytes_per_s,
        link_latency_s=hardware.link_latency_s,
        # One token reads all weights of the head, one byte per operation.
        head_s=work.head_flop / min(hardware.gemm_flop_per_s, hardware.memory_bytes_per_s),
        kept_token_s=work.kv_bytes / hardware.memory_bytes_per_s,
        weights_s=work.weight_bytes / hardware.memory_bytes_per_s,
        has_states=work.has_states,
    )
