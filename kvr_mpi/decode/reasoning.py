"""Separates the reasoning of a model from its answer.

Models that reason write their reasoning first, between markers that their chat template contains. Some templates end
with the first marker, so that the model continues after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PROMPT_TAIL = 16  # tokens of a prompt that contain a marker at its end
# Fewer tokens than models usually write before they answer.
FEW_TOKENS = 1024

# Markers around the reasoning, and what may stand before the second one, as written by chat templates.
FORMATS = (
    ("<think>", "</think>", ""),
    ("<seed:think>", "</seed:think>", ""),
    ("<mm:think>", "</mm:think>", ""),
    ("[THINK]", "[/THINK]", ""),
    ("<|START_THINKING|>", "<|END_THINKING|>", ""),
    ("<|channel>thought", "<channel|>", ""),  # Gemma 4
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", ""),  # Apriel
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|><|start|>assistant"),  # gpt-oss
)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning.

    start, end : markers before and after it.
    between : text before the second marker that belongs to neither part.
    """

    start: str
    end: str
    between: str

    def is_open(self, tokenizer: Any, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends within the reasoning."""
        return bool(tokenizer.decode(prompt_ids[-PROMPT_TAIL:]).rstrip().endswith(self.start))

    def describe(self, tokenizer: Any, prompt_ids: Sequence[int], most: int, *, follows_schema: bool) -> str | None:
        """Return a warning if answers of at most `most` tokens to prompts with this end may not contain an answer."""
        tail = tokenizer.decode(prompt_ids[-PROMPT_TAIL:]).rstrip()
        advice = "prompt.template_args switches the reasoning of many models off, e.g. {enable_thinking = false}"
        if follows_schema:
            if not tail.endswith(self.start):
                return None
            return f"prompts end with {self.start}, but answers follow the JSON schema from their first token: {advice}"
        if most >= FEW_TOKENS or tail.endswith(self.end):
            return None
        return (
            f"this model may reason before it answers, and answers would be empty if that took all of the {most} "
            f"tokens of generation.max_new_tokens: raise it, or leave the reasoning out ({advice})"
        )

    def split(self, tokenizer: Any, token_ids: Sequence[int], *, is_open: bool) -> tuple[str, str]:
        """Return the reasoning and the answer in the generated tokens; there is no answer before the second marker.

        Text that does not begin with a marker, after a prompt that is not `is_open`, is all answer.
        """
        written = tokenizer.decode(token_ids)
        if not is_open and not written.lstrip().startswith((self.start, self.end)):
            return "", tokenizer.decode(token_ids, skip_special_tokens=True)
        reasoning, end, _ = written.partition(self.end)
        reasoning = reasoning.strip().removeprefix(self.start).removesuffix(self.between).strip()
        if not end:
            return reasoning, ""
        # The marker may be several tokens, and its last token may continue with text.
        stop = bisect_left(
            range(len(token_ids)), True, key=lambda last: self.end in tokenizer.decode(token_ids[: last + 1])
        )
        _, _, rest = tokenizer.decode(token_ids[: stop + 1]).partition(self.end)
        answer = rest + tokenizer.decode(token_ids[stop + 1 :], skip_special_tokens=True)
        return reasoning, answer.lstrip()


def reasoning_format(tokenizer: Any) -> ReasoningFormat | None:
    """Return how a model's chat template marks its reasoning; None if it has none, or the model has no template."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    template = str(tokenizer.get_chat_template())
    for start, end, between in FORMATS:
        if end in template:
            return ReasoningFormat(start, end, between)
    return None
