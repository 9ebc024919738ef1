"""Communicators of threads, shared memory, MPI, NCCL and the store, and combinations of them.

`start(collective)` is the only primitive.
"""
