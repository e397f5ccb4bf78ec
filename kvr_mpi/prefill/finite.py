"""Logits that are NaN or infinite: how they are noticed, and what a user is told.

Half precision overflows in some models. transformers would then generate token 0 to the end.
"""

from __future__ import annotations

import torch

# Instead of a token whose logits are not finite, so that nothing more than tokens is copied from a GPU in a step.
NOT_FINITE = -1


def likeliest(logits: torch.Tensor, missing: int = NOT_FINITE) -> torch.Tensor:
    """Return the likeliest tokens (rows,) of logits (rows, vocab_size), or `missing` where the largest is not finite.

    NaN counts as the largest. Some models give tokens that they never generate a logit of -inf; these are no error.
    """
    largest, tokens = logits.max(-1)
    return tokens.where(largest.isfinite(), missing)


def explain_not_finite(dtype: torch.dtype) -> str:
    """Say that a model's logits are NaN or infinite, and what to try."""
    remedy = {
        torch.float16: "values above 65,504 overflow; try model.dtype = 'bfloat16', which has the range of float32, or "
        "'float32'",
        torch.bfloat16: "try model.dtype = 'float32'",
    }.get(dtype, "the weights may contain such values: compare the model's files with the original, or copy them again")
    return f"the model's logits are not finite (NaN or infinite) in {str(dtype).removeprefix('torch.')}: {remedy}"
