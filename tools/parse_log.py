"""Caffe's parse_log.py: `caffepy parse_log` under its old name."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["parse_log", *sys.argv[1:]]))
