"""Elements moved by index on one GPU. Only `cuda/backend.py` imports this package."""
