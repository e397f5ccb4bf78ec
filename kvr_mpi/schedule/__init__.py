"""Which documents on which ranks, and when."""
