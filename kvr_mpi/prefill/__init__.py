"""One prompt to its keys, values and first logits: the cache seam, the attention blocks, the strategies."""
