"""Tuning on this machine: measured rates, a few runs, and lookup tables of slices."""
