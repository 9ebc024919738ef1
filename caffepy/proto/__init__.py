"""The schema of Caffe's files, as protoc makes it of proto/caffe.proto. Every part may import it."""
