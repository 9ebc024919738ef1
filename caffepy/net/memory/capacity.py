"""The largest batch with which a net fits into memory."""

from __future__ import annotations

from collections.abc import Callable

from caffepy.errors import BlobSizeError
from caffepy.layers.core.base import LayerContext
from caffepy.net.memory.plan import plan_memory
from caffepy.proto import caffe_pb2

READERS = ("data_param", "image_data_param", "hdf5_data_param")
"""Fields of layers that read batches of records."""

LARGEST = 2**20
"""No batch is looked for beyond this."""


def with_batch(param: caffe_pb2.NetParameter, batch: int) -> caffe_pb2.NetParameter:
    """A copy of a net whose layers without bottoms give batches of this size."""
    result = caffe_pb2.NetParameter()
    result.CopyFrom(param)
    for layer in result.layer:
        for field in READERS:
            if layer.HasField(field):
                getattr(layer, field).batch_size = batch
        for shape in (*layer.dummy_data_param.shape, *layer.input_param.shape):
            if shape.dim:
                shape.dim[0] = batch
        for index in range(len(layer.dummy_data_param.num)):
            layer.dummy_data_param.num[index] = batch
    return result


def written_batch(param: caffe_pb2.NetParameter) -> int:
    """The batch that the first layer without bottoms gives, as the prototxt says; 0 if it says none.

    Args:
        param: the net, filtered.
    """
    for layer in param.layer:
        sizes: list[int] = [getattr(layer, field).batch_size for field in READERS if layer.HasField(field)]
        sizes += [shape.dim[0] for shape in (*layer.dummy_data_param.shape, *layer.input_param.shape) if shape.dim]
        sizes += layer.dummy_data_param.num
        if sizes:
            return sizes[0]
    return 0


def largest_batch(  # noqa: PLR0913 -- one keyword a setting
    param: caffe_pb2.NetParameter,
    context: LayerContext,
    state: caffe_pb2.NetState | None,
    fuse: bool,
    share: bool,
    histories: int,
    available: int,
    below: int = LARGEST,
) -> int:
    """The largest batch_size below `below` that a training fits into `available` bytes with; 0 if none does.

    No blob may have more elements than Caffe allows, whatever the memory.

    Args:
        param: the net as read.
        context: its surroundings.
        state: as `Net` takes it.
        fuse: as `Net` takes it.
        share: whether its blobs share memory.
        histories: values that the solver keeps for each parameter.
        available: bytes.
        below: a batch that is known not to fit.

    Raises:
        CaffepyError: with another batch the net does not hold together.
    """

    def fits(batch: int) -> bool:
        try:
            plan = plan_memory(with_batch(param, batch), context, state, fuse)
        except BlobSizeError:
            return False
        return plan.total(histories, share) + plan.workspace(share) <= available

    return largest(fits, below)


def largest(fits: Callable[[int], bool], below: int) -> int:
    """The largest number from 1 to below - 1 that fits, given that all smaller ones do too; 0 if none."""
    good, bad = 0, 1
    while bad < below and fits(bad):
        good, bad = bad, bad * 2
    bad = min(bad, below)
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good
