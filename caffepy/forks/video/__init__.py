"""Nets of clips: C3D and its readers of volumes."""
