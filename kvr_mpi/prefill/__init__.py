"""One prompt to its keys, values and first logits: the strategies, and a pass over a prompt."""
