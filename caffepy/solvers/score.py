"""The score that an option names: an output of a test net, or its loss, and whether larger values are better.

Used by `retention.py` (`--keep-best`) and `early_stop.py` (`--early-stop`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from caffepy.errors import ConfigError
from caffepy.net import Net
from caffepy.registry import suggest

LOSS = "loss"
"""The score that stands for the sum of a test net's losses, where no output has this name."""


class TestScore:
    """One number from the results of a test.

    Smaller is better for the tops of loss layers and for `loss`, larger for all others.

    Args:
        option: that names the score, for messages.
        name: an output of a test net, or `loss`.
        test_nets: in Caffe's order; the first that has the score counts.
        test_interval: the solver's; 0: there are no tests.

    Raises:
        ConfigError: there are no tests, or no test net has the score.
    """

    __test__ = False  # keeps pytest from collecting this class

    def __init__(self, option: str, name: str, test_nets: Sequence[Net], test_interval: int) -> None:
        if not test_nets or not test_interval:
            raise ConfigError(f"{option} {name} needs tests: set test_iter and test_interval in the solver")
        having = [index for index, net in enumerate(test_nets) if name in net.outputs]
        losing = [index for index, net in enumerate(test_nets) if name == LOSS and _loss_weights(net)]
        if not having and not losing:
            known = [output for net in test_nets for output in net.outputs]
            raise ConfigError(f"{option} {name}: no test net has such an output; {suggest(name, known)}")
        self.name = name
        self._index = (having or losing)[0]
        self._weights = _loss_weights(test_nets[self._index])
        smaller = not having or name in self._weights
        self.sign = -1.0 if smaller else 1.0
        """Multiplied by a score it makes larger numbers the better ones."""

    def value(self, scores: Sequence[Mapping[str, np.ndarray]]) -> float | None:
        """Return the score in a test's results; None if the test ended before its net."""
        if self._index >= len(scores):
            return None
        found = scores[self._index]
        if self.name in found:
            return float(found[self.name].mean())
        return sum(weight * float(found[name].sum()) for name, weight in self._weights.items())


def _loss_weights(net: Net) -> dict[str, float]:
    """Return the outputs of a net that are losses, with their weights."""
    weights = {name: float(net.loss_weight(blob)) for name, blob in net.outputs.items()}
    return {name: weight for name, weight in weights.items() if weight}
