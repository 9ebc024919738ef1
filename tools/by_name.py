"""Runs the command of caffepy that has the name of the called file; Caffe's names are links to this file."""

import sys
from pathlib import Path

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main([Path(sys.argv[0]).stem, *sys.argv[1:]]))
