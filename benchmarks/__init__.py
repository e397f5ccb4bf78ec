"""What proves the claims about kvr-mpi: benchmarks, rivals, the papers' tables, and the sweep of architectures."""
