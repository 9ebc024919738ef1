"""ONNX models as Caffe's nets: `read` is what others call, with one function an operator."""
