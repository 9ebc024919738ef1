"""Prediction of training speed on more devices: profile, all-reduce cost, overlap, table and plot.

Imported by cli.
"""
