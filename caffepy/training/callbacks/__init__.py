"""What may be attached to a training run: loggers, weight averages, early stops, checks."""
