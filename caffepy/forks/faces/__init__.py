"""Losses and layers that learn a metric: faces and retrieval."""
