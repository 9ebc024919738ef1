"""A net as ONNX: one small function a layer type, registered where it is defined. `write` is what others call.

cli, inference and onnx/importer import it.
"""
