"""Costs of prompts in seconds and bytes, counted and computed from a machine's rates."""
