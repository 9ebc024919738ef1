"""Caffe's program of this name; the same as `caffepy compute_image_mean`."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compute_image_mean", *sys.argv[1:]]))
