"""kvr-mpi: long-document LLM batch work over MPI (KV-Runahead, Cho et al., ICML 2024)."""

__version__ = "0.1.0"
