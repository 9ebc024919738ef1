"""Caffe's tools that make and measure data sets."""
