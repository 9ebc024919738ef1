"""Caffe's data tools: databases from images, mean images, label maps. Used by cli."""
