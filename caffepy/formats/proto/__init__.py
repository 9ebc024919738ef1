"""The schema of Caffe's files, as protoc makes it of proto/caffe.proto. Every part may import it.

With CAFFEPY_PROTO, `--proto` or `caffepy.register_proto` it is the union with a fork's `caffe.proto` (`schemas.py`).
"""

from __future__ import annotations

import os as _os

if _os.environ.get("CAFFEPY_PROTO"):
    from pathlib import Path as _Path

    from caffepy.formats.proto.schemas import load_fork_schema as _load

    _load(_Path(_os.environ["CAFFEPY_PROTO"]).resolve())
