"""Features: the blobs of a net as records, as Caffe's `extract_features.cpp` writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from caffepy.data.sources.databases import RecordWriter
from caffepy.errors import ConfigError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.net.net import Net
from caffepy.utils.registry import suggest

_MAX_AXES = 4
"""A Datum's axes and the batch axis: N, C, H and W."""


def extract_features(
    net: Net,
    names: Sequence[str],
    writers: Sequence[RecordWriter],
    batches: int,
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Run the net and write one float Datum for each item of the named blobs; keys count the items.

    Args:
        net: a net with a data layer and weights.
        names: the blobs to write.
        writers: one for each blob.
        batches: the number of forward passes.
        advance: called after each batch.

    Raises:
        ConfigError: the net has no such blob, or one of more than four axes.
        CaffepyError: the data cannot be read, or the device fails.
    """
    blobs = [_blob(net, name) for name in names]
    for _ in range(batches):
        net.forward()
        net.raise_device_errors()
        for name, blob, writer in zip(names, blobs, writers, strict=True):
            for datum in _datums(name, blob):
                writer.put(f"{writer.count:010d}".encode(), datum.SerializeToString())
        advance()


def check_blobs(net: Net, names: Sequence[str]) -> None:
    """Check that the net has the blobs, before any file is written.

    Raises:
        ConfigError: the net has no blob of one of the names.
    """
    for name in names:
        _blob(net, name)


def _blob(net: Net, name: str) -> Blob:
    if name not in net.blobs:
        raise ConfigError(f"the net has no blob '{name}'; {suggest(name, list(net.blobs))}")
    return net.blobs[name]


def _datums(name: str, blob: Blob) -> Iterator[caffe_pb2.Datum]:
    """Yield a Datum for each item of the first axis; missing axes count as 1, as in Caffe."""
    values = blob.host_data().astype("float32")
    if values.ndim > _MAX_AXES:
        raise ConfigError(f"blob '{name}' has {values.ndim} axes; a Datum takes at most {_MAX_AXES}")
    values = values.reshape(values.shape + (1,) * (_MAX_AXES - values.ndim))
    channels, height, width = values.shape[1:]
    for item in values:
        yield caffe_pb2.Datum(channels=channels, height=height, width=width, float_data=item.ravel().tolist())
