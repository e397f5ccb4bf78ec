"""Planning: which documents run on which ranks, and when."""
