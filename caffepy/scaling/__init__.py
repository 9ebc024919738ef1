"""Training on more devices: profile, all-reduce cost, overlap, prediction; the all-reduce benchmark.

Imported by cli.
"""
