"""Caffe's program of this name; the same as `caffepy convert_mnist_siamese_data`."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert_mnist_siamese_data", *sys.argv[1:]]))
