"""Caffe's tools as commands: thin faces of functions in the part that each belongs to."""
