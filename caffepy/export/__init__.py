"""Nets go out and come in: ONNX, PyTorch, int8, pictures. Imported by infer, cli and pycaffe."""
