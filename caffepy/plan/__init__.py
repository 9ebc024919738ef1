"""Predicts how fast a net trains on more devices: profile, cost of an all-reduce, overlap, table and plot.

cli imports it.
"""
