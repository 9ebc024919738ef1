"""`caffepy deploy` as a program."""

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["deploy", *sys.argv[1:]]))
