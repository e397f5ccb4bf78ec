"""Prefill: the strategies, and a pass over one prompt that yields keys, values and first logits."""
