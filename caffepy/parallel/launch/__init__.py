"""Command lines of mpirun and srun. cli alone imports it."""
