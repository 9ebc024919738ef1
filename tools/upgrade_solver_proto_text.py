"""Caffe's program of this name; the same as `caffepy upgrade_solver_proto_text`."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["upgrade_solver_proto_text", *sys.argv[1:]]))
