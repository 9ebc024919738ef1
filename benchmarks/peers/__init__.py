"""What the benchmarks compare with: a prototxt described, and the same net built from that in PyTorch."""
