"""Nets: filtering, automatic splits, wiring, flat parameters, forward and backward.

solvers and all parts above import it.
"""

from caffepy.net.net import Net
from caffepy.net.parameters import Parameter, ParameterBuffer

__all__ = ["Net", "Parameter", "ParameterBuffer"]
