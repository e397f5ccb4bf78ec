"""Decoding: from the first logits to the answer."""
