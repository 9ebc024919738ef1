"""Passes of convolutions with one channel in a group that go their own ways. ../narrow.py imports them."""
