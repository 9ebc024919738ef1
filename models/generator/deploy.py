"""The net that is left for predictions: Input in place of data, no losses, nothing that only training needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from caffepy.config.filter import filter_net, net_state
from caffepy.proto import caffe_pb2

PARAMETERS = ("convolution_param", "inner_product_param", "scale_param", "embed_param", "recurrent_param")
FILLERS = ("weight_filler", "bias_filler", "filler")


@dataclass(frozen=True)
class Deploy:
    """What a deploy net takes and gives.

    Attributes:
        inputs: blobs and their shapes.
        outputs: blobs that the net is for; layers that lead to none of them are left out.
        softmax: the blob of scores that becomes `prob`, or "" if the outputs are final.
        axis: of the classes in it.
    """

    inputs: dict[str, tuple[int, ...]]
    outputs: list[str] = field(default_factory=list)
    softmax: str = ""
    axis: int = 1

    @property
    def wanted(self) -> set[str]:
        return {*self.outputs, *([self.softmax] if self.softmax else [])}


def deploy_net(train: caffe_pb2.NetParameter, deploy: Deploy) -> caffe_pb2.NetParameter:
    """The deploy net of a train net: the layers of its test phase between the inputs and the outputs."""
    net = caffe_pb2.NetParameter(name=train.name)
    for name, shape in deploy.inputs.items():
        net.layer.add(name=name, type="Input", top=[name], input_param={"shape": [{"dim": shape}]})
    kept = _leading_to(deploy.wanted, set(deploy.inputs), filter_net(train, net_state(caffe_pb2.TEST)).layer)
    net.layer.extend(_without_training(layer) for layer in kept)
    if deploy.softmax:
        axis = {} if deploy.axis == 1 else {"softmax_param": {"axis": deploy.axis}}
        net.layer.add(name="prob", type="Softmax", bottom=[deploy.softmax], top=["prob"], **axis)
    return net


def _leading_to(
    wanted: set[str], inputs: set[str], layers: Iterable[caffe_pb2.LayerParameter]
) -> list[caffe_pb2.LayerParameter]:
    """Layers on the way to a wanted blob, from the last one back; in-place layers write what they read."""
    wanted, kept = set(wanted), []
    for layer in reversed(list(layers)):
        if wanted & set(layer.top) and not inputs & set(layer.top) - set(layer.bottom):
            wanted |= set(layer.bottom)
            kept.append(layer)
    return kept[::-1]


def _without_training(layer: caffe_pb2.LayerParameter) -> caffe_pb2.LayerParameter:
    """A copy without rates, phases and fillers."""
    plain = caffe_pb2.LayerParameter()
    plain.CopyFrom(layer)
    for name in ("param", "phase", "include", "exclude"):
        plain.ClearField(name)
    for name in PARAMETERS:
        if plain.HasField(name):
            parameter = getattr(plain, name)
            for filler in set(FILLERS) & set(parameter.DESCRIPTOR.fields_by_name):
                parameter.ClearField(filler)
    return plain
