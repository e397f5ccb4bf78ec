"""A job made ready on all ranks: planned, its ranks laid out, its model loaded, its machine measured."""
