"""Training for the user's own classes: data sets in folders, databases, and a model's solver and nets for them.

Imported by cli.
"""

from caffepy.project.create import CLASSIFIERS, DETECTORS, Created, Project, create_project

__all__ = ["CLASSIFIERS", "DETECTORS", "Created", "Project", "create_project"]
