"""Loggers: they take a training's values for TensorBoard, CSV, JSON Lines, Weights & Biases, MLflow or a program.

`watch.py` collects the values of rank 0's first solver and hands them to loggers, which know no solver. parallel
imports it. Each adapter is the only module that imports its library.
"""

from caffepy.loggers.contract import Logger, Run

__all__ = ["Logger", "Run"]
