"""The ranks of a job, who started them, and what each knows of the others."""
