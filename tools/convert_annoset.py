"""Caffe's program of this name; the same as `caffepy convert_annoset`."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert_annoset", *sys.argv[1:]]))
