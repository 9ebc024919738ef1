"""What Caffe's tools do to data: databases out of images, their mean, maps of labels. cli imports it."""
