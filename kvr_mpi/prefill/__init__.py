"""Prefill: a pass over one prompt, by a chain or one rank, that yields keys, values and first logits."""
