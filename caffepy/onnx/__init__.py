"""ONNX conversion: `export` writes nets as ONNX, `importer` reads ONNX as nets. Imported by cli and inference."""
