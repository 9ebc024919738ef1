"""Starts a command as several ranks without MPI, with the variables that torchrun sets, and waits for all of them.

Unlike torchrun it ends nobody: what is tested is that the ranks end each other. Its status is that of the first rank
that failed.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys


def main(count: int, command: list[str]) -> int:
    """The first status of the ranks' that is not 0, as a shell has it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"CAFFEPY_JOB_SECRET": secrets.token_hex(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, **size, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]
    statuses = [rank.wait() for rank in ranks]
    return next((status if status > 0 else 128 - status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
