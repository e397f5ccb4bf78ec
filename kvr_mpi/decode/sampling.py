"""Choice of the next token, and the end of an answer.

The settings are transformers': a `GenerationConfig` and its logits processors. A `DecodeBatch` computes the logits of
all documents at once; a `DecodeSequence` makes one document's answer from them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    EpsilonLogitsWarper,
    GenerationConfig,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from kvr_mpi.decode.grammar import Grammars, SchemaProcessor
from kvr_mpi.decode.logprobs import LogprobTrace, TokenLogprobs
from kvr_mpi.decode.reasoning import ReasoningFormat
from kvr_mpi.decode.repetition import (
    NO_PENALTIES,
    TOKENS_PER_CHECK,
    Penalties,
    TokenCounts,
    ends_in_repetition,
    penalize,
    stack,
)
from kvr_mpi.decode.scoring import Score
from kvr_mpi.documents.document import OwnGeneration
from kvr_mpi.documents.generation import SAMPLING, sampling_settings
from kvr_mpi.errors import ConfigError, KvrError
from kvr_mpi.prefill.failure import is_out_of_memory
from kvr_mpi.prefill.finite import NOT_FINITE, explain_not_finite, likeliest

Integers = npt.NDArray[np.int64]
# Tokens that are decoded to find a stop string: so many for each of its characters, which may be bytes, and more.
TOKENS_PER_CHAR, MORE_TOKENS = 4, 8
# Like `NOT_FINITE`, if the logits are finite, but not what the sampling settings make of them.
NOTHING_TO_CHOOSE = -2
# Logits processors that compute each row of logits by itself, and to which it is the same how often a token occurs.
BY_ROW = {
    EpsilonLogitsWarper,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
}
# Most logits that are processed at once; sorting them takes several times their memory.
MOST_LOGITS = 1 << 21

# Settings of transformers' generate() that answers do not follow, with the values that ask for nothing.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (0, 1)),
    **dict.fromkeys(("guidance_scale", "encoder_repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("diversity_penalty", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("early_stopping", "token_healing"), (False,)),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "max_time", "stop_strings"), ()),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A generated answer."""

    token_ids: tuple[int, ...]  # without the end-of-text token
    text: str  # without the reasoning
    finish_reason: str  # "stop": end-of-text or a stop string; "length": max_new_tokens; "repetition"; "": no answer
    seconds: float  # wall time from the first logits to the last token
    steps: int = 0  # of the model, after that on the prompt
    logprobs: TokenLogprobs | None = None  # of its tokens, if they are requested
    scores: tuple[Score, ...] = ()  # of given continuations
    samples: tuple[Answer, ...] = ()  # all answers, this one first, if there is more than one
    reasoning: str = ""  # of a model that thinks first

    @property
    def new_tokens(self) -> int:
        """Number of generated tokens, over all samples."""
        return sum(len(one.token_ids) for one in self.samples or (self,))

    @property
    def all_steps(self) -> int:
        """Number of steps, over all samples."""
        return sum(one.steps for one in self.samples or (self,))


def make_generation_config(model: Any, settings: dict[str, Any]) -> GenerationConfig:
    """Apply a job's settings to the model's generation defaults, without those that `describe_generation` names.

    Raises `ConfigError` if transformers refuses a value.
    """
    own = {name: value for name, value in model.generation_config.to_dict().items() if name not in NOT_SUPPORTED}
    try:
        config = GenerationConfig.from_dict({**own, **settings})
        config.validate(user_set_attributes=set(settings))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"[generation]: transformers does not accept {settings}: {error}") from error
    return config


def describe_generation(model: Any, tokenizer: Any, config: GenerationConfig) -> Iterator[tuple[int, str]]:
    """Yield log levels and lines: defaults of a model that answers do not follow, ends of text that it does not name.

    config : made from the defaults and a job's settings by `make_generation_config`.
    """
    own = {name: value for name, value in model.generation_config.to_dict().items() if value is not None}
    known = GenerationConfig().to_dict().keys()
    ignored = [name for name, neutral in NOT_SUPPORTED.items() if name in own and own[name] not in neutral]
    ignored += [name for name in own if name not in known]
    if ignored:
        told = ", ".join(f"{name} = {own[name]!r}" for name in ignored)
        yield WARNING, f"settings of the model's generation_config.json are not supported, and ignored: {told}"
    if own.get("do_sample") and not config.do_sample:
        told = ", ".join(f"{name} = {own[name]}" for name in SAMPLING if name in own)
        yield (
            INFO,
            (
                f"answers are greedy, although the model's generation_config.json asks for sampling"
                f"{f' ({told})' if told else ''}: set generation.temperature to sample"
            ),
        )
    ends, end = ends_of(config), getattr(tokenizer, "eos_token_id", None)
    if end is None or end in ends:
        return
    token = f"{tokenizer.convert_ids_to_tokens(end)!r} (id {end})"
    advice = f'add "eos_token_id": {sorted({end, *ends})} to it, or set generation.stop'
    if not ends:
        yield (
            WARNING,
            (
                f"the model's generation_config.json names no end of text, so answers run to max_new_tokens, "
                f"although its tokenizer has {token}: {advice}"
            ),
        )
    else:
        yield (
            WARNING,
            (
                f"the end of text {token} of the tokenizer is not among those of the model's "
                f"generation_config.json ({', '.join(map(str, sorted(ends)))}), so answers go on after it: {advice}"
            ),
        )


def ends_of(config: GenerationConfig) -> set[int]:
    """Return the end-of-text tokens."""
    ends = config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())


@dataclass(eq=False)
class SamplingParams:
    """Settings for generating an answer, of the job or of one document.

    model, tokenizer : of transformers.
    stop : stop strings; an answer ends before the first one.
    grammars : of the model.
    top_logprobs : number of top tokens whose log-probabilities are kept; None: none, not even for the answer's tokens.
    json_schema : JSON schema that the answer follows, as text, or None.
    in_group : a tensor-parallel group of ranks chooses the same tokens.
    stop_repetition : end answers that repeat themselves endlessly.
    reasoning : how the model marks its reasoning; None if it belongs to the answer.
    """

    model: Any
    tokenizer: Any
    config: GenerationConfig
    stop: Sequence[str]
    max_new_tokens: int
    grammars: Grammars
    top_logprobs: int | None = None
    json_schema: str | None = None
    in_group: bool = False
    penalties: Penalties = NO_PENALTIES
    stop_repetition: bool = False
    reasoning: ReasoningFormat | None = None

    def __post_init__(self) -> None:
        self.ends = ends_of(self.config)
        self._stop_chars = max(map(len, self.stop), default=0)

    def ends_in_stop(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token of an answer completes a stop string, if none was complete before.

        A text that continues before the last tokens may begin otherwise, so more of them are decoded than a stop string
        can have; the whole text, which is cut before the stop string, decides.
        """
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True)
        some = token_ids[-self._stop_chars * TOKENS_PER_CHAR - MORE_TOKENS :]
        if self.find_stop(decode(some)) is None:
            return False
        return len(some) == len(token_ids) or self.find_stop(decode(token_ids)) is not None

    def find_stop(self, text: str) -> int | None:
        """Return where the first stop string of a text begins, if it has one."""
        return min((at for at in map(text.find, self.stop) if at >= 0), default=None)

    def adapted(self, own: OwnGeneration) -> SamplingParams:
        """Return the settings for a row, with the job's values where the row sets none.

        A row that sets a temperature, or another sampling setting, is sampled; a row with temperature 0 is greedy.
        """
        changes = sampling_settings({name: getattr(own, name) for name in SAMPLING})
        if own.repetition_penalty is not None:
            changes["repetition_penalty"] = own.repetition_penalty
        return replace(
            self,
            config=GenerationConfig.from_dict({**self.config.to_dict(), **changes}),
            stop=self.stop if own.stop is None else own.stop,
            max_new_tokens=self.max_new_tokens if own.max_new_tokens is None else own.max_new_tokens,
            top_logprobs=None if own.top_logprobs == -1 else own.top_logprobs,
            json_schema=own.json_schema or None,
            # A schema holds from the first token on.
            reasoning=None if own.keep_reasoning or own.json_schema else self.reasoning,
            penalties=Penalties(
                self.penalties.frequency if own.frequency_penalty is None else own.frequency_penalty,
                self.penalties.presence if own.presence_penalty is None else own.presence_penalty,
            ),
        )

    @property
    def why_no_schema(self) -> str | None:
        """Why answers cannot follow their schema with the other settings; None if they can, or have no schema."""
        bending: dict[str, Any] = {"stop": self.stop}
        bending |= {name: getattr(self.config, name, None) for name in ("min_new_tokens", "no_repeat_ngram_size")}
        found = [name for name, value in bending.items() if value and self.json_schema is not None]
        if not found:
            return None
        return (
            f"{found[0]} = {bending[found[0]]!r}, from the job or from the model's generation_config, cannot be "
            f"combined with a JSON schema: it would end or change an answer where the schema does not"
        )

    @property
    def settings(self) -> str:
        """What changes probabilities, as shown to users."""
        given = self.config.to_diff_dict()
        names = [name for name in (*SAMPLING, "repetition_penalty", "no_repeat_ngram_size") if given.get(name)]
        return ", ".join(f"{name} = {given[name]!r}" for name in names) or "its generation settings"

    def processors(self, prompt_tokens: int, device: torch.device) -> Any:
        """Make the logits processors of one document, apart from `penalties`; some of them are stateful."""
        # Private, but generate() calls it, too; it makes all logits processors that a configuration asks for.
        self.config._eos_token_tensor = torch.tensor(sorted(self.ends), device=device) if self.ends else None
        self.config.max_length = prompt_tokens + self.max_new_tokens  # where BART's processor forces the end
        made = self.model._get_logits_processor(self.config, input_ids_seq_length=prompt_tokens, device=device)
        kinds = [type(each) for each in made]
        if TopKLogitsWarper in kinds and TopPLogitsWarper in kinds[kinds.index(TopKLogitsWarper) :]:
            at = kinds.index(TopPLogitsWarper)
            made[at] = TopPAmongFew(made[at].top_p)
        if self.json_schema is not None:  # before those that drop unlikely tokens
            made.insert(0, SchemaProcessor(self.grammars, self.json_schema, prompt_tokens))
        return made


@dataclass(frozen=True)
class TopPAmongFew:
    """Top-p where most tokens are dropped already, as by top-k: it keeps the same tokens, and sorts only the others."""

    top_p: float

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Drop the least likely tokens of each row of scores (answers, vocab_size)."""
        count = max(1, int((scores > -torch.inf).sum(-1).max()))
        tokens = scores.topk(count).indices.sort(-1).values  # of equal scores, the first ones are dropped
        values, order = scores.gather(-1, tokens).sort(stable=True)
        # As long as the vocabulary: shorter sums would be rounded in another way.
        ascending = torch.full_like(scores, -torch.inf)
        ascending[:, -count:] = values
        is_dropped = (ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p)[:, -count:]
        is_dropped[:, -1] = False
        return scores.scatter(-1, tokens.gather(-1, order), values.masked_fill(is_dropped, -torch.inf))


class DecodeSequence:
    """The answer to a prompt that is being generated; of several (`samples`), one after the other.

    Every sample has its own seed, derived from its index; the first one has the seed of a prompt that is answered once.

    prompt_ids : for the processors that look back (repetition penalties).
    seed : for sampling: the same seed, prompt and settings give the same answer.
    device : of the logits.
    samples : number of answers.
    token_ids : written so far, without the end-of-text token.
    steps : see `Answer`.
    finish_reason, scores : see `Answer`; no reason while there is more to write.
    error : why the answer failed.
    is_greedy : whether the next token is just the argmax of the logits.
    alike : equal for answers whose tokens can be chosen together; None: of this one alone.
    """

    def __init__(
        self, rules: SamplingParams, prompt_ids: Sequence[int], seed: int, device: torch.device, samples: int = 1
    ) -> None:
        self._rules, self._prompt_tokens, self._seed, self._samples = rules, len(prompt_ids), seed, samples
        self._device = device
        self._done: list[Answer] = []
        self.token_ids: list[int] = []
        self.error: str | None = None
        self.finish_reason: str | None = None
        self.scores: tuple[Score, ...] = ()
        self.is_greedy = False
        self.alike: tuple[object, ...] | None = None
        with self._failing_alone():
            self._ids = np.empty(len(prompt_ids) + rules.max_new_tokens, dtype=np.int64)
            self._ids[: len(prompt_ids)] = prompt_ids
            # On a GPU, another copy is kept there if processors read it.
            self._on_device = torch.from_numpy(self._ids) if device.type == "cpu" else None
            self._begin(seed)

    def _begin(self, seed: int) -> None:
        rules, self._began = self._rules, time.perf_counter()
        self._processors = rules.processors(self._prompt_tokens, self._device)
        self._generator = torch.Generator(device=self._device).manual_seed(seed) if rules.config.do_sample else None
        self._trace = None if rules.top_logprobs is None else LogprobTrace(rules.top_logprobs)
        self._counts = None if rules.penalties == NO_PENALTIES else TokenCounts(rules.max_new_tokens)
        kinds = {type(each) for each in self._processors}
        others = self._generator, self._trace, self._counts
        self.is_greedy = not self._processors and others == (None, None, None)
        self.alike = None
        if kinds <= {*BY_ROW, TopPAmongFew}:
            own = ((type(each), *vars(each).values()) for each in self._processors)
            self.alike = rules.config.do_sample, rules.penalties, *own
        self._distinct: Integers | None = None  # the prompt's tokens without repetitions, and room for the answer's
        if self.alike is not None and RepetitionPenaltyLogitsProcessor in kinds:
            distinct = np.unique(self._ids[: self._prompt_tokens])
            self._distinct = np.concatenate([distinct, self._ids[self._prompt_tokens :]])
        self.token_ids, self.steps = [], 0
        self.finish_reason = None if rules.max_new_tokens else ""

    @contextlib.contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """Turn an exception in the block into the error of this answer; the batch continues."""
        try:
            yield
        except torch.AcceleratorError:  # after which a GPU computes nothing more
            raise
        except Exception as error:
            if self._rules.in_group and is_out_of_memory(error):  # the other ranks of the group would go on
                raise
            why = str(error)
            if not isinstance(error, KvrError):
                what = "not enough memory" if is_out_of_memory(error) else "an error"
                why = f"{what} while choosing its tokens with {self._rules.settings}: {type(error).__name__}: {why}"
            self.fail(why)

    def begin_next(self, logits: torch.Tensor | None) -> bool:
        """Keep the finished answer, and begin the next one from the prompt's logits; return whether there is one."""
        with self._failing_alone():
            self._done.append(self._finished())
            if len(self._done) == self._samples:
                return False
            name = f"{self._seed} sample {len(self._done)}"
            self._begin(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
            self.write_first(logits)
            return True
        return False

    @property
    def room(self) -> int:
        """Tokens left until the maximum."""
        return self._rules.max_new_tokens - len(self.token_ids)

    @property
    def ids(self) -> Integers:
        """Prompt and answer so far (tokens,)."""
        return self._ids[: self._prompt_tokens + len(self.token_ids)]

    def _device_ids(self) -> torch.Tensor:
        """Return prompt and answer so far (1, tokens), where the logits are."""
        if self._on_device is None:
            self._on_device = torch.from_numpy(self._ids).to(self._device)
        return self._on_device[None, : len(self.ids)]

    def _distinct_ids(self) -> Integers:
        """Return the tokens of prompt and answer so far, in any order."""
        if self._distinct is None:  # nobody reads them
            return self._ids[:0]
        return self._distinct[: len(self._distinct) - self.room]

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose the next token from logits (vocab_size,); see `choose_alike`."""
        with self._failing_alone():
            return self.choose_alike([self], logits.unsqueeze(0))[0]
        return likeliest(logits)

    @classmethod
    def choose_alike(cls, answers: Sequence[DecodeSequence], logits: torch.Tensor) -> torch.Tensor:
        """Choose the next tokens of answers that are `alike`, or of one answer, from logits (answers, vocab_size).

        Every row is computed as if there were no others, with random numbers of its own. The tokens stay on the
        device, so that many are copied at once.

        Returns the tokens (answers,), `NOTHING_TO_CHOOSE` where the settings leave no probability that is finite.
        """
        one, device = answers[0], logits.device
        for row, each in enumerate(answers):
            if each._trace is not None:
                each._trace.see(logits[row])
        if counts := [each._counts for each in answers if each._counts is not None]:
            logits = penalize(logits, one._rules.penalties, counts)
        if one._processors:
            if one.alike is None:
                ids = one._device_ids()
            else:
                ids = torch.from_numpy(stack([each._distinct_ids() for each in answers])).to(device)
            logits = one._processors(ids, logits)
        if one._generator is None:
            return likeliest(logits, NOTHING_TO_CHOOSE)
        probabilities = torch.softmax(logits, dim=-1)
        is_usable = probabilities.sum(-1).isfinite()
        probabilities = probabilities.where(is_usable.unsqueeze(-1), 1.0)
        # As torch.multinomial draws one token, which on a GPU would wait for the result of every answer.
        draws = torch.empty_like(probabilities, memory_format=torch.contiguous_format)
        for row, each in enumerate(answers):
            draws[row].exponential_(generator=each._generator)
        return torch.div(probabilities, draws, out=draws).argmax(-1).where(is_usable, NOTHING_TO_CHOOSE)

    def write_first(self, logits: torch.Tensor | None) -> None:
        """Choose the first token from the prompt's logits (vocab_size,), unless none is wanted."""
        if self.error is None and self.finish_reason is None and logits is not None:
            self.write(int(self.choose(logits.clone())))  # a copy: other samples begin with the same logits

    def fail(self, why: str) -> None:
        self.error, self.finish_reason = why, "error"

    def write(self, token: int) -> None:
        """Append a chosen token, and set `finish_reason` if it is the last."""
        rules = self._rules
        if self.error is not None:
            return
        if token == NOT_FINITE:
            self.fail(explain_not_finite(rules.model.dtype))
        elif token == NOTHING_TO_CHOOSE:
            self.fail(
                f"no token can be chosen with {rules.settings}: with these the probabilities are not finite; expected "
                f"a temperature of about 0.01 to 100, or 0 for the likeliest tokens"
            )
        elif token in rules.ends:
            self.finish_reason = "stop"
        else:
            with self._failing_alone():
                self._append(token)

    def _append(self, token: int) -> None:
        rules = self._rules
        if self._trace is not None:
            self._trace.write(token)
        self.token_ids.append(token)
        last = len(self.ids) - 1
        self._ids[last] = token
        if self._distinct is not None:
            self._distinct[-1 - self.room] = token
        if self._counts is not None:
            self._counts.add(token)
        if self._on_device is not None and self._device.type != "cpu":
            self._on_device[last] = token
        if rules.stop and rules.ends_in_stop(self.token_ids):
            self.finish_reason = "stop"
        elif (
            rules.stop_repetition and not len(self.token_ids) % TOKENS_PER_CHECK and ends_in_repetition(self.token_ids)
        ):
            self.finish_reason = "repetition"
        elif len(self.token_ids) == rules.max_new_tokens:
            self.finish_reason = "length"

    def answer(self) -> Answer:
        """Return the finished answer; of several, the first one, with all of them as its samples."""
        first, *others = self._done
        if not others:
            return first
        return replace(first, samples=tuple(self._done), seconds=sum(one.seconds for one in self._done))

    def _finished(self) -> Answer:
        """Return the finished answer, cut before its first stop string."""
        assert self.finish_reason is not None
        rules = self._rules
        if rules.reasoning is None:
            reasoning, text = "", rules.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        else:
            is_open = rules.reasoning.is_open(rules.tokenizer, self._ids[: self._prompt_tokens].tolist())
            reasoning, text = rules.reasoning.split(rules.tokenizer, self.token_ids, is_open=is_open)
        return Answer(
            token_ids=tuple(self.token_ids),
            text=text[: rules.find_stop(text)],
            reasoning=reasoning[: rules.find_stop(reasoning)],
            finish_reason=self.finish_reason,
            seconds=time.perf_counter() - self._began,
            steps=self.steps,
            logprobs=None if self._trace is None else self._trace.finish(rules.tokenizer, self.token_ids),
            scores=self.scores,
        )


def choose_tokens(answers: Sequence[DecodeSequence | None], logits: torch.Tensor) -> list[int]:
    """Choose the next token of each answer from logits (answers, vocab_size), those that are `alike` together.

    The result is `NOT_FINITE` if an answer's logits are not, `NOTHING_TO_CHOOSE` as in `DecodeSequence.choose_alike`,
    and 0 instead of answers that other ranks choose.
    """
    greedy = likeliest(logits)  # of all answers at once: few kernels on a GPU
    alike: dict[object, list[tuple[int, DecodeSequence]]] = {}
    for row, each in enumerate(answers):
        if each is not None and not each.is_greedy:
            alike.setdefault(each if each.alike is None else each.alike, []).append((row, each))
    chosen, most = greedy.clone() if alike else greedy, max(1, MOST_LOGITS // logits.shape[-1])
    for group in alike.values():
        for first in range(0, len(group), most):
            rows, some = zip(*group[first : first + most], strict=True)
            chosen[list(rows)] = _choose_for(some, logits if len(rows) == len(logits) else logits[list(rows)])
    if alike:
        chosen = chosen.where(greedy != NOT_FINITE, greedy)
    return [0 if each is None else token for each, token in zip(answers, chosen.tolist(), strict=True)]


def _choose_for(answers: Sequence[DecodeSequence], logits: torch.Tensor) -> torch.Tensor:
    """Choose the next tokens of answers that are alike; each by itself if that fails for all of them together."""
    if len(answers) > 1:
        generators = [each._generator for each in answers if each._generator is not None]
        states = [each.get_state() for each in generators]
        with contextlib.suppress(Exception):
            return DecodeSequence.choose_alike(answers, logits)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)  # the same random numbers again
    return torch.stack([each.choose(row) for each, row in zip(answers, logits, strict=True)])
