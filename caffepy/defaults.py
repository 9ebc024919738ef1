"""Choices and defaults of training that the command line shows; without imports, so that `--help` stays quick."""

from __future__ import annotations

MATH_MODES = ("fp32", "tf32")
"""How a GPU multiplies: in full float32, or on tensor cores, which round factors to ten bits of mantissa."""
SIGNAL_EFFECTS = ("stop", "snapshot", "none")
"""What a signal may do."""
COMPRESSIONS = ("none", "fp16", "bf16")
"""Gradients travel between ranks, and between GPUs, as they are, as float16 or as bfloat16."""
MAX_SKIPPED = 50
"""Updates skipped in a row, because gradients are not finite, after which training ends."""
TIMEOUT = 300.0
"""Longest wait for another device or rank, in seconds."""
