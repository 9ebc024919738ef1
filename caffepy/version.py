"""The version of caffepy, below everything, so that any module may ask for it."""

__version__ = "0.2.0"

CAFFE_VERSION = "0.17.4"
"""The Caffe that `caffe -version` and `caffe.__version__` name: NVIDIA's, whose meaning of batch_size caffepy has."""
