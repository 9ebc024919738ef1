"""Training for the user's own classes: data sets, databases, and a model's solver and nets for them.

Imported by cli.
"""
