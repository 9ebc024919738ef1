"""Solvers: the training loop, the update rules, learning-rate policies, tests and snapshots.

parallel, plan and all parts above import it.
"""

from caffepy.solvers.callbacks import Action, SingleDevice, SolverCallback
from caffepy.solvers.solver import Solver, TrainContext, create_solver

__all__ = ["Action", "SingleDevice", "Solver", "SolverCallback", "TrainContext", "create_solver"]
