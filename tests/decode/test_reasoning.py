"""What a model thinks before it answers is kept apart from the answer."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from made_corpora import with_chat
from made_jobs import with_settings
from rows import ready
from transformers import AutoTokenizer, GenerationConfig
from transformers.tokenization_utils_base import AddedToken

from kvr_mpi.decode.grammar import Grammars
from kvr_mpi.decode.reasoning import FORMATS, ReasoningFormat, reasoning_format
from kvr_mpi.decode.sampling import Answer, DecodeSequence, SamplingParams
from kvr_mpi.documents.document import AS_THE_JOB, OwnGeneration
from kvr_mpi.store.batch_responses import response_of
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results

START, END = "<think>", "</think>"
# The ends of prompts of Qwen 3 and DeepSeek R1.
CLOSED, OPEN = "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"
TEMPLATE = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}\n{% endfor %}<|im_start|>assistant\n<think>\n"
THOUGHT, SAID = "The user wants a number. Is it 4?", "It is **5**: see <b>page 2</b>."


def marked(tokenizer: Any, *texts: str, special: bool) -> Any:
    """Return a copy of a tokenizer that has tokens with these texts."""
    other = copy.deepcopy(tokenizer)
    other.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts if text])
    return other


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["special", "added", "plain"])
@pytest.mark.parametrize(("start", "end", "between"), FORMATS)
def test_reasoning_ends_at_the_second_marker(
    start: str, end: str, between: str, kind: str, small_tokenizer: Any
) -> None:
    own = small_tokenizer if kind == "plain" else marked(small_tokenizer, start, end, special=kind == "special")
    found = ReasoningFormat(start, end, between)
    for space in ("", "\n", "\n\n"):
        whole = f"{start}{space}{THOUGHT}{space}{between}{end}{space}"
        for written in (f"{whole}{SAID}", f"\n{whole}{SAID}"):
            assert found.split(own, ids_of(own, written), is_open=False) == (THOUGHT, SAID)
        opened = f"{THOUGHT}{space}{between}{end}{space}{SAID}"
        assert found.split(own, ids_of(own, opened), is_open=True) == (THOUGHT, SAID)
        assert found.split(own, ids_of(own, whole), is_open=False) == (THOUGHT, "")
    assert found.split(own, ids_of(own, f"{start}\n{THOUGHT}"), is_open=False) == (THOUGHT, "")
    assert found.split(own, ids_of(own, THOUGHT), is_open=True) == (THOUGHT, "")
    assert found.split(own, ids_of(own, f"{end}{SAID}"), is_open=False) == ("", SAID)
    assert found.split(own, ids_of(own, SAID), is_open=False) == ("", SAID)
    assert found.split(own, [], is_open=False) == ("", "")
    about = f"{SAID} It writes {start} and {end} around it."
    shown = own.decode(ids_of(own, about), skip_special_tokens=True)
    assert found.split(own, ids_of(own, about), is_open=False) == ("", shown)


@pytest.mark.quick
def test_the_chat_template_says_how_reasoning_is_marked(tokenizer: Any) -> None:
    assert reasoning_format(with_chat(tokenizer, None)) is None
    assert reasoning_format(tokenizer) is None, "SmolLM2 does not reason"
    for start, end, between in FORMATS:
        assert reasoning_format(with_chat(tokenizer, f"{{{{ '{end}' }}}}")) == ReasoningFormat(start, end, between)


def written(tokenizer: Any, prompt: str, text: str, own: OwnGeneration = AS_THE_JOB, **settings: Any) -> Answer:
    """Return the answer that consists of these tokens."""
    job = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    rules = SamplingParams(
        ready("llama-gqa").model,
        tokenizer,
        job,
        settings.pop("stop", ()),
        400,
        Grammars(tokenizer, ()),
        reasoning=ReasoningFormat(START, END, ""),
    )
    rules = rules if own == AS_THE_JOB else rules.adapted(own)
    answer = DecodeSequence(rules, ids_of(tokenizer, prompt), 0, rules.model.device)
    for token in ids_of(tokenizer, text):
        if answer.finish_reason is None:
            answer.write(token)
    answer.finish_reason = answer.finish_reason or "length"
    answer.begin_next(None)
    return answer.answer()


@pytest.mark.quick
def test_a_prompt_may_end_within_the_reasoning(small_tokenizer: Any) -> None:
    own = marked(small_tokenizer, START, END, special=False)
    thought = f"{THOUGHT}\n{END}\n\n"
    for prompt, text in ((OPEN, f"{thought}{SAID}"), (CLOSED, f"{START}\n{thought}{SAID}")):
        answer = written(own, prompt, text)
        assert (answer.reasoning, answer.text) == (THOUGHT, SAID)
        assert [*answer.token_ids] == ids_of(own, text), "all of them are kept"
    for prompt in (CLOSED, f"{OPEN}{END}\n\n"):
        assert written(own, prompt, SAID).text == SAID
    answer = written(own, OPEN, THOUGHT)
    assert (answer.reasoning, answer.text, answer.finish_reason) == (THOUGHT, "", "length")


@pytest.mark.quick
def test_stop_strings_apply_to_reasoning_and_answer(small_tokenizer: Any) -> None:
    answer = written(small_tokenizer, OPEN, f"{THOUGHT}{END}{SAID}", stop=("page",))
    assert (answer.reasoning, answer.text, answer.finish_reason) == (THOUGHT, "It is **5**: see <b>", "stop")
    answer = written(small_tokenizer, OPEN, f"{THOUGHT}{END}{SAID}", stop=("number",))
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("The user wants a ", "", "stop")


@pytest.mark.quick
def test_completions_and_answers_with_a_schema_have_no_reasoning(small_tokenizer: Any) -> None:
    for own in (OwnGeneration(keep_reasoning=True), OwnGeneration(json_schema='{"type": "string"}')):
        job = SamplingParams(
            None,
            small_tokenizer,
            GenerationConfig(),
            (),
            9,
            Grammars(small_tokenizer, ()),
            reasoning=ReasoningFormat(START, END, ""),
        )
        assert job.adapted(own).reasoning is None
    assert written(small_tokenizer, OPEN, f"a{END}b", OwnGeneration(keep_reasoning=True)).text == f"a{END}b"


@pytest.mark.quick
def test_responses_of_batch_files_have_the_reasoning_apart() -> None:
    request = '{"custom_id": "a", "url": "/v1/chat/completions"}'
    record = Record("a", "done", columns=request, answer="Five.", reasoning="Hm.", finish_reason="stop")
    message = response_of(record, "m")["response"]["body"]["choices"][0]["message"]
    assert message == {"role": "assistant", "reasoning": "Hm.", "content": "Five."}


@pytest.mark.parametrize("parts", [False, True])
def test_answers_that_end_within_the_reasoning_are_counted(
    parts: bool, job: Path, tmp_path: Path, tiny_model_dir: Path, run_here: Any
) -> None:
    """A part of a text without an answer would be missing in the final answer, so the document is an error."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = TEMPLATE
    model = shutil.copytree(tiny_model_dir, tmp_path / "thinks")
    tokenizer.save_pretrained(model)
    settings = [f"model.path={model}", "prompt.chat_template=true"]
    settings += ["prompt.too_long=split", "prompt.max_tokens=60"] * parts
    done = run_here(1, [job, *with_settings(*settings)])
    records = list(open_results(tmp_path / "out"))
    assert "may reason before it answers" in done.stderr
    if parts:
        assert done.returncode == 65
        assert any("still reasoning after" in record.error for record in records), records
    else:
        assert done.returncode == 0, done.stderr
        assert all(not record.answer and record.reasoning and record.token_ids for record in records)
        assert f"{len(records)} of {len(records)} answers empty, since the model was still reasoning" in done.stderr
