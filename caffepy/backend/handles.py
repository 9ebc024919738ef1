"""Objects that a backend returns: graphs, events, timers, asynchronous copies, planned convolutions.

Each backend has its own classes for them (`synchronous.py` and `cuda/graph.py`; the convolutions beside
their kernels).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from caffepy.backend.types import Array, Counter, NormalisedBottom


class Graph(Protocol):
    """Work captured by `Backend.capture`, launched any number of times without Python.

    `CudaGraph` wraps a CUDA graph, `KernelGraph` is a list of CPU kernel calls.
    """

    def launch(self) -> None:
        """Do the work with the arrays' current contents; with a stream, queue it there."""


class Event(Protocol):
    """A point on the backend's stream."""

    def wait(self) -> None:
        """Wait for the work before the event."""


class TimedEvent(Protocol):
    """An event with timing enabled."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds since an earlier event of the same backend; waits until this event is reached."""


class DeviceTimer(Protocol):
    """Stopwatches on the device. `start` and `stop` may be captured.

    Both are queued on the current stream, which need not be the backend's.
    """

    def start(self, index: int) -> None:
        """Start a stopwatch."""

    def stop(self, index: int) -> None:
        """Stop the stopwatch and add the time since `start` to its total."""

    def reset(self) -> None:
        """Set the totals to 0."""

    def totals(self) -> list[float]:
        """Return each stopwatch's total seconds; waits for the device."""

    def times(self) -> list[float]:
        """Return each stopwatch's last start, in seconds of the device's clock; waits for the device."""


class AsyncCopy(Protocol):
    """An asynchronous copy of an array to the host."""

    def get(self) -> Any:
        """Return the NumPy array; waits for the copy."""


class DeviceScalars(Protocol):
    """Numbers that change every iteration, in memory that captured work reads."""

    @property
    def array(self) -> Array:
        """All numbers, float32."""

    @property
    def values(self) -> Sequence[Array | float]:
        """Each number as a Scalar argument of a formula. Read it again each time work is queued."""

    @property
    def counters(self) -> Sequence[Counter | None]:
        """Each counter in the form that `dropout` takes; None if host numbers are used instead."""

    def send(self, values: Sequence[float], counters: Sequence[tuple[int, int]]) -> None:
        """Set the numbers for the work that is queued next."""


class NormalisedForward(Protocol):
    """A convolution fused with the batch normalisation before it."""

    def __call__(self, bottom: NormalisedBottom, weights: Array, y: Array, sums: Array | None) -> None:
        """Compute y and sums as `Convolution.forward` of `bottom`, which is not rounded to its dtype."""


class NormalisedGradients(Protocol):
    """Both gradients of a convolution fused with the batch normalisation before it."""

    def __call__(
        self, bottom: NormalisedBottom, dy: Array, weights: Array, dx: Array, dweights: Array, accumulate: bool
    ) -> None:
        """Compute dx and dweights (+)= for input `bottom`, and the sums over dx for `bottom.sums`."""


class Convolution(Protocol):
    """A convolution of fixed shapes, planned once (algorithm, workspace) and run many times.

    Shapes for two spatial axes: x (N, C, H, W), weights (num_output, C / group, kernel_h, kernel_w),
    bias (num_output,), y (N, num_output, H', W'). x, y, dx, dy and the weights given to `forward` and `backward_data`
    have the planned dtype; bias and dweights are float32.
    """

    @property
    def gives_sums(self) -> bool:
        """Whether `forward` can also compute the channel sums of y."""

    def forward(
        self, x: Array, weights: Array, bias: Array | None, y: Array, relu: bool = False, sums: Array | None = None
    ) -> None:
        """y = weights * x (+ bias), then ReLU if `relu`. Computes cross-correlation, as Caffe does.

        `sums`, float32 of shape (2, num_output), receives the sum of y and of y^2 per channel. It requires `gives_sums`
        and excludes bias and relu.
        """

    def backward_data(self, dy: Array, weights: Array, dx: Array) -> None:
        """dx = the transposed convolution of dy with weights. Deconvolution's forward pass calls it too."""

    def backward_weights(self, x: Array, dy: Array, dweights: Array, accumulate: bool) -> None:
        """dweights (+)= correlation of x with dy, summed over the batch."""

    @property
    def forward_normalised(self) -> NormalisedForward | None:
        """The forward pass fused with the preceding normalisation, or None if separate kernels are faster."""

    @property
    def backward_normalised(self) -> NormalisedGradients | None:
        """Both gradients in one pass, or None if separate passes are faster."""


class BoxLoss(Protocol):
    """SSD's loss for batches of one shape, computed on the device; the layer is `MultiBoxLossLayer`.

    Locations (N, 4 P), scores (N, P classes), priors (1, 2, 4 P) and objects (1, 1, G, 8) are float32.
    """

    def forward(
        self, locations: Array, scores: Array, priors: Array, objects: Array, totals: Array, problem: Array
    ) -> None:
        """totals = the sum of all losses and the number of matches, float32 (2,).

        problem: float32 (10,). Its first element, if 0, receives an error code: 1 if an object's image or label is not
        a number, 2 if a label is out of range, 3 if a prior has no extent or variance. The second element receives the
        row. The others receive the row's values: the first four of an object, or box and variances of a prior.
        """

    def boxes_gradient(self, locations: Array, priors: Array, objects: Array, gradient: Array) -> None:
        """gradient = derivative of the last `forward`'s losses by the locations, which must be unchanged."""

    def scores_gradient(self, scores: Array, gradient: Array) -> None:
        """gradient = derivative of the last `forward`'s losses by the scores."""
