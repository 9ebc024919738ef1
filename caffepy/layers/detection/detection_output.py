"""DetectionOutput."""

from __future__ import annotations

import numpy as np

from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.detection.boxes import Rows, box_sizes, decode, read_priors
from caffepy.layers.detection.host import host_threads, warn
from caffepy.layers.detection.result_files import ResultFiles
from caffepy.layers.detection.sorting import sort_like_cpp
from caffepy.layers.detection.suppression import Suppression, suppress_classes

_LOC, _CONF, _PRIORS = range(3)
COLUMNS = 7


@register_layer("DetectionOutput")
class DetectionOutputLayer(Layer):
    """The boxes that a net predicts, after suppression of those that overlap a better one of their class.

    Shapes: predictions (N, 4 P L), scores (N, P C), priors (1, 2, 4 P); L is 1 or, without share_location, C. The top
    is (1, 1, D, 7) with rows (image, label, score, xmin, ymin, xmax, ymax), ordered by image and label; D changes from
    pass to pass. Where nothing is found in the whole batch there is a row (image, -1, ...) for each image. Computed on
    the host (`detection_output_layer.cpp`). `save_output_param` writes result files.
    """

    bottoms = (3, 4)
    has_backward = False
    changes_shapes = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.detection_output_param
        if param.num_classes < 1:
            raise self.error("num_classes is needed: how many classes there are with the background")
        nms = param.nms_param
        if not nms.nms_threshold >= 0 or not 0 < nms.eta <= 1:
            raise self.error(
                f"nms_threshold {nms.nms_threshold:g} must be at least 0, and eta {nms.eta:g} above 0 and at most 1"
            )
        if param.visualize:
            raise self.error("visualize is not supported; leave it out and draw the boxes that the top holds")
        least = param.confidence_threshold if param.HasField("confidence_threshold") else np.finfo(np.float32).min
        self._how = Suppression(nms.nms_threshold, nms.eta, nms.top_k if nms.HasField("top_k") else -1, float(least))
        self._all_classes = param.num_classes
        self._locations = 1 if param.share_location else self._all_classes
        numbers = [c for c in range(self._all_classes) if c != param.background_label_id]
        self._classes = np.array(numbers, np.int32)
        self._files = self._result_files()

    def _result_files(self) -> ResultFiles | None:
        param = self.param.detection_output_param.save_output_param
        given = [param.output_directory, param.label_map_file, param.name_size_file]
        if any(given) and not all(given):
            warn(self, "no files are written: save_output_param needs output_directory, label_map_file, name_size_file")
        if not all(given):
            return None
        if self.context.shard.world_size > 1:
            warn(
                self,
                "save_output_param has no effect where several devices share a test; to have the files, run caffepy "
                "test or train on one device",
            )
            return None
        return ResultFiles(self) if self.backend.holds_values else None

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        images, priors = (bottom[_LOC].shape or (0,))[0], bottom[_PRIORS].count // 8
        if not bottom[_CONF].shape or bottom[_CONF].shape[0] != images or bottom[_PRIORS].count != 8 * priors:
            raise self.shape_error("needs predictions N 4*P*L, scores N P*C and priors 1 2 4*P", *bottom[:3])
        for blob, per_prior, what in (
            (bottom[_LOC], 4 * self._locations, "location predictions"),
            (bottom[_CONF], self._all_classes, "scores"),
        ):
            if blob.count != images * priors * per_prior:
                raise self.shape_error(
                    f"needs {per_prior} {what} for each of the {priors} priors; num_classes is {self._all_classes}",
                    blob, bottom[_PRIORS],
                )  # fmt: skip
        self._shape = (images, priors)
        top[0].reshape((1, 1, 1, COLUMNS))

    def has_side_effects(self) -> bool:
        return self._files is not None

    def capture_blocker(self) -> str:
        return "it suppresses boxes on the host"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        loc, conf, priors = (self.backend.to_host(blob.data) for blob in bottom[:3])
        rows = np.zeros((1, COLUMNS), np.float32)
        if self.backend.holds_values:
            with np.errstate(all="ignore"):
                rows = self._detect(loc, conf, priors)
        top[0].reshape((1, 1, *rows.shape))
        self.backend.from_host(rows[None, None], top[0].data)

    def _detect(self, loc: Rows, conf: Rows, prior_values: Rows) -> Rows:
        """The rows of all images."""
        param = self.param.detection_output_param
        images, count = self._shape
        priors = read_priors(self, prior_values, param.code_type)
        codes = loc.reshape(images, count, self._locations, 4).transpose(0, 2, 1, 3)
        boxes = decode(priors, codes, param.code_type, param.variance_encoded_in_target)
        scores = conf.reshape(images, count, self._all_classes)
        order, counts = suppress_classes(host_threads(self), boxes, box_sizes(boxes), scores, self._classes, self._how)
        found = []
        if self._files is not None:
            self._files.begin(self.first_sample())
        for image in range(images):
            labels = np.repeat(self._classes, counts[image])
            numbers = np.concatenate(
                [np.empty(0, np.int32), *(row[:kept] for row, kept in zip(order[image], counts[image], strict=True))]
            )
            labels, numbers = self._best(labels, numbers, scores[image])
            places = labels if self._locations > 1 else 0
            found.append(_rows(image, labels, scores[image, numbers, labels], boxes[image, places, numbers]))
            if self._files is not None:
                self._files.add(found[-1])
        rows = np.concatenate([np.empty((0, COLUMNS), np.float32), *found])
        return rows if len(rows) else _nothing_found(images)

    def _best(self, labels: Rows, numbers: Rows, scores: Rows) -> tuple[Rows, Rows]:
        """The `keep_top_k` best of an image's boxes, ordered by label."""
        keep = self.param.detection_output_param.keep_top_k
        if keep < 0 or len(labels) <= keep:
            return labels, numbers
        places = np.arange(len(labels), dtype=np.int32)
        sort_like_cpp(scores[numbers, labels], places)
        places = places[:keep]
        places = places[np.argsort(labels[places], kind="stable")]
        return labels[places], numbers[places]


def _rows(image: int, labels: Rows, scores: Rows, boxes: Rows) -> Rows:
    rows = np.empty((len(labels), COLUMNS), np.float32)
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3:] = image, labels, scores, boxes
    return rows


def _nothing_found(images: int) -> Rows:
    rows = np.full((images, COLUMNS), -1, np.float32)
    rows[:, 0] = np.arange(images)
    return rows
