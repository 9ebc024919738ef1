"""`caffepy launch`: starts ranks here, by mpirun or under Slurm, and starts them again after a failure."""
