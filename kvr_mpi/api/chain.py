"""Single prompts on the caller's own ranks: a model and a chain, without documents and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvr_mpi.api.ranks import ending_all, join_ranks, leave_bars_to_rank_0
from kvr_mpi.cli.environment import read_environment
from kvr_mpi.decode.sampling import Answer
from kvr_mpi.documents.document import AS_THE_JOB
from kvr_mpi.errors import ConfigError, DocumentError
from kvr_mpi.job import JobSpec, make_job, show_job
from kvr_mpi.logs import RankLogger
from kvr_mpi.plain import from_plain
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.runtime.chain_runner import ChainRunner
from kvr_mpi.runtime.checks import check_table
from kvr_mpi.runtime.job_ranks import JobRanks
from kvr_mpi.runtime.loading import own_device
from kvr_mpi.runtime.plan import Plan, share_message
from kvr_mpi.runtime.planner import Planner
from kvr_mpi.runtime.prepare import prepare
from kvr_mpi.runtime.prompt import Prompt
from kvr_mpi.transport import check_alike, on_root, share_json, together
from kvr_mpi.transport.choose import open_transport
from kvr_mpi.transport.mpi import release

if TYPE_CHECKING:
    import torch

PromptLike = str | Sequence[int]  # a text, or token ids


@dataclass(slots=True, eq=False)
class ChainPrefill:
    """A prefilled prompt on one rank of the chain; `Chain.generate` continues it once.

    ids : the prompt's token ids.
    bounds : slice bounds over the ranks.
    decode_rank : the rank that has logits and cache.
    logits : of the next token (vocab_size,), float32; None on all other ranks.
    seconds : time that this rank took, including waiting for others.
    """

    ids: tuple[int, ...]
    bounds: tuple[int, ...]
    decode_rank: int
    logits: torch.Tensor | None
    seconds: float
    _prompt: Prompt
    _prefill: Prefill | None
    _is_continued: bool = False


class Chain:
    """A model on a chain of ranks; every rank creates one, and calls its methods in the same order.

    >>> with Chain("/models/mine", MPI.COMM_WORLD) as chain:
    ...     prefill = chain.prefill(text)
    ...     answer = chain.generate(prefill)

    Like a job at its start, the constructor runs a few tokens to check that the chain computes the model's own logits,
    and measures the ranks.

    Parameters
    ----------
    model : str or mapping
        A folder, .gguf file or hub id; or a job's ``[model]``: ``{"path": ..., "dtype": "float32"}``.
    comm : mpi4py.MPI.Comm, optional
        Default: all ranks that ``mpirun`` or ``srun`` started; without a launcher this process alone.
    generation, parallel : mapping, optional
        A job's ``[generation]`` and ``[parallel]``.

    Raises
    ------
    KvrError
        On every rank, if model and settings cannot be combined; one of them has the reason in its message.
    """

    def __init__(
        self,
        model: str | Mapping[str, Any],
        comm: Any = None,
        *,
        generation: Mapping[str, Any] | None = None,
        parallel: Mapping[str, Any] | None = None,
    ) -> None:
        machine = read_environment()
        self._world, self._owns = join_ranks(comm), comm is not None
        leave_bars_to_rank_0(self._world)
        with ending_all(self._world):
            spec = together(self._world, lambda: _spec(model, generation, parallel))
            given = {f"setting {key}": value for key, value, _ in show_job(spec, {})}
            check_alike(self._world, given, "create the chain with the same settings on every rank")
            together(self._world, lambda: check_table(spec, self._world.size))
            device = own_device(self._world, spec.model.device)
            self._ranks, _ = open_transport(self._world, spec.parallel.transport, device)
            logger = RankLogger(self._world.rank)
            self._session = prepare(spec, machine, JobRanks(self._ranks, self._ranks), self._ranks, logger)
            self._runner = ChainRunner(self._session, self._ranks, 0)
            self._planner = Planner(self._runner) if self._ranks.rank == 0 else None
        self._prompts = 0  # number of prefilled prompts
        self.rank, self.size = self._ranks.rank, self._ranks.size
        self.decode_rank = self.size - 1

    @property
    def tokenizer(self) -> Any:
        return self._session.loaded.tokenizer

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokenize text without chat template, with the tokenizer's BOS token if it has one.

        Raises
        ------
        DocumentError
            If there are no tokens, or too many for the model's context minus ``max_new_tokens``.
        """
        ids = self._session.frame.text.encode(self.tokenizer, text)
        if not ids:
            raise DocumentError(f"the tokenizer produces no tokens for {text!r:.60}")
        return self._checked(self._session.frame.around(ids).ids)

    def prefill(self, prompt: PromptLike | None = None) -> ChainPrefill:
        """Compute keys and values of a prompt over the chain; logits are on `decode_rank`.

        Parameters
        ----------
        prompt : str or sequence of int
            Required on rank 0; other ranks may pass None or the same prompt.

        Raises
        ------
        DocumentError
            On every rank, if the prompt is empty, too long, has invalid token ids, or does not fit into a rank's
            memory; the chain can then be used for other prompts.
        ConfigError
            On every rank, if ranks give different prompts, or call different methods.
        """
        return self._prefill(prompt, "prefill")

    def _prefill(self, given: PromptLike | None, method: str) -> ChainPrefill:
        """Prefill rank 0's prompt for the public method that all ranks call; refuse other prompts."""
        ranks = self._ranks
        with ending_all(ranks):
            self._check_call(method)
            mine = together(ranks, lambda: self._encoded(given))
            self._prompts += 1
            plan = share_message(ranks, on_root(ranks, lambda: self._plan(mine)), self._runner.read_plan)
            assert isinstance(plan, Plan), "no wave ends here"
            together(ranks, partial(self._check_same, mine, plan))
            # A short prompt runs on the decode rank only; errors of a chain's ranks are in its results.
            done = self._runner.prefill([plan])[0] if plan.takes_all else None
            done = together(ranks, partial(self._finish, plan, done))
        ids = plan.prompt.ids
        bounds = (0, len(ids)) if plan.partition is None else plan.partition.bounds
        logits, seconds = (None, 0.0) if done is None else (done.logits, done.seconds)
        return ChainPrefill(ids, bounds, self.decode_rank, logits, seconds, plan.prompt, done)

    def generate(self, prompt: PromptLike | ChainPrefill | None = None) -> Answer:
        """Answer a prompt, or continue its prefill; every rank gets the answer.

        Raises
        ------
        ConfigError
            If ``max_new_tokens`` is 0, or the prefill was continued before.
        DocumentError
            As for `prefill`.
        """
        if self._session.spec.generation.max_new_tokens == 0:
            raise ConfigError(
                "generation.max_new_tokens = 0: this chain can only prefill; to generate, create it with at least 1"
            )
        if isinstance(prompt, ChainPrefill):
            with ending_all(self._ranks):
                self._check_call(f"generate from {prompt._prompt.key}")
            found = prompt
        else:
            found = self._prefill(prompt, "generate")
        if found._is_continued:
            raise ConfigError(
                "this prefill has already been continued, so its cache contains the answer: prefill again"
            )
        prefill, found._prefill, found._is_continued = found._prefill, None, True
        with ending_all(self._ranks):
            answer = together(self._ranks, lambda: None if prefill is None else self._decode(found._prompt, prefill))
            shared = share_json(self._ranks, None if answer is None else asdict(answer), root=self.decode_rank)
        return from_plain(Answer, shared)

    def close(self) -> None:
        """Finish all sends, and release the ranks; every rank calls this."""
        self._runner.close()
        if self._owns:
            self._owns = False
            release(self._world)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an error, other ranks may not get here
            self.close()

    def _check_call(self, method: str) -> None:
        """Refuse ranks that call different methods."""
        remedy = "every rank of a chain must call the same methods in the same order"
        check_alike(self._ranks, {"the method called": method}, remedy)

    def _encoded(self, given: PromptLike | None) -> tuple[int, ...] | None:
        if given is None:
            return None
        return self.encode(given) if isinstance(given, str) else self._checked(tuple(map(int, given)))

    def _plan(self, ids: tuple[int, ...] | None) -> Plan:
        assert self._planner is not None, "on rank 0"
        if ids is None:
            raise ConfigError("rank 0 received no prompt; only other ranks may pass None")
        name = f"prompt {self._prompts}"
        prompt = Prompt(ids=ids, key=name, document_id=name, new_tokens=self._session.spec.generation.max_new_tokens)
        return self._planner.plan(prompt, self.decode_rank)

    def _check_same(self, mine: tuple[int, ...] | None, plan: Plan) -> None:
        """Refuse a prompt of this rank that differs from rank 0's."""
        if mine is not None and mine != plan.prompt.ids:
            raise ConfigError(
                f"rank {self.rank} received a different prompt than rank 0: pass the same prompt, or None, "
                "on all ranks of a chain"
            )

    def _finish(self, plan: Plan, done: Prefill | None) -> Prefill | None:
        """Prefill a short prompt on the decode rank; raise `DocumentError` if a prefill has failed."""
        if not plan.takes_all and self.rank == self.decode_rank:
            (done,) = self._runner.prefill([plan])
        if done is not None and done.error is not None:
            raise DocumentError(done.error)
        return done

    def _checked(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Refuse an empty prompt, or one that leaves no room for the answer."""
        longest = self._session.frame.max_tokens
        if not 0 < len(ids) <= longest:
            raise DocumentError(
                f"the prompt has {len(ids):,} tokens; expected 1 to {longest:,}, the context minus max_new_tokens"
            )
        self._session.loaded.shape.check_ids(ids)
        return ids

    def _decode(self, prompt: Prompt, prefill: Prefill) -> Answer | None:
        if self.rank != self.decode_rank:
            return None
        batch = self._session.open_decode_batch()
        batch.add(prompt, prefill, prompt.ids, self._session.spec.generation.seed)
        while not (finished := batch.step()):
            pass
        if finished[0].answer is None:
            raise DocumentError(str(finished[0].error))
        return finished[0].answer


def _spec(
    model: str | Mapping[str, Any], generation: Mapping[str, Any] | None, parallel: Mapping[str, Any] | None
) -> JobSpec:
    """Make a job from a chain's settings, without documents and output."""
    raw = {
        "model": {"path": model} if isinstance(model, str) else dict(model),
        "documents": {"path": "-"},
        "prompt": {"chat_template": False},
        "generation": dict(generation or {}),
        "parallel": dict(parallel or {}),
        "output": {"path": "-"},
    }
    spec, _ = make_job(raw, Path("Chain()"), (), {})
    if spec.generation.of_answers != AS_THE_JOB or spec.generation.scores:
        raise ConfigError(
            "a Chain returns only the text and tokens of an answer: generation.logprobs, n, score and json_schema "
            "require a job; omit them"
        )
    if spec.parallel.strategy == "single" or spec.ranks_per_chain != "all":
        wanted = spec.parallel.ranks_per_chain or "all"
        raise ConfigError(
            f"parallel.strategy = {spec.parallel.strategy!r}, ranks_per_chain = {wanted!r}: a Chain always uses all "
            f"ranks of its communicator; omit these, or pass a smaller communicator (comm.Split)"
        )
    return spec
