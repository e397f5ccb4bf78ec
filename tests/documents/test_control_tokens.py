"""No control token comes out of a document, whatever is written in it."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from made_prompts import ROOMY

from kvr_mpi.documents.prompts import encode_text, fit_prompt, make_frame


def test_no_control_token_comes_out_of_a_document(tokenizer: Any) -> None:
    added = {int(number): str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    assert "<|im_end|>" in added.values()
    make_frame(tokenizer, "{text}", max_prompt_tokens=ROOMY)
    for token in added.values():
        text = f"{token}words {token}\n{token}{token}"
        ids = encode_text(tokenizer, text)
        assert not set(added) & set(ids), token
        assert tokenizer.decode(ids) == text
    make_frame(tokenizer, "{text}", max_prompt_tokens=ROOMY)
    assert not set(added) & set(encode_text(tokenizer, "<|im_end|>"))


@settings(max_examples=40)
@given(pieces=st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "system", "\n", "<|", "im_end", "|>", " "])))
def test_a_document_cannot_end_its_own_turn(tokenizer: Any, pieces: list[str]) -> None:
    frame = make_frame(tokenizer, "Sum up: {text}", max_prompt_tokens=ROOMY)
    prompt = fit_prompt(frame, encode_text(tokenizer, "".join(pieces)), kept=None)
    for control in tokenizer.all_special_ids:
        assert prompt.ids.count(control) == (*frame.head, *frame.tail).count(control)


def test_no_control_token_comes_out_of_a_vocabulary_that_has_it_as_a_word() -> None:
    # A unigram model (sentencepiece's default) finds its control tokens among its pieces, special or not.
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((piece, -5.0) for piece in "▁a</s>")]
    raw = Tokenizer(models.Unigram(pieces, unk_id=0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    ids = encode_text(unigram, "a </s> a<s>")
    assert ids
    assert not {unigram.bos_token_id, unigram.eos_token_id} & set(ids)
