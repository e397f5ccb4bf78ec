"""One small model against plain transformers: chains, ring, both tsp, a shared prefix, and packed rows.

The only file of the survey that knows how a strategy is run. All ranks are threads, each with a copy of the model, as
processes have one. The truth comes from a fresh copy, too: some rotary embeddings remember the longest prompt they saw.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks.published import PUBLISHED
from benchmarks.tiny import PAD
from kvr_mpi.errors import DocumentError, KvrError
from kvr_mpi.kv.row import Row
from kvr_mpi.model import LoadedModel, probe_shape
from kvr_mpi.model.attention_hook import prepare_model, run_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import Continuation, allowed_error, continued, copy_layers, differences, first_difference
from kvr_mpi.prefill.one_prompt import (
    PLAIN,
    Prefill,
    compute_prefix,
    plain_cache,
    prefill_kvr,
    prefill_single,
)
from kvr_mpi.prefill.packed import decode_packed, prefill_packed
from kvr_mpi.prefill.self_check import check_chain, why_not_packed
from kvr_mpi.transport.local import LocalTransport, run_local

NOISE = allowed_error(torch.float32)  # of the spread, as in `kvr verify`
TOKENS = 90  # longer than every window, chunk and threshold of the catalogue
NEW_TOKENS = 16
FEW_TOKENS = 3  # after what differs from another strategy in its prefill only
PARTITIONS = {(0, 90): FEW_TOKENS, (0, 53, 90): NEW_TOKENS, (0, 1, 89, 90): FEW_TOKENS, (0, 31, 32, 70, 90): NEW_TOKENS}
PREFIX_TOKENS = 37
DOCUMENTS = (37, 5, 90, 1, 18)  # lengths of those in a row
CONTINUES = "goes on from a cache"  # plain transformers, in two calls: what no chain can do otherwise
CHAIN = "self-check"


class NotHereError(Exception):
    """What plain transformers does not run here, though nothing says so beforehand."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What came of one model, by strategy."""

    exact: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)  # past the self-checks
    failed: dict[str, str] = field(default_factory=dict)  # with an exception that is none of ours
    is_fast: bool = True  # its attention is taken over, in parts
    begins: Callable[[str], None] = lambda name: None  # is told what begins

    def note(self, name: str, work: Callable[[], str | None]) -> None:
        """Do something that returns what is wrong, and note what came of it."""
        self.begins(name)
        try:
            wrong = work()
        except DocumentError as error:  # this prompt is an error record, whatever runs it
            self.refused[CHAIN] = str(error)
        except KvrError as error:
            self.refused[name] = str(error)
        except Exception as error:
            self.failed[name] = describe(error)
        else:
            if wrong:
                self.wrong[name] = wrong
            else:
                self.exact.append(name)


def describe(error: BaseException) -> str:
    """Name an exception, with its first lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]


def prompt(tokens: int, vocab: int, salt: int = 0) -> list[int]:
    """Ids without a pattern a model could use, padding among them if there are enough."""
    ids = [PAD + 1 + (at * at * 7 + 31 * at + 11 * salt) % (vocab - PAD - 2) for at in range(tokens)]
    ids[20:21] = ids[60:61] = [PAD]
    return ids[:tokens]


def compare(model: Any, begins: Callable[[str], None]) -> Findings:
    """Compare all that can be done with a model with plain transformers.

    Parameters
    ----------
    begins : callable
        Is told the name of each strategy before it runs.

    Raises
    ------
    NotHereError
        If plain transformers does not run it, and the self-check does not refuse it.
    """
    vocab = int(model.config.get_text_config().vocab_size)
    ids, findings = prompt(TOKENS, vocab), Findings(begins=begins)
    try:
        truth = _plain(model, ids, NEW_TOKENS)
        if not truth.logits.isfinite().all():
            raise FloatingPointError("its logits are not finite")
    except Exception as error:
        return _refuse(model, f"plain transformers: {describe(error)}")
    _note_continuing(findings, model, ids, truth)
    found: list[LoadedModel] = []

    def load() -> None:
        loaded = _load(copy.deepcopy(model))
        loaded.shape.check_ids(ids)  # as a job does before it plans a prompt
        found.append(check_chain(loaded))

    findings.note(CHAIN, load)
    if not found:
        return findings
    findings = replace(findings, is_fast=found[0].attends_in_parts)
    size = max(len(bounds) for bounds in PARTITIONS) - 1
    ranks = [replace(found[0], model=copy.deepcopy(model)) for _ in range(size)]
    for rank in ranks:
        prepare_model(rank.model, chain=True, in_parts=rank.attends_in_parts)
    for case in _cases(ids):
        findings.note(case.name, partial(_differs, case, ranks, truth, partial(_plain, model, ids)))
    _note_packed(findings, ranks[0], model, vocab)
    return findings


def _load(model: Any) -> LoadedModel:
    """Make of a model what `load_model` would."""
    shape, cpu = probe_shape(model.config, torch.float32), torch.device("cpu")
    return LoadedModel(model, None, shape, name="tiny", fingerprint="tiny", dtype=torch.float32, device=cpu)


def _refuse(model: Any, why: str) -> Findings:
    """Note that a model which plain transformers builds but does not run is refused."""
    findings = Findings()
    findings.note(CHAIN, lambda: str(check_chain(_load(model))))
    if findings.wrong:
        raise NotHereError(why)
    for texts in (findings.refused, findings.failed):
        texts |= {name: f"{text} ({why})" for name, text in texts.items()}
    return findings


def _note_continuing(findings: Findings, model: Any, ids: Sequence[int], truth: Continuation) -> None:
    """Note whether plain transformers goes on from its own cache with several tokens."""
    apart = Findings()
    apart.note(CONTINUES, lambda: difference(_plain(model, ids, NEW_TOKENS, cuts=(53,)), truth))
    findings.exact.extend(apart.exact)
    findings.refused.update(apart.refused | apart.wrong | apart.failed)


@dataclass(frozen=True, slots=True)
class Case:
    """A way to prefill: its ranks, the one that ends with the cache, and how many tokens are decoded after it.

    cuts : where each rank goes on from the one before it.
    """

    name: str
    size: int
    decode_rank: int
    tokens: int
    run: Callable[[LoadedModel, LocalTransport], Prefill]
    cuts: Sequence[int] = ()


def _cases(ids: Sequence[int]) -> list[Case]:
    cases = []
    for bounds, tokens in PARTITIONS.items():
        cut, name = Partition(bounds), f"chain {'-'.join(map(str, bounds))}"
        run = partial(_chain, ids, cut, cut.size - 1)
        cases.append(Case(name, cut.size, cut.size - 1, tokens, run, bounds[1:-1]))
    cut = Partition((0, 31, 32, 90))
    cases.append(Case("chain 0-31-32-90 from rank 2", cut.size, 1, FEW_TOKENS, partial(_chain, ids, cut, 1)))
    for size, tokens in ((2, NEW_TOKENS), (3, FEW_TOKENS)):
        cases.append(Case(f"ring {size}", size, 0, tokens, partial(_rival, "ring", ids)))
        for kind in ("causal", "dense"):
            cases.append(Case(f"tsp-{kind} {size}", size, size - 1, FEW_TOKENS, partial(_rival, f"tsp-{kind}", ids)))
    return [*cases, Case("prefix", 2, 1, FEW_TOKENS, partial(_with_prefix, ids))]


def _chain(ids: Sequence[int], cut: Partition, last: int, loaded: LoadedModel, rank: LocalTransport) -> Prefill:
    return prefill_kvr(loaded, ids, cut, rank, reserve_tokens=NEW_TOKENS, last=last)


def _rival(name: str, ids: Sequence[int], loaded: LoadedModel, rank: LocalTransport) -> Prefill:
    strategy = PUBLISHED[name]
    strategy.check(loaded, rank)
    cut = strategy.cut_evenly(len(ids), rank.size)
    return strategy.prefill(loaded, ids, cut, rank, NEW_TOKENS)


def _with_prefix(ids: Sequence[int], loaded: LoadedModel, rank: LocalTransport) -> Prefill:
    prefix = compute_prefix(loaded, ids[:PREFIX_TOKENS])
    return prefill_kvr(loaded, ids, Partition((0, 61, len(ids))), rank, reserve_tokens=NEW_TOKENS, prefix=prefix)


def _differs(
    case: Case, ranks: Sequence[LoadedModel], truth: Continuation, plain: Callable[[int, Sequence[int]], Continuation]
) -> str | None:
    """Run a case on threads, decode where its cache is, and say where that differs from the truth.

    Some models' own code for a single token leaves states that are not quite those of all tokens at once. States that
    differ from the truth have to be those of plain transformers in as many calls.
    """
    prefills = run_local(case.size, lambda rank: case.run(ranks[rank.rank], rank))
    answer = continued(ranks[case.decode_rank].model, prefills[case.decode_rank], case.tokens)
    wrong = difference(answer, truth)
    if wrong is None or "states" not in wrong or not case.cuts:
        return wrong
    return difference(answer, plain(NEW_TOKENS, case.cuts))


def _plain(model: Any, ids: Sequence[int], tokens: int, cuts: Sequence[int] = ()) -> Continuation:
    """Prefill and decode with plain transformers, on a copy of the model; in several calls if cuts are given."""
    model, cpu = copy.deepcopy(model), torch.device("cpu")
    prepare_model(model, chain=False)
    if not cuts:
        return continued(model, prefill_single(model, ids, cpu), tokens)
    cache = plain_cache(model)
    with torch.inference_mode():
        for first, last in itertools.pairwise((0, *cuts, len(ids))):
            logits = run_model(model, torch.tensor([ids[first:last]]), cache)[0]
    return continued(model, Prefill(Partition((0, len(ids))), cache, logits, seconds=0.0, strategy=PLAIN), tokens)


def difference(found: Continuation, truth: Continuation) -> str | None:
    """Say where an answer first differs from the truth, and by what share of the spread; None if it does not."""
    wrong = first_difference(differences(found, truth), NOISE)
    if wrong is not None:
        return f"{wrong[0]} by {wrong[1]:.1e}"
    return None if found.tokens == truth.tokens[: len(found.tokens)] else "greedy tokens"


def _note_packed(findings: Findings, loaded: LoadedModel, model: Any, vocab: int) -> None:
    """Several documents in a row and their answers, against each alone in plain transformers."""
    reasons: list[str | None] = []
    findings.note("packed", lambda: reasons.append(why_not_packed(loaded)))
    if not reasons:
        return
    findings.exact.remove("packed")
    if reasons[0] is not None:
        findings.refused["packed"] = reasons[0]
        return
    findings.note("packed", lambda: _packed(loaded, model, vocab, head=[], tokens=NEW_TOKENS))
    if "prefix" in findings.exact:
        head = prompt(21, vocab, salt=7)
        findings.note("packed prefix", lambda: _packed(loaded, model, vocab, head=head, tokens=FEW_TOKENS))


def _packed(loaded: LoadedModel, model: Any, vocab: int, *, head: list[int], tokens: int) -> str | None:
    prompts = [head + prompt(length, vocab, salt=length) for length in DOCUMENTS]
    truths = [_plain(model, ids, tokens) for ids in prompts]
    prefix = compute_prefix(loaded, head) if head else None
    rows = prefill_packed(loaded, prompts, reserve_tokens=tokens, prefix=prefix)
    answers = [Continuation(row.logits, copy_layers(row.cache), [], []) for row in rows if row.logits is not None]
    cache = Row([row.cache for row in rows])
    for step in range(tokens):
        logits = decode_packed(loaded, cache, [truth.tokens[step] for truth in truths])
        for answer, row in zip(answers, logits, strict=True):
            answer.tokens.append(int((answer.steps[-1] if answer.steps else answer.logits).argmax()))
            answer.steps.append(row)
    for ids, truth, answer in zip(prompts, truths, answers, strict=True):
        wrong = difference(answer, truth)
        if wrong:
            return f"document of {len(ids)} tokens: {wrong}"
    return None
