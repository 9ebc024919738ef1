"""Caffe's data tools: databases from images, images with boxes, MNIST and CIFAR-10; label maps; imported by cli."""
