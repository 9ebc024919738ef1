"""Options, declared once with their defaults and help: how they are declared, types of values, those of a solver.

Nothing heavy is imported, so that `--help` stays quick. All parts from the backend up import it.
"""

from __future__ import annotations

from caffepy.options.extension import ExtensionOptions
from caffepy.options.solver import ExecutionOptions, RetentionPolicy

__all__ = ["ExecutionOptions", "ExtensionOptions", "RetentionPolicy"]
