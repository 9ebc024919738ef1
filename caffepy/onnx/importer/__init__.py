"""ONNX as a Caffe net: one function an operator, registered where it is defined. `read` is what others call.

cli imports it.
"""
