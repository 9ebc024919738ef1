"""Dropout."""

from __future__ import annotations

from caffepy.backend import Array, RandomStream
from caffepy.backend.types import Counter
from caffepy.layers.core.base import Blobs, Layer, LayerContext, register_layer
from caffepy.layers.core.formulas import scaled
from caffepy.proto import caffe_pb2


@register_layer("Dropout")
class DropoutLayer(Layer):
    """In TRAIN y = x / (1 - dropout_ratio) with probability 1 - dropout_ratio, else 0. In TEST y = x.

    With `scale_train: false` y = x or 0 in TRAIN and y = (1 - dropout_ratio) x in TEST (Fast R-CNN's
    `dropout_layer.cpp`). With Bayesian SegNet's `sample_weights_test` TEST drops values as TRAIN does
    (`dropout_layer.cpp` of caffe-segnet).

    The mask depends on the seed, the layer's name, the pass and the global number of the sample. It does not depend on
    the number of devices. Srivastava et al. 2014; scaled in training as Caffe's `dropout_layer.cpp`.

    Raises:
        ConfigError: dropout_ratio is outside [0, 1).
    """

    supports_half = True
    recordable = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.dropout_param
        if not 0 <= param.dropout_ratio < 1:
            raise self.error(f"dropout_ratio is {param.dropout_ratio:g}, but must be at least 0 and below 1")
        self._ratio = param.dropout_ratio
        self._kept = 1.0 if param.scale_train else 1 - param.dropout_ratio
        self._training = self.context.phase == caffe_pb2.TRAIN or param.sample_weights_test
        if param.sample_weights_test:
            self.recordable = False  # type: ignore[misc] # each pass draws other numbers
        self._counter: Counter = (0, 0)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        top[0].reshape(bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self._training:
            self._counter = self.counter()
        self._drop(bottom[0].data, top[0].data)

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """In a TEST that draws numbers: these follow the number of passes, which is another on each device."""
        return context.phase == caffe_pb2.TEST and param.dropout_param.sample_weights_test

    def _stream(self) -> RandomStream:
        """Return the random stream. Called in each pass: restoring a snapshot may change the seed."""
        stream, seed = self.random_stream(), self.param.dropout_param.random_seed
        return RandomStream(seed, stream.stream) if seed >= 0 else stream

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        """dx = dy / (1 - dropout_ratio) where the mask kept the element, else 0; without the divisor as `forward`."""
        if propagate_down[0]:
            self._drop(top[0].diff, bottom[0].diff)

    def _drop(self, source: Array, destination: Array) -> None:
        if self._training:
            self.backend.dropout(source, destination, self._ratio, self._stream(), self._counter)
            source = destination
        if self._kept != 1:
            self.backend.apply(scaled, (source, self._kept), (destination,))
        elif source is not destination:
            self.backend.copy(source, destination)
