"""MultiBoxLoss on a device: for which settings it can be left to the backend, and what the device reports.

The settings of SSD's own training can: priors are matched as they are, predictions are shared by all classes, and
background is mined without suppression among the candidates. For the others the layer computes on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from caffepy.backend import Array
from caffepy.backend.detection_primitives import BoxLossSettings
from caffepy.errors import DataError
from caffepy.layers.core.base import Layer
from caffepy.layers.detection.boxes import bad_prior
from caffepy.layers.detection.ground_truth import bad_class, bad_object
from caffepy.proto import caffe_pb2

_Parameter = caffe_pb2.MultiBoxLossParameter
_OBJECT, _CLASS, _PRIOR = 1, 2, 3
"""What `BoxLoss.forward` calls a problem."""
PROBLEM = 10
"""Numbers of which its description consists."""


def device_settings(param: caffe_pb2.MultiBoxLossParameter, counts: Sequence[bool]) -> BoxLossSettings | None:
    """The loss as a backend may compute it; None where it must be computed on the host.

    Args:
        param: of the layer.
        counts: whether the boxes' loss, and that of the scores, is part of the loss.
    """
    logistic, mines = param.conf_loss_type == _Parameter.LOGISTIC, param.mining_type != _Parameter.NONE
    background, fractions = param.background_label_id, (param.overlap_threshold, param.neg_overlap, param.loc_weight)
    can = (
        param.share_location
        and param.use_prior_for_matching
        and param.mining_type != _Parameter.HARD_EXAMPLE
        and not (mines and param.HasField("nms_param") and param.nms_param.nms_threshold > 0)
        and (background == 0 or (background > 0 and not logistic))
        and all(map(math.isfinite, fractions))
        and 0 <= param.neg_pos_ratio < math.inf
    )
    if not can:
        return None
    return BoxLossSettings(
        classes=param.num_classes,
        background=background,
        code=param.code_type,
        threshold=param.overlap_threshold,
        per_prediction=param.match_type == _Parameter.PER_PREDICTION,
        ignore_crossing=param.ignore_cross_boundary_bbox,
        difficult=param.use_difficult_gt,
        agnostic=param.map_object_to_agnostic,
        mines=mines,
        ratio=param.neg_pos_ratio,
        most_overlap=param.neg_overlap,
        logistic=logistic,
        squared=param.loc_loss_type == _Parameter.L2,
        variance_in_target=param.encode_variance_in_target,
        inside=param.bp_inside,
        weight=param.loc_weight,
        boxes_count=counts[0],
        scores_count=counts[1],
    )


class DeviceProblem:
    """Where the device describes the first object or prior that it cannot compute with.

    Args:
        layer: the layer, for messages.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self.array: Array = layer.backend.zeros((PROBLEM,))

    def raise_device_errors(self) -> None:
        """Raise if there was one since the last check; waits for the device.

        Raises:
            DataError: with its number and values.
        """
        layer = self._layer
        kind, number, *values = (float(value) for value in layer.backend.to_host(self.array))
        if not kind:
            return
        layer.backend.fill(self.array, 0)
        raise self._error(int(kind), int(number), values)

    def _error(self, kind: int, number: int, values: list[float]) -> DataError:
        layer, param = self._layer, self._layer.param.multibox_loss_param
        if kind == _PRIOR:
            return bad_prior(layer, number, values[:4], values[4:], param.code_type)
        blob = layer.param.bottom[3]
        if kind == _OBJECT:
            return bad_object(layer, blob, number, values)
        assert kind == _CLASS
        return bad_class(layer, blob, int(values[0]), int(math.copysign(math.floor(abs(values[1]) + 0.5), values[1])))
