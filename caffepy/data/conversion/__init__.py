"""Caffe's data tools: databases from images, mean images, label maps; imported by cli."""
