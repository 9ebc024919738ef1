"""Loggers: TensorBoard, CSV, JSON Lines, Weights & Biases, MLflow or a program.

`watch` collects the values of rank 0's first solver and hands them to loggers, which know no solver. Each adapter is
the only module that imports its library.
"""
