"""Gradient buckets, their overlapped all-reduce and its time. The root of parallel imports it."""
