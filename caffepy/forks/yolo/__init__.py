"""YOLO: boxes of grid cells, their losses and readers."""
