"""The Python interface, imported lazily by `kvr_mpi`."""
