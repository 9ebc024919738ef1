"""Caffe's tools that make and measure data sets. cli/main.py imports a tool when it is called."""
