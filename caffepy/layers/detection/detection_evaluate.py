"""DetectionEvaluate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.detection.boxes import Rows, box_sizes, overlap_matrix
from caffepy.layers.detection.ground_truth import COLUMNS as TRUTH_COLUMNS
from caffepy.layers.detection.ground_truth import GroundTruth, read_ground_truth
from caffepy.layers.detection.pixels import ImageSize, check_resize, read_image_sizes, to_pixels
from caffepy.layers.detection.sorting import sort_like_cpp

_FOUND_COLUMNS, _COLUMNS = 7, 5


@register_layer("DetectionEvaluate")
class DetectionEvaluateLayer(Layer):
    """Says of each detection whether it hits an object (`detection_evaluate_layer.cpp`).

    Shapes: detections (1, 1, D, 7) as DetectionOutput gives them, objects (1, 1, G, 8); the top is (1, 1, R, 5). Its
    first rows (-1, label, objects of that class, -1, -1) are one for each class but the background's; then come rows
    (image, label, score, hit, miss), one for each detection. A detection hits if it overlaps its nearest object of the
    same class by `overlap_threshold` or more and no better one did; at an object marked difficult, without
    evaluate_difficult_gt, it is neither a hit nor a miss. With a name_size_file boxes are compared in pixels; its lines
    are taken in turn by the images that have detections. Computed on the host. The mean average precision is
    computed by a solver's test with eval_type: "detection".
    """

    bottoms = (2, 2)
    has_backward = False
    no_gradient_bottoms = frozenset({1})
    changes_shapes = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.detection_evaluate_param
        if param.num_classes < 1:
            raise self.error("num_classes is needed: how many classes there are with the background")
        if param.background_label_id >= param.num_classes:
            raise self.error(
                f"background_label_id {param.background_label_id} is not below num_classes {param.num_classes}; "
                "correct one"
            )
        if not param.overlap_threshold > 0:
            raise self.error(f"overlap_threshold {param.overlap_threshold:g} must be above 0")
        self._resize = param.resize_param if param.HasField("resize_param") else None
        if self._resize is not None:
            check_resize(self, self._resize)
        self._sizes: list[ImageSize] = []
        if param.name_size_file and self.backend.holds_values:
            self._sizes = read_image_sizes(self, param.name_size_file)
        self._next, self._begun = 0, False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for blob, columns in zip(bottom, (_FOUND_COLUMNS, TRUTH_COLUMNS), strict=True):
            if blob.shape[:2] != (1, 1) or len(blob.shape) != 4 or blob.shape[3] != columns:
                raise self.shape_error("needs detections 1 1 D 7 and objects 1 1 G 8", *bottom)
        top[0].reshape((1, 1, self.param.detection_evaluate_param.num_classes, _COLUMNS))

    def has_side_effects(self) -> bool:
        """The lines of name_size_file are taken in turn."""
        return bool(self._sizes)

    def capture_blocker(self) -> str:
        return "it compares boxes on the host"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        found, truth = (self.backend.to_host(blob.data) for blob in bottom)
        rows = np.zeros((1, _COLUMNS), np.float32)
        if self.backend.holds_values:
            with np.errstate(all="ignore"):
                rows = self._evaluate(found.reshape(-1, _FOUND_COLUMNS), truth)
        top[0].reshape((1, 1, *rows.shape))
        self.backend.from_host(rows[None, None], top[0].data)

    def _evaluate(self, found: Rows, truth_values: Rows) -> Rows:
        param, name = self.param.detection_evaluate_param, self.param.bottom[1]
        background = param.background_label_id
        truth = read_ground_truth(self, truth_values, name, background, ends_at_mark=True)
        self._check(found)
        images, labels = found[:, 0].astype(np.int64), found[:, 1].astype(np.int64)
        counted = truth.labels if param.evaluate_difficult_gt else truth.labels[~truth.difficult]
        heads = np.full((param.num_classes, _COLUMNS), -1, np.float32)
        heads[:, 1] = np.arange(param.num_classes)
        heads[:, 2] = np.bincount(counted[counted < param.num_classes], minlength=param.num_classes)
        parts = [np.delete(heads, background, axis=0)]
        self._begin_pass()
        for image in np.unique(images[images != -1]):
            own = np.flatnonzero(images == image)
            for label in np.unique(labels[own]):
                if label != -1:
                    objects = np.flatnonzero((truth.images == image) & (truth.labels == label))
                    parts.append(self._score(found[own[labels[own] == label]], truth, objects))
            self._next = (self._next + 1) % max(len(self._sizes), 1)
        # Caffe leaves room for detections of image -1 as well.
        parts.append(np.zeros((int(((images == -1) & (labels != -1)).sum()), _COLUMNS), np.float32))
        return np.concatenate(parts)

    def _check(self, found: Rows) -> None:
        """Check the detections.

        Raises:
            DataError: a number that is not finite where one is needed, or a detection of the background.
        """
        blob, background = self.param.bottom[0], self.param.detection_evaluate_param.background_label_id
        bad = np.flatnonzero(~np.isfinite(found[:, :2]).all(1) | np.isnan(found[:, 2]))
        if len(bad):
            image, label, score = found[bad[0], :3]
            raise self.data_error(
                f"row {bad[0]} of '{blob}' has image {image:g}, label {label:g}, score {score:g}, which are not all "
                "numbers; look for NaN in the layers that make it"
            )
        bad = np.flatnonzero((np.trunc(found[:, 0]) != -1) & (np.trunc(found[:, 1]) == background))
        if len(bad):
            raise self.data_error(
                f"row {bad[0]} of '{blob}' is a detection of the background, class {background}; give "
                "DetectionOutput the same background_label_id"
            )

    def _begin_pass(self) -> None:
        """The first pass, of a resumed run perhaps, begins with the line of its first image.

        Where several devices share a test, each pass does.
        """
        if self._sizes and (self.context.shard.world_size > 1 or not self._begun):
            self._next, self._begun = self.first_sample() % len(self._sizes), True

    def _score(self, found: Rows, truth: GroundTruth, objects: NDArray[np.intp]) -> Rows:
        """The rows of one image's detections of one class (K, 7), given the objects of that class in it."""
        param = self.param.detection_evaluate_param
        rows = np.zeros((len(found), _COLUMNS), np.float32)
        if not len(objects):
            rows[:, :3], rows[:, 4] = found[:, :3], 1
            return _whole(rows)
        order = np.arange(len(found), dtype=np.int32)
        sort_like_cpp(np.ascontiguousarray(found[:, 2]), order)
        found = found[order]
        rows[:, :3] = found[:, :3]
        overlaps = self._overlaps(np.ascontiguousarray(found[:, 3:]), truth.boxes[objects])
        visited = np.zeros(len(objects), bool)
        for row, shared in zip(rows, overlaps, strict=True):
            nearest = int(np.argmax(shared))
            if not shared[nearest] >= np.float32(param.overlap_threshold):
                row[4] = 1
            elif param.evaluate_difficult_gt or not truth.difficult[objects[nearest]]:
                row[3], row[4] = not visited[nearest], visited[nearest]
                visited[nearest] = True
        return _whole(rows)

    def _overlaps(self, found: Rows, objects: Rows) -> Rows:
        """Of each detection with each object (K, G), in pixels where sizes are known."""
        if not self._sizes:
            return overlap_matrix(found, box_sizes(found), objects, box_sizes(objects))
        image = self._sizes[self._next]
        return overlap_matrix(*to_pixels(found, image, self._resize), *to_pixels(objects, image, self._resize), 1.0)


def _whole(rows: Rows) -> Rows:
    """With image and label cut to whole numbers."""
    rows[:, :2] = np.trunc(rows[:, :2])
    return rows
