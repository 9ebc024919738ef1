"""A key-value store between processes, for rendezvous and liveness. communicators, control and distributed import
it.
"""
