"""Caffe's program of this name; the same as `caffepy create_label_map`."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["create_label_map", *sys.argv[1:]]))
