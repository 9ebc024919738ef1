"""A solver's nets: how they are made (`factory`), and which kernels they will call (`foreseen`).

The root of solvers, training, plan and cli import it.
"""
