"""Passes of convolutions with one channel in a group that go their own ways. ../grouped.py imports them."""
