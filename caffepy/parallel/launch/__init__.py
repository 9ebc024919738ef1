"""Command lines of mpirun and srun, and the parent of what they start. cli alone imports it."""
