"""What the names of `import caffe` are made of: devices and their host arrays, parts of `Net`, errors."""
