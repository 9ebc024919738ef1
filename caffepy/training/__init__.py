"""A training run: P2PManager, P2PSync, the solver, update rules, policies, evaluation and options.

Imported by scaling, scaffold, pycaffe and cli. The folder is not named `train`, which is a function of the package.
"""
