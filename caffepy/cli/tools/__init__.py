"""Caffe's tools as commands, each a thin face of a function in the part that it belongs to.

cli/main.py imports a tool when it is called.
"""
