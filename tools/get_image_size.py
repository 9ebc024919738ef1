"""Caffe's program of this name; the same as `caffepy get_image_size`."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["get_image_size", *sys.argv[1:]]))
