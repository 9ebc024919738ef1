"""Nets as functions: `caffepy.load` gives one that is called with arrays. Above snapshot; pycaffe and cli import it."""
