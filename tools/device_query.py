"""Caffe's program of this name; the same as `caffepy device_query`."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["device_query", *sys.argv[1:]]))
