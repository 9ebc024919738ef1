"""The ranks of a job, their launcher, and the facts that each rank knows of the others."""
