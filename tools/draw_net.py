"""Caffe's draw_net.py: `caffepy draw_net` under its old name."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["draw_net", *sys.argv[1:]]))
