"""Caffe's program of this name; the same as `caffepy finetune_net`."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["finetune_net", *sys.argv[1:]]))
