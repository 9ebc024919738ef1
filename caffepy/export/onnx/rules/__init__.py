"""What each layer type of Caffe becomes in ONNX, one function a type."""
