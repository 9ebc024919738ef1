"""The create_annoset.py of SSD's Caffe; the same as `caffepy create_annoset`."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["create_annoset", *sys.argv[1:]]))
