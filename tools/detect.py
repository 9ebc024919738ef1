"""Caffe's detect.py: `caffepy detect` under its old name."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["detect", *sys.argv[1:]]))
