"""A model's train net and solver for other classes and another data set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from caffepy.errors import ConfigError
from caffepy.formats.proto import caffe_pb2

_LEARNED = {"Convolution": "convolution_param", "InnerProduct": "inner_product_param"}
_NEW_RATE = 10
"""Factor on the learning rate of layers that begin at random while the others have weights, as in Caffe's example of
finetuning; the whole rate is divided by it."""


def set_classes(net: caffe_pb2.NetParameter, classes: int) -> list[str]:
    """Change a classifier's net to a number of classes; return the names of the layers that compute the scores.

    These layers are renamed to name_classes, so that weights for other classes are not loaded into them. Accuracies
    over more classes than there are are removed.

    Raises:
        ConfigError: the net is no classifier.
    """
    scores = {layer.bottom[0] for layer in net.layer if layer.type == "SoftmaxWithLoss"}
    heads = [head for blob in sorted(scores) for head in _learned_before(net, blob)]
    if not heads:
        raise ConfigError(f"net '{net.name}' has no SoftmaxWithLoss behind a layer that learns")
    for head in heads:
        getattr(head, _LEARNED[head.type]).num_output = classes
        head.name = f"{head.name}_{classes}"
    kept = [layer for layer in net.layer if layer.accuracy_param.top_k <= 1 or layer.accuracy_param.top_k < classes]
    _replace_layers(net, kept)
    return [head.name for head in heads]


def set_boxed_classes(net: caffe_pb2.NetParameter, classes: int) -> list[str]:
    """Change an SSD's net to a number of classes, without the background; return the layers of the scores.

    Anchors (PriorBox) and boxes stay. The layers of the scores are renamed as by `set_classes`.

    Raises:
        ConfigError: the net is no SSD.
    """
    losses = [layer for layer in net.layer if layer.type == "MultiBoxLoss"]
    if not losses:
        raise ConfigError(f"net '{net.name}' has no MultiBoxLoss")
    before, after = losses[0].multibox_loss_param.num_classes, classes + 1
    heads = _learned_before(net, losses[0].bottom[1])
    for head in heads:
        head.convolution_param.num_output = head.convolution_param.num_output // before * after
        head.name = f"{head.name}_{classes}"
    for layer in net.layer:
        for name in ("multibox_loss_param", "detection_output_param", "detection_evaluate_param"):
            if layer.HasField(name):
                getattr(layer, name).num_classes = after
        if layer.type == "Reshape" and layer.bottom[0] == losses[0].bottom[1]:
            dims = layer.reshape_param.shape.dim
            dims[:] = [after if dim == before else dim for dim in dims]
    return [head.name for head in heads]


def _learned_before(net: caffe_pb2.NetParameter, blob: str) -> list[caffe_pb2.LayerParameter]:
    """Return the nearest layers before a blob that learn."""
    makers = [layer for layer in net.layer if blob in layer.top and blob not in layer.bottom]
    found: list[caffe_pb2.LayerParameter] = []
    for maker in makers:
        if maker.type in _LEARNED:
            found.append(maker)
        else:
            found += [layer for bottom in maker.bottom for layer in _learned_before(net, bottom)]
    return found


def _replace_layers(net: caffe_pb2.NetParameter, layers: Sequence[caffe_pb2.LayerParameter]) -> None:
    kept = caffe_pb2.NetParameter(layer=layers)
    net.ClearField("layer")
    net.layer.extend(kept.layer)


def learn_new_layers_faster(net: caffe_pb2.NetParameter, heads: Sequence[str]) -> None:
    """Multiply the rates of layers that begin at random, for training from weights."""
    for layer in net.layer:
        for param in layer.param if layer.name in heads else ():
            param.lr_mult *= _NEW_RATE


def data_layers(net: caffe_pb2.NetParameter) -> Iterator[tuple[caffe_pb2.LayerParameter, bool]]:
    """Yield the data layers, and whether each is of the TEST phase."""
    for layer in net.layer:
        if layer.type in ("Data", "AnnotatedData"):
            yield layer, any(rule.phase == caffe_pb2.TEST for rule in layer.include if rule.HasField("phase"))


def validation_batch(images: int, most: int) -> int:
    """Return a batch size for validation: the largest divisor of the number of images up to `most`.

    If that is less than half of `most`, `most` itself: the last batch then begins again with the first images.
    """
    most = min(images, most)
    best = max(size for size in range(1, most + 1) if images % size == 0)
    return best if 2 * best >= most else most


def adapt_solver(
    solver: caffe_pb2.SolverParameter, batch: int, images: tuple[int, int, int], epochs: int, finetuned: bool
) -> None:
    """Set the lengths and the rate of a model's solver for another data set.

    The rate is in proportion to the batch. Steps of the rate stay at the same part of the training.

    Args:
        solver: the model's solver.
        batch: batch of the model in training.
        images: batch in training, number of training images, and number of test iterations.
        epochs: passes through the training images.
        finetuned: training begins from weights; the rate of a classifier is then a tenth.
    """
    own_batch, count, test_iterations = images
    epoch = max(1, math.ceil(count / (own_batch * max(solver.iter_size, 1))))
    total = epoch * epochs
    factor = total / solver.max_iter
    solver.base_lr = float(f"{solver.base_lr * own_batch / batch / (_NEW_RATE if finetuned else 1):.4g}")
    if solver.stepvalue:
        steps = sorted({max(1, round(value * factor)) for value in solver.stepvalue if value < solver.max_iter})
        solver.stepvalue[:] = steps
    if solver.stepsize:
        solver.stepsize = max(1, round(solver.stepsize * factor))
    solver.max_iter = total
    del solver.test_iter[:]
    solver.test_iter.append(test_iterations)
    solver.test_interval = epoch
    solver.snapshot = epoch * max(1, epochs // 10)
    solver.display = max(1, min(100, epoch // 5))
    solver.test_initialization = False
