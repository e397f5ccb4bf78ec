"""How a chain decodes: each rank its own prompts, or all ranks together, split by heads or by tokens.

With ``[decode] mode = "auto"``, rank 0 chooses for all ranks before the first document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from kvr_mpi.costs.decoding import DecodeChoice, Wave, choose_decoding
from kvr_mpi.decode.batch import MAX_SEQUENCES
from kvr_mpi.decode.group import Group
from kvr_mpi.decode.token_parallel import TokenGroup
from kvr_mpi.runtime.decoder import Decoder
from kvr_mpi.runtime.rounds import Round
from kvr_mpi.runtime.session import Session
from kvr_mpi.transport import Transport, share_json
from kvr_mpi.tuning.decode_probe import measure_decoding

# Characters per token where tokens were not counted; both modes read the same keys and values, so an estimate will do.
CHARS_OF_TOKEN = 4


def choose_modes(session: Session, rounds: Sequence[Round], chains: Sequence[Transport]) -> list[DecodeChoice]:
    """Choose how the chains of each round decode; every rank calls this and gets the same result."""
    choices, ranks, logger = [], session.ranks.lane, session.logger
    for part, chain in zip(rounds, chains, strict=True):
        choice = _choose(session, part, chain)
        wanted, size = session.spec.decode.mode, part.topology.ranks_per_chain
        if wanted == "auto":
            choice = DecodeChoice(**share_json(ranks, asdict(choice)))
        choices.append(choice)
        if ranks.rank:
            continue
        if wanted == "auto":
            logger.info(str(choice))
        elif wanted == "head-parallel" and choice.mode != wanted:
            logger.info(f"decode.mode = 'head-parallel' is replaced by data-parallel here: {choice.why}")
        if choice.mode == "head-parallel":
            assert not isinstance(session.sharing, str | None)
            without = "" if session.why_no_lookup is not None else ", without prompt lookup"
            logger.info(
                f"answers are decoded by {size} ranks that share heads ({session.sharing.describe(size)}){without}"
            )
    return choices


def _choose(session: Session, part: Round, chain: Transport) -> DecodeChoice:
    """Choose for one round; with "auto", only rank 0's result is used."""
    mode, size = session.spec.decode.mode, part.topology.ranks_per_chain
    if mode == "data-parallel":
        return DecodeChoice(mode, "the job asks for it")
    if size == 1 or not session.spec.generation.max_new_tokens:
        return DecodeChoice("data-parallel", "there is only one rank" if size == 1 else "nothing is decoded")
    if isinstance(session.sharing, str):
        return DecodeChoice("data-parallel", session.sharing)
    if mode == "head-parallel":
        return DecodeChoice(mode, "the job asks for it")
    assert session.sharing is not None and session.costs is not None, "what decides is opened and measured"
    wave = _usual_wave(session, part)
    sharing = session.sharing
    measured_s = measure_decoding(session.loaded, chain, wave.documents, lambda: sharing.group(session.loaded, chain))
    return choose_decoding(session.costs, wave, sharing.efficiency(size), measured_s)


def _usual_wave(session: Session, part: Round) -> Wave:
    """Estimate what a chain decodes together: its share of the remaining documents, limited by memory."""
    ranks, numbers = part.topology.ranks_per_chain, [len(each) for each in part.lists]
    documents = max(1, max(numbers, default=1))
    longest, new_tokens = session.frame.max_tokens, session.spec.generation.max_new_tokens
    # In planned jobs, work is a time and does not yield a length.
    work = part.work / sum(numbers) if any(numbers) and not session.spec.planned else 0
    tokens = min(longest, int(work / CHARS_OF_TOKEN) or longest)
    kept = tokens if session.spec.compress is None else session.spec.compress.kept_of(tokens)
    each = (kept + new_tokens) * session.loaded.shape.kv_bytes_per_token
    room = max(1, min(session.free_bytes) * ranks // max(1, each))
    return Wave(
        min(documents, ranks * MAX_SEQUENCES, room),
        ranks,
        kept + new_tokens / 2,
        new_tokens,
        session.loaded.shape.hidden_size * session.loaded.dtype.itemsize,
    )


def decoder_of(own: Decoder, chain: Transport, choice: DecodeChoice) -> Decoder:
    """Return what decodes on a chain: all ranks together if tokens or heads are shared, else this rank's `own`."""
    session = own.session
    if session.spec.is_sharded:
        group: Group = TokenGroup(session.loaded, chain)
    elif choice.mode == "head-parallel":
        assert not isinstance(session.sharing, str | None), "without it, ranks decode separately"
        group = session.sharing.group(session.loaded, chain, session.pool)
    else:
        return own
    return Decoder(session, own.sink, own.stop, own.events, group)
