"""What Python programs and notebooks call; `kvr_mpi` itself names all of it, and imports it when it is asked for."""
