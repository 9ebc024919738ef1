"""Caffe's program of this name; the same as `caffepy upgrade_net_proto_binary`."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["upgrade_net_proto_binary", *sys.argv[1:]]))
