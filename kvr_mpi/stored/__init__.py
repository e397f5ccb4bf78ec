"""Find and reuse stored keys and values of earlier jobs."""
