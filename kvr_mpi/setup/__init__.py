"""Preparation of a job on all ranks: planning, layout of ranks, loading the model, measuring the machine."""
