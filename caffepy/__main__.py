"""`python -m caffepy` is the command `caffepy`."""

from __future__ import annotations

import sys

from caffepy.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
