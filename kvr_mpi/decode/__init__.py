"""From the first logits to the answer."""
