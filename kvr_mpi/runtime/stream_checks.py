"""What ``model.stream_weights`` does not go with, as far as it shows before anything is loaded; no torch."""

from __future__ import annotations

from kvr_mpi.errors import ConfigError
from kvr_mpi.job import JobSpec


def check_streaming(spec: JobSpec, ranks: int) -> None:
    """Refuse streamed weights where each answer would read all of them many times, or that run otherwise.

    Parameters
    ----------
    ranks : int
        Of the whole job.

    Raises
    ------
    ConfigError
        Naming the settings, and what to do.
    """
    if not spec.model.stream_weights:
        return
    model, parallel, generation = spec.model, spec.parallel, spec.generation
    wrong = {
        f"generation.max_new_tokens = {generation.max_new_tokens}": (
            generation.max_new_tokens > 1,
            "every token of an answer would read all weights; set 0 (prefill only) or 1",
        ),
        f"parallel.strategy = {parallel.strategy!r}": (
            parallel.strategy in ("single", "ring"),
            "choose 'kvr', and parallel.ranks_per_chain = 1",
        ),
        f"parallel.ranks_per_chain = {parallel.ranks_per_chain!r} with {ranks} rank(s)": (
            parallel.planned or (ranks > 1 and parallel.ranks_per_chain != 1),
            "a chain runs one prompt at a time, and weights are read once for many; set parallel.ranks_per_chain = 1",
        ),
        f"parallel.chunk_tokens = {parallel.chunk_tokens}": (parallel.chunk_tokens != "auto", "leave it out"),
        "cache.kind = 'rolling'": (spec.cache.is_rolling, "each of its steps would read all weights; leave it out"),
        "model.device = 'cuda'": (model.device == "cuda", "layers are read into the host's memory; set 'cpu'"),
        "model.kernels = 'compiled'": (
            model.kernels == "compiled",
            "layers that come and go compute with the model's own code; leave it out",
        ),
        "model.adapter": (model.adapter is not None, "merge the adapter into the files first"),
        "model.trust_remote_code = true": (model.trust_remote_code, "only transformers' own models are streamed"),
        "output.kv = 'sharded'": (spec.output.kv == "sharded", "it is for chains; set output.kv = true"),
        f"decode.mode = {spec.decode.mode!r}": (
            spec.decode.mode != "data-parallel",
            "nothing is decoded; leave it out",
        ),
        "[compress]": (spec.compress is not None, "leave one of the two out"),
        "[questions]": (spec.questions is not None, "answers would read all weights for every token"),
        "documents.reuse": (spec.documents.reuse is not None, "leave one of the two out"),
        "documents.format = 'openai-batch'": (
            spec.documents.format == "openai-batch",
            "its requests want answers, each token of which would read all weights",
        ),
    }
    for key, (is_wrong, why) in wrong.items():
        if is_wrong:
            raise ConfigError(f"{key} does not go with model.stream_weights = true: {why}")
