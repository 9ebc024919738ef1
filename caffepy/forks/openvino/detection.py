"""PriorBoxClustered, DetectionOutputExtended and AnchorEmbeddingExtractor, of nets that find people and actions."""

from __future__ import annotations

import numpy as np

from caffepy.data.boxes import Rows
from caffepy.layers.detection.boxes import Priors
from caffepy.layers.detection.output import DetectionOutputLayer
from caffepy.layers.detection.prior_box import PriorBoxLayer
from caffepy.layers.host import HostLayer
from caffepy.layers.layer import Blobs, register_layer

_OTHER_SIZES = ("min_size", "max_size", "aspect_ratio", "denser_prior_boxes")


@register_layer("PriorBoxClustered")
class PriorBoxClusteredLayer(PriorBoxLayer):
    """Prior boxes of given sizes at each position of a feature map.

    Shapes: feature map (N, C, H, W), image (N, C, h, w), top (1, 2, H W K 4): boxes and variances, as PriorBox, where
    box k of K is width[k] by height[k] pixels (`prior_box_clustered_layer.cpp` of OpenVINO's training toolbox). `flip`
    has no effect.

    Raises:
        ConfigError: a setting is missing, given twice or out of range, or one of PriorBox's sizes is given.
        ShapeError: a bottom does not have four axes, or the feature map is empty.
    """

    def check_sizes(self) -> None:
        param = self.param.prior_box_param
        for name in _OTHER_SIZES:
            if getattr(param, name):
                raise self.error(f"{name} is a setting of PriorBox; give width and height, or change the type")
        if not param.width or len(param.width) != len(param.height):
            raise self.error(
                f"has {len(param.width)} width and {len(param.height)} height; give one of each for each box"
            )
        for name in ("width", "height"):
            for size in getattr(param, name):
                if not 0 < size < 2**31:
                    raise self.error(f"{name} {size:g} must be above 0 and below 2^31; correct prior_box_param")

    def boxes_of_position(self) -> int:
        return len(self.param.prior_box_param.width)

    def extents(self) -> Rows:
        param = self.param.prior_box_param
        return np.stack([param.width, param.height], axis=1).astype(np.float64)


@register_layer("DetectionOutputExtended")
class DetectionOutputExtendedLayer(DetectionOutputLayer):
    """The boxes of class 1, and the positions that predict them.

    Shapes: predictions (N, H, W, 4 A), scores (N, 2 P), priors (1, 2, 4 P), where P = H W A. The top is (1, 1, D, 10)
    with rows (image, 1, score, xmin, ymin, xmax, ymax, anchor, x, y), where anchor is below A, x below W and y below H;
    else as DetectionOutput (`detection_output_extended_layer.cpp` of OpenVINO's training toolbox). background_label_id
    has no effect: class 0 is the background. Computed on the host.

    Raises:
        ConfigError: a setting is missing or out of range, num_classes is not 2, or share_location is false.
        ShapeError: the bottoms' shapes do not match.
        DataError: a prior is invalid.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.detection_output_param
        if param.num_classes != 2:
            raise self.error(f"num_classes is {param.num_classes}; it must be 2: the background and the objects")
        if not param.share_location:
            raise self.error("share_location: false is not supported; remove it")
        for name in ("use_polygon", "save_output_param"):
            if param.HasField(name):
                raise self.error(f"{name} is a setting of DetectionOutput; remove it, or change the type")
        super().setup(bottom, top)
        self.classes, self.more_columns = np.array([1], np.int32), 3

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom[0].shape) != 4 or bottom[0].shape[3] % 4:
            raise self.shape_error("needs predictions N H W 4*A", bottom[0])
        super().reshape(bottom, top)
        self._grid = (*bottom[0].shape[1:3], bottom[0].shape[3] // 4)

    def describe(self, priors: Priors, codes: Rows) -> Rows:
        y, x, anchor = np.indices(self._grid).reshape(3, -1)
        places = np.stack([anchor, x, y], axis=1).astype(np.float32)
        return np.broadcast_to(places, (*codes.shape[:2], *places.shape))


# -- embeddings of matches -----------------------------------------------------------------------------

_COLUMNS = 11
"""Numbers of a match: image, label, xmin, ymin, xmax, ymax, anchor, track, action, x, y."""
_IMAGE, _ANCHOR, _TRACK, _ACTION, _X, _Y = 0, 6, 7, 8, 9, 10
_BOX = [0, 2, 3, 4, 5]


@register_layer("AnchorEmbeddingExtractor")
class AnchorEmbeddingExtractorLayer(HostLayer):
    """The embeddings at the positions of matched boxes, and their labels.

    Shapes: matches (..., D, 11) with rows (image, label, xmin, ymin, xmax, ymax, anchor, track, action, x, y), and
    `num_anchors` maps (N, E, H, W); the tops are embeddings (K, E), labels (K,), which are column `label_src_pos` of
    the matches, and an optional third: with output_instance_weights (K,) 1 / (the matches of the same track in the same
    image), with output_proposals (K, 5) image, xmin, ymin, xmax, ymax. Matches with an image below 0 are left out, and
    with num_valid_actions those with this action or a higher one. Without a match K is 1, and the row is 0 in the
    embeddings and -1 in the other tops. The gradient of a map is the sum of the gradients of its embeddings
    (`anchor_embedding_extractor_layer.cpp` of OpenVINO's training toolbox). Computed on the host.

    Raises:
        ConfigError: a setting is missing, out of range, or does not fit the bottoms and tops.
        ShapeError: the matches have other columns, or the maps differ in shape.
        DataError: a match names an image, an anchor or a position that is not there.
    """

    bottoms = (2, None)
    tops = (2, 3)
    no_gradient_bottoms = frozenset({0})
    changes_shapes = True
    blocker = "it reads matches on the host"

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.embedding_extractor_param
        if param.num_anchors != len(bottom) - 1:
            raise self.error(f"num_anchors is {param.num_anchors}, but there are {len(bottom) - 1} maps; correct it")
        if not param.HasField("label_src_pos") or not 0 <= param.label_src_pos < _COLUMNS:
            raise self.error(f"label_src_pos is {param.label_src_pos}; give a column of the matches, 0 to 10")
        if len(top) > 2 and param.output_instance_weights == param.output_proposals:
            raise self.error("the third top needs output_instance_weights or output_proposals, and not both")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if not bottom[0].shape or bottom[0].shape[-1] != _COLUMNS:
            raise self.shape_error(f"needs matches of {_COLUMNS} columns", bottom[0])
        shape = bottom[1].shape
        if len(shape) != 4 or any(blob.shape != shape for blob in bottom[2:]):
            raise self.shape_error("needs maps N E H W of one shape", *bottom[1:])
        top[0].reshape((1, shape[1]))
        top[1].reshape((1,))
        if len(top) > 2:
            top[2].reshape((1, len(_BOX)) if self.param.embedding_extractor_param.output_proposals else (1,))

    def compute(self, matches: Rows, *maps: Rows) -> list[Rows]:
        param, rows = self.param.embedding_extractor_param, matches.reshape(-1, _COLUMNS)
        rows = rows[rows[:, _IMAGE].astype(np.int64) >= 0]
        if param.HasField("num_valid_actions") and param.num_valid_actions >= 0:
            rows = rows[rows[:, _ACTION].astype(np.int64) < param.num_valid_actions]
        self._places = [rows[:, column].astype(np.int64) for column in (_ANCHOR, _IMAGE, _Y, _X)]
        images, _, height, width = maps[0].shape
        limits = zip(("anchor", "image", "y", "x"), self._places, (len(maps), images, height, width), strict=True)
        for name, values, limit in limits:
            bad = np.flatnonzero((values < 0) | (values >= limit))
            if len(bad):
                raise self.data_error(
                    f"'{self.bottom_names[0]}' has a match with {name} {values[bad[0]]}; it must be from 0 to "
                    f"{limit - 1}"
                )
        third = len(self.param.top) > 2
        if not len(rows):
            more = [np.full((1, len(_BOX)) if param.output_proposals else (1,), -1)] if third else []
            return [np.zeros((1, maps[0].shape[1])), np.full(1, -1), *more]
        anchor, image, y, x = self._places
        embeddings = np.stack([maps[a][i, :, j, k] for a, i, j, k in zip(anchor, image, y, x, strict=True)])
        labels = np.trunc(rows[:, param.label_src_pos])
        return [embeddings, labels, *([self._more(rows)] if third else [])]

    def _more(self, rows: Rows) -> Rows:
        """Return the third top."""
        if self.param.embedding_extractor_param.output_proposals:
            return rows[:, _BOX]
        owners = rows[:, [_IMAGE, _TRACK]].astype(np.int64)
        _, index, counts = np.unique(owners, axis=0, return_inverse=True, return_counts=True)
        return 1 / counts[index.reshape(-1)]

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        dy = self.backend.to_host(top[0].diff)
        for number, (blob, wanted) in enumerate(zip(bottom[1:], propagate_down[1:], strict=True)):
            if not wanted:
                continue
            gradient = np.zeros(blob.shape, np.float32)
            if self.backend.holds_values:
                anchor, *places = self._places
                own = anchor == number
                image, y, x = (values[own] for values in places)
                np.add.at(gradient.transpose(0, 2, 3, 1), (image, y, x), dy[: len(anchor)][own])
            self.backend.from_host(gradient, blob.diff)
