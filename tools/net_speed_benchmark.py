"""Caffe's program of this name; the same as `caffepy net_speed_benchmark`."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["net_speed_benchmark", *sys.argv[1:]]))
