"""What a backend hands out: graphs, events, timers, asynchronous copies, planned convolutions.

Each backend has classes of its own for them (`device_scalars.py` and `cuda/graph.py`; the convolutions beside
their kernels).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from caffepy.backend.types import Array, Counter, NormalisedBottom


class Graph(Protocol):
    """Work of a backend that `Backend.capture` took, to be launched again and again without Python.

    `CudaGraph` is one of CUDA's, `KernelGraph` a list of calls of CPU kernels.
    """

    def launch(self) -> None:
        """Do the work, with what the arrays hold now; on a device with a stream, queue it there."""


class Event(Protocol):
    """A point in the stream of the backend's work."""

    def wait(self) -> None:
        """Wait until everything before it is done."""


class TimedEvent(Protocol):
    """An event with timing enabled."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds from an earlier event of the same backend to this one; waits until this one is reached."""


class DeviceTimer(Protocol):
    """Stopwatches on the device; `start` and `stop` may be captured.

    Both are queued on the current stream, which may be another than the backend's.
    """

    def start(self, index: int) -> None:
        """Start a stopwatch."""

    def stop(self, index: int) -> None:
        """Stop it and add the time since its start to its total."""

    def reset(self) -> None:
        """Set the totals to 0."""

    def totals(self) -> list[float]:
        """Total seconds of each stopwatch; waits for the device."""

    def times(self) -> list[float]:
        """When each stopwatch was started last, in seconds of the device's clock; waits for the device."""


class AsyncCopy(Protocol):
    """An asynchronous copy of an array to the host."""

    def get(self) -> Any:
        """The NumPy array; waits for it."""


class DeviceScalars(Protocol):
    """Numbers that change from iteration to iteration, in memory that captured work reads."""

    @property
    def array(self) -> Array:
        """All numbers, float32."""

    @property
    def values(self) -> Sequence[Array | float]:
        """Each number, as a Scalar argument of a formula; asked for anew whenever work is put on the stream."""

    @property
    def counters(self) -> Sequence[Counter | None]:
        """Each counter, as `dropout` takes it; None where host numbers do."""

    def send(self, values: Sequence[float], counters: Sequence[tuple[int, int]]) -> None:
        """Set the numbers for the work that is queued from now on."""


class NormalisedForward(Protocol):
    """Computes a convolution behind a batch normalisation, whose result it need not read."""

    def __call__(self, bottom: NormalisedBottom, weights: Array, y: Array, sums: Array | None) -> None:
        """y and its sums as `Convolution.forward` gives them where x was `bottom`, before any rounding to its dtype."""


class NormalisedGradients(Protocol):
    """Computes both gradients of a convolution behind a batch normalisation, whose result it need not read."""

    def __call__(
        self, bottom: NormalisedBottom, dy: Array, weights: Array, dx: Array, dweights: Array, accumulate: bool
    ) -> None:
        """dx and dweights (+)= what both backward passes give where x was `bottom`, and `bottom.sums` of dx."""


class Convolution(Protocol):
    """A convolution of fixed shapes, planned once (algorithm, workspace) and run many times.

    Shapes for two spatial axes: x (N, C, H, W), weights (num_output, C / group, kernel_h, kernel_w),
    bias (num_output,), y (N, num_output, H', W'). x, y, dx, dy and the weights given to `forward` and `backward_data`
    are of the dtype it was planned for; bias and dweights are float32.
    """

    @property
    def gives_sums(self) -> bool:
        """Whether `forward` can also add up y for each channel."""

    def forward(
        self, x: Array, weights: Array, bias: Array | None, y: Array, relu: bool = False, sums: Array | None = None
    ) -> None:
        """y = weights * x (+ bias), or max(that, 0): cross-correlation, as every Caffe computes it.

        `sums`, float32 of shape (2, num_output), gets the sum of y and of y^2 for each channel; it may be given only
        where `gives_sums` holds, and without bias and relu.
        """

    def backward_data(self, dy: Array, weights: Array, dx: Array) -> None:
        """dx = the transposed convolution of dy with weights; also Deconvolution's forward pass."""

    def backward_weights(self, x: Array, dy: Array, dweights: Array, accumulate: bool) -> None:
        """dweights (+)= correlation of x with dy, summed over the batch."""

    @property
    def forward_normalised(self) -> NormalisedForward | None:
        """The forward pass behind a normalisation, None where its result had better be written first."""

    @property
    def backward_normalised(self) -> NormalisedGradients | None:
        """Both gradients in one pass, None where they had better be computed by themselves."""


class BoxLoss(Protocol):
    """SSD's loss of batches of one shape, computed on the device; the layer is `MultiBoxLossLayer`.

    Locations (N, 4 P), scores (N, P classes), priors (1, 2, 4 P) and objects (1, 1, G, 8) are float32.
    """

    def forward(
        self, locations: Array, scores: Array, priors: Array, objects: Array, totals: Array, problem: Array
    ) -> None:
        """totals = the sum of all losses and the number of matches, float32 (2,).

        problem: float32 (10,); its first element becomes, if it is 0, 1 where the image or label of an object is no
        number, 2 where a label names no class, 3 where a prior has no extent or variance. The second then is the number
        of the row, and its values follow: the first four of an object; box and variances of a prior.
        """

    def boxes_gradient(self, locations: Array, priors: Array, objects: Array, gradient: Array) -> None:
        """gradient = derivative of the last `forward`'s losses by the locations, which must still be there."""

    def scores_gradient(self, scores: Array, gradient: Array) -> None:
        """gradient = their derivative by the scores."""
