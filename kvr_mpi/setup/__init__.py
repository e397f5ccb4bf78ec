"""Prepare a job on all ranks: plan it, lay out the ranks, load the model, and measure the machine."""
