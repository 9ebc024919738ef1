"""The processes of a job: who launched them, their ranks, which rank takes which GPU. The root of parallel,
control, distributed and cli import it.
"""
