"""Nets to ONNX and back: `export` writes a net as ONNX, `importer` reads ONNX as a net; cli imports it."""
