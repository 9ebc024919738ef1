"""Nets as ONNX: `write` is what others call; `rules` has one small function a layer type."""
