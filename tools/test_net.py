"""Caffe's program of this name; the same as `caffepy test_net`."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["test_net", *sys.argv[1:]]))
