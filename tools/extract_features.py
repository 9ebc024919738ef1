"""Caffe's program of this name; the same as `caffepy extract_features`."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["extract_features", *sys.argv[1:]]))
