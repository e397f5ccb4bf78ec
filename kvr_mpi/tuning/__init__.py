"""The best slices on this machine: rates measured here, a few runs, and lookup tables of what came out."""
