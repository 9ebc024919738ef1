"""Caffe's plot_training_log.py: `caffepy plot_training_log` under its old name."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["plot_training_log", *sys.argv[1:]]))
