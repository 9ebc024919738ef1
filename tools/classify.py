"""Caffe's classify.py: `caffepy classify` under its old name."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["classify", *sys.argv[1:]]))
