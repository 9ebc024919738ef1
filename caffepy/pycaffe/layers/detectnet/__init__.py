"""Python layers that score DetectNet (NVIDIA Caffe's `python/caffe/layers/detectnet`)."""
