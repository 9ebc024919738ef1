"""Nets: filtering, automatic splits, wiring, flat parameters, forward and backward.

Imported by forks and all parts above.
"""

from caffepy.net.net import Net
from caffepy.net.parameters import Parameter, ParameterBuffer

__all__ = ["Net", "Parameter", "ParameterBuffer"]
