"""MultiBoxLoss, the loss of SSD: matching of boxes with objects, mining of background priors, the two losses.

A GPU computes it for the settings of SSD's training: matching by priors, locations shared by all classes, and mining
without suppression (`device_settings`). With other settings, and on the CPU, the layer computes it on the host, as
`bbox_util.cpp` of SSD's Caffe does: MatchBBox, FindMatches, MineHardExamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.kernel import Floats, Int, Ints, Words, device_function, kernel
from caffepy.backend.formulas import scaled, scaled_over_count
from caffepy.backend.types import BoxLossSettings
from caffepy.data.boxes import UNIT, Rows, box_areas, overlap
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.detection.boxes import (
    COLUMNS,
    GroundTruth,
    Priors,
    bad_class,
    bad_object,
    bad_prior,
    check_predictions,
    decode,
    encode,
    read_ground_truth,
    read_priors,
)
from caffepy.layers.detection.suppression import sort_like_cpp, suppress_mined
from caffepy.layers.layer import Blobs, host_threads, register_layer, warn
from caffepy.layers.loss import LossLayer

_Parameter = caffe_pb2.MultiBoxLossParameter
UNMATCHED, IGNORED = -1, -2
"""In place of an object's index: the box has no object, or crosses the image's border and is ignored."""
_MIN_OVERLAP = 1e-6
"""Overlaps up to this value count as 0."""


@device_function
def _best_free_box(
    boxes: Floats, areas: Floats, first: Int, objects: Floats, sizes: Floats, j: Int, matches: Ints, at: Int, n: Int
) -> Int:
    """Return the unmatched one of n boxes with the largest overlap with object j, or -1."""
    found, largest = -1, np.float32(-1)
    for i in range(n):
        if matches[at + i] == UNMATCHED:
            shared = overlap(boxes, areas, first + i, objects, sizes, j, UNIT, 0)
            if shared > _MIN_OVERLAP and shared > largest:
                found, largest = i, shared
    return found


@device_function
def _best_object(begin: Int, end: Int, best: Floats, best_box: Words) -> Int:
    """Return the object with the largest overlap, or -1. On ties the first box wins, then the first object."""
    selected = -1
    for j in range(begin, end):
        if best_box[j] < 0:
            continue
        if selected < 0 or best[j] > best[selected] or (best[j] == best[selected] and best_box[j] < best_box[selected]):
            selected = j
    return selected


@kernel
def _match(
    start: Int,
    stop: Int,
    boxes: Floats,
    areas: Floats,
    firsts: Words,
    count: Int,
    objects: Floats,
    object_areas: Floats,
    begins: Words,
    ends: Words,
    matches: Ints,
    overlaps: Floats,
    nearest: Ints,
    best: Floats,
    best_box: Words,
) -> None:
    """Write the largest overlap of each box and its object, and match. An item is a set of boxes and some objects."""
    for item in range(start, stop):
        first, begin, end, at = firsts[item], begins[item], ends[item], item * count
        for i in range(count):
            for j in range(begin, end if matches[at + i] == UNMATCHED else begin):
                shared = overlap(boxes, areas, first + i, objects, object_areas, j, UNIT, 0)
                if shared > _MIN_OVERLAP:
                    if shared > overlaps[at + i]:
                        overlaps[at + i] = shared
                        nearest[at + i] = j
                    if shared > best[j]:
                        best[j] = shared
                        best_box[j] = i
        while True:
            j = _best_object(begin, end, best, best_box)
            if j < 0:
                break
            box = best_box[j]
            matches[at + box] = j
            overlaps[at + box] = best[j]
            best_box[j] = -1
            for j in range(begin, end):
                if best_box[j] == box:
                    i = _best_free_box(boxes, areas, first, objects, object_areas, j, matches, at, count)
                    best_box[j], best[j] = i, -1
                    if i >= 0:
                        best[j] = overlap(boxes, areas, first + i, objects, object_areas, j, UNIT, 0)


def match_boxes(
    threads: int,
    boxes: Rows,
    firsts: NDArray[np.int64],
    count: int,
    truth: GroundTruth,
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    param: caffe_pb2.MultiBoxLossParameter,
) -> tuple[NDArray[np.int32], Rows]:
    """Match T sets of `count` boxes with T ranges of objects.

    Greedy: the pair of box and object with the largest overlap is matched first, until each object has a box. With
    PER_PREDICTION every other box that overlaps an object enough is then matched with it.
    """
    assert all(array.flags.c_contiguous for array in (boxes, truth.boxes, begins, ends))
    shape = (len(firsts), count)
    matches, nearest = np.full(shape, UNMATCHED, np.int32), np.full(shape, UNMATCHED, np.int32)
    if param.ignore_cross_boundary_bbox:
        crosses = ((boxes < 0) | (boxes > 1)).any(-1).reshape(-1)[firsts[:, None] + np.arange(count)]
        matches[crosses & (begins < ends)[:, None]] = IGNORED
    overlaps = np.zeros(shape, np.float32)
    best, best_box = np.full(len(truth), -1, np.float32), np.full(len(truth), -1, np.int64)
    sets = boxes, box_areas(boxes), firsts, count, truth.boxes, box_areas(truth.boxes), begins, ends
    _match.run(threads, len(firsts), 1, *sets, matches, overlaps, nearest, best, best_box)
    if param.match_type == _Parameter.PER_PREDICTION:
        more = (matches == UNMATCHED) & (nearest >= 0) & (overlaps >= np.float32(param.overlap_threshold))
        matches[more] = nearest[more]
    return matches, overlaps


# -- hard negatives ------------------------------------------------------------------------------------


def background_priors(
    param: caffe_pb2.MultiBoxLossParameter,
    matches: NDArray[np.int32],
    overlaps: Rows,
    losses: Rows,
    boxes: Callable[[], Rows],
) -> NDArray[np.intp]:
    """Return the indices of one image's background priors that are mined.

    HARD_EXAMPLE: among the `sample_size` priors with the largest losses. Else `neg_pos_ratio` for each match, of those
    whose overlap with an object is below `neg_overlap`.

    Args:
        param: the settings.
        matches: of each prior (P,). With HARD_EXAMPLE, matched priors that are not mined become `UNMATCHED`.
        overlaps: largest overlap of each prior (P,).
        losses: of each prior (P,).
        boxes: returns the boxes (P, 4) for the suppression.
    """
    free, hard = matches == UNMATCHED, param.mining_type == _Parameter.HARD_EXAMPLE
    eligible = np.full(len(matches), True) if hard else free & (overlaps < np.float32(param.neg_overlap))
    candidates = np.flatnonzero(eligible)
    # NaN counts as the largest loss: the loss of the batch becomes NaN too.
    keys = np.where(np.isnan(losses), np.float32(np.inf), losses)[candidates]
    quota = param.sample_size if hard else int(np.float32((matches >= 0).sum()) * np.float32(param.neg_pos_ratio))
    order, nms = np.arange(len(keys), dtype=np.int32), param.nms_param
    if param.HasField("nms_param") and nms.nms_threshold > 0:
        order = suppress_mined(boxes()[candidates], keys, nms.nms_threshold, nms.top_k).astype(np.int32)
    else:
        sort_like_cpp(keys, order)
    mined = np.zeros(len(matches), bool)
    mined[candidates[order[: min(quota, len(candidates))]]] = True
    if hard:
        matches[(matches >= 0) & ~mined] = UNMATCHED
    return np.flatnonzero(free & mined)


_LOC, _CONF, _PRIORS, _TRUTH = range(4)


@register_layer("MultiBoxLoss")
class MultiBoxLossLayer(LossLayer):
    """loss = (loc_weight * loss of the boxes + loss of the scores) / divisor (`multibox_loss_layer.cpp`).

    Shapes: predictions (N, 4 P L), scores (N, P C), priors (1, 2, 4 P), objects (1, 1, G, 8); L is 1 or, without
    share_location, C. Priors are matched with objects. The loss of a matched prediction is SMOOTH_L1 or L2 of its
    difference from the encoded object. The loss of scores is SOFTMAX or LOGISTIC with the label of the object or of the
    background. Mining selects the background priors whose scores count. The divisor is the number of matches on all
    devices (VALID, the default), of priors (FULL), of images (BATCH_SIZE), or 1 (NONE), at least 1. As in Caffe,
    `propagate_down: false` at the predictions or scores drops their loss. Among equal losses the GPU mines the first
    prior, the host the one that Caffe's `std::sort` puts first.

    Raises:
        ConfigError: settings are missing or contradict each other.
        ShapeError: the bottoms' shapes do not match num_classes.
        DataError: a prior or an object is invalid.
    """

    bottoms = (4, 4)
    no_gradient_bottoms = frozenset({_PRIORS, _TRUTH})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.multibox_loss_param
        self._check(param)
        self._warn(param)
        self._classes = param.num_classes
        self._locations = 1 if param.share_location else self._classes
        self._squared = param.loc_loss_type == _Parameter.L2
        self._enabled = [self.param.propagate_down[i] if self.param.propagate_down else True for i in (_LOC, _CONF)]
        settings = device_settings(param, self._enabled)
        self._settings = settings if self.backend.computes_box_loss else None
        self._problem = self.backend.zeros((PROBLEM,)) if self._settings is not None else None
        self._totals = self.backend.zeros((2,))
        self._sum, self._count = (self.backend.view(self._totals[i : i + 1], ()) for i in range(2))

    def _check(self, param: caffe_pb2.MultiBoxLossParameter) -> None:
        mines = param.mining_type != _Parameter.NONE
        background = param.background_label_id
        if param.num_classes < 1:
            raise self.error("num_classes is needed: how many classes there are with the background")
        if background >= param.num_classes:
            raise self.error(
                f"background_label_id {background} is not below num_classes {param.num_classes}; correct one"
            )
        if param.HasField("do_neg_mining") and param.do_neg_mining != mines:
            kind = _Parameter.MiningType.Name(param.mining_type)
            raise self.error(
                f"do_neg_mining: {str(param.do_neg_mining).lower()} contradicts mining_type: {kind}; remove "
                "do_neg_mining, which is deprecated"
            )
        if mines and not param.share_location:
            raise self.error("mining needs share_location: true; write mining_type: NONE or share_location: true")
        if param.map_object_to_agnostic and param.num_classes != 2:
            raise self.error(f"map_object_to_agnostic needs num_classes: 2, not {param.num_classes}")
        if param.mining_type == _Parameter.HARD_EXAMPLE and param.sample_size < 1:
            raise self.error(f"sample_size is {param.sample_size}; HARD_EXAMPLE needs at least 1")

    def _warn(self, param: caffe_pb2.MultiBoxLossParameter) -> None:
        """Warn of settings without effect or with an unexpected effect, as in Caffe."""
        nms = param.nms_param
        if param.HasField("nms_param") and not nms.HasField("top_k") and nms.nms_threshold > 0:
            warn(self, "nms_param without top_k leaves no candidates for mining, as in Caffe; write top_k")
        if param.ignore_difficult_gt:
            warn(self, "ignore_difficult_gt has no effect, as in Caffe; write use_difficult_gt: false")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        images, priors = bottom[_LOC].shape[0], bottom[_PRIORS].count // 8
        if bottom[_PRIORS].count != 8 * priors or bottom[_TRUTH].count % COLUMNS:
            raise self.shape_error("needs priors 1 2 4*P and objects 1 1 G 8", bottom[_PRIORS], bottom[_TRUTH])
        check_predictions(self, bottom, images, priors, 4 * self._locations, self._classes)
        self._shape = (images, priors)
        self._device_loss = None if self._settings is None else self.backend.box_loss(self._settings, images, priors)
        counted = self.normalization(caffe_pb2.LossParameter.VALID) == caffe_pb2.LossParameter.VALID
        self._divisor = None if counted else self.divisor(caffe_pb2.LossParameter.VALID, images * priors, images)

    def capture_blocker(self) -> str | None:
        return "it matches boxes on the host" if self._settings is None else super().capture_blocker()

    def raise_device_errors(self) -> None:
        """Raise if the device recorded an error since the last check. Waits for the device.

        Raises:
            DataError: with the number and values of the object or prior.
        """
        if self._problem is None:
            return
        kind, number, *values = (float(value) for value in self.backend.to_host(self._problem))
        if not kind:
            return
        self.backend.fill(self._problem, 0)
        blob = self.bottom_names[_TRUTH]
        if kind == _PRIOR:
            raise bad_prior(self, int(number), values[:4], values[4:], self.param.multibox_loss_param.code_type)
        if kind == _OBJECT:
            raise bad_object(self, blob, int(number), values)
        assert kind == _CLASS
        label = int(math.copysign(math.floor(abs(values[1]) + 0.5), values[1]))
        raise bad_class(self, blob, int(values[0]), label)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self._device_loss is not None and self._problem is not None:
            locations, scores, priors, objects = (blob.data for blob in bottom)
            self._device_loss.forward(locations, scores, priors, objects, self._totals, self._problem)
        else:
            self._forward_on_host(bottom)
        self.write_loss(self._sum, self._count, self._divisor, top[0].data)

    def _forward_on_host(self, bottom: Blobs) -> None:
        values = [self.backend.to_host(blob.data) for blob in bottom]
        totals = np.zeros(2, np.float32)
        if self.backend.holds_values:
            with np.errstate(all="ignore"):  # the solver handles a loss that is not finite
                totals[0], totals[1] = self._compute(*values)
        self.backend.from_host(totals, self._totals)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for index in (_LOC, _CONF):
            if not propagate_down[index]:
                continue
            blob = bottom[index]
            self._write_gradient(index, bottom)
            if self._divisor is None:
                self.backend.apply(scaled_over_count, (blob.diff, self._count, self.scale()), (blob.diff,), 0)
            else:
                self.backend.apply(scaled, (blob.diff, self.scale()), (blob.diff,))
            self.apply_top_gradient(top, blob.diff)

    def _write_gradient(self, index: int, bottom: Blobs) -> None:
        """Write the gradient of a bottom before the division by the divisor."""
        blob, device = bottom[index], self._device_loss
        if device is not None and index == _LOC:
            device.boxes_gradient(blob.data, bottom[_PRIORS].data, bottom[_TRUTH].data, blob.diff)
        elif device is not None:
            device.scores_gradient(blob.data, blob.diff)
        elif self.backend.holds_values:
            self.backend.from_host(self._gradients[index].reshape(blob.shape), blob.diff)
        else:
            self.backend.fill(blob.diff, 0)

    # -- on the host ---------------------------------------------------------------------------------

    def _compute(self, loc: Rows, conf: Rows, prior_values: Rows, truth_values: Rows) -> tuple[float, float]:
        """Return the sum of both losses and the number of matches, and store the gradients before the division."""
        param = self.param.multibox_loss_param
        images, count = self._shape
        locations = np.ascontiguousarray(loc.reshape(images, count, self._locations, 4).transpose(0, 2, 1, 3))
        scores = conf.reshape(images, count, self._classes)
        priors = read_priors(self, prior_values, param.code_type)
        truth = self._read_truth(truth_values)
        matches, overlaps = self._match(priors, locations, truth)
        negatives = self._mine(matches, overlaps, priors, locations, scores, truth)
        positives = Positives.of(matches)
        loc_loss, loc_gradient = self._compare_boxes(differences(priors, locations, truth, positives, param), positives)
        conf_loss, conf_gradient = self._compare_scores(scores, truth, positives, negatives)
        self._gradients = (loc_gradient, conf_gradient)
        return loc_loss * self._enabled[_LOC] + conf_loss * self._enabled[_CONF], len(positives.images)

    def _read_truth(self, values: Rows) -> GroundTruth:
        """Return the objects of the batch's images."""
        param, name = self.param.multibox_loss_param, self.bottom_names[_TRUTH]
        truth = read_ground_truth(self, values, name, param.background_label_id, difficult=param.use_difficult_gt)
        bad = np.flatnonzero((truth.labels >= self._classes) & (truth.images >= 0) & (truth.images < self._shape[0]))
        if len(bad) and not param.map_object_to_agnostic:
            raise bad_class(self, name, int(truth.images[bad[0]]), int(truth.labels[bad[0]]))
        return truth

    def _match(self, priors: Priors, locations: Rows, truth: GroundTruth) -> tuple[NDArray[np.int32], Rows]:
        """Return the objects of the predictions (N, L, P), and the overlaps (N, P) for mining."""
        param, threads = self.param.multibox_loss_param, host_threads(self)
        images, count = self._shape
        begins = truth.begins(images)
        if not param.use_prior_for_matching:
            return self._match_predictions(priors, locations, truth, begins)
        sets = np.zeros(images, np.int64)
        matches, overlaps = match_boxes(threads, priors.boxes, sets, count, truth, begins[:-1], begins[1:], param)
        if param.share_location:
            return matches[:, None], overlaps
        labels = np.full(matches.shape, -1)
        labels[matches >= 0] = truth.labels[matches[matches >= 0]]
        same_class = labels[:, None] == np.arange(self._classes)[:, None]
        return np.where(same_class, matches[:, None], np.int32(UNMATCHED)), overlaps

    def _match_predictions(
        self, priors: Priors, locations: Rows, truth: GroundTruth, begins: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], Rows]:
        """`_match` by predicted boxes; without share_location each class matches its own objects."""
        param, threads = self.param.multibox_loss_param, host_threads(self)
        images, count = self._shape
        boxes = decode(priors, locations, param.code_type, param.encode_variance_in_target)
        sets = np.arange(images * self._locations, dtype=np.int64)
        if param.share_location:
            matches, overlaps = match_boxes(threads, boxes, sets * count, count, truth, begins[:-1], begins[1:], param)
            return matches[:, None], overlaps
        order = np.lexsort((truth.labels, truth.images))
        by_class = GroundTruth(*(part[order] for part in vars(truth).values()))
        stride = max(self._classes, int(by_class.labels.max(initial=0)) + 1)
        keys = by_class.images * stride + by_class.labels
        set_keys = sets // self._locations * stride + sets % self._locations
        ranges = np.searchsorted(keys, set_keys), np.searchsorted(keys, set_keys, side="right")
        matches, overlaps = match_boxes(threads, boxes, sets * count, count, by_class, *ranges, param)
        matches = np.where(matches >= 0, order[matches].astype(np.int32), matches) if len(order) else matches
        shape = (images, self._locations, count)
        return matches.reshape(shape), overlaps.reshape(shape)[:, 0]

    def _mine(
        self,
        matches: NDArray[np.int32],
        overlaps: Rows,
        priors: Priors,
        locations: Rows,
        scores: Rows,
        truth: GroundTruth,
    ) -> NDArray[np.bool_] | None:
        """Return a mask (N, P) of background priors; None: all unmatched priors. HARD_EXAMPLE may remove matches."""
        param = self.param.multibox_loss_param
        if param.mining_type == _Parameter.NONE:
            return None
        positives = Positives.of(matches)
        begins = truth.begins(self._shape[0])
        with_objects = begins[1:] > begins[:-1]
        labels = np.where(with_objects[:, None], np.int32(param.background_label_id), np.int32(-1))
        labels = np.broadcast_to(labels, self._shape).copy()
        labels[positives.images, positives.priors] = self._labels(truth, positives)
        losses = class_losses(host_threads(self), scores, labels, param.conf_loss_type == _Parameter.LOGISTIC)
        if param.mining_type == _Parameter.HARD_EXAMPLE:
            loss = box_losses(differences(priors, locations, truth, positives, param), self._squared)
            losses[positives.images, positives.priors] += ((loss[:, 0] + loss[:, 1]) + loss[:, 2]) + loss[:, 3]
        negatives = np.zeros(self._shape, bool)
        for image in np.flatnonzero(with_objects):

            def boxes(image: int = int(image)) -> Rows:
                if param.use_prior_for_nms:
                    return priors.boxes
                return decode(priors, locations[image, 0], param.code_type, param.encode_variance_in_target)

            selected = background_priors(param, matches[image, 0], overlaps[image], losses[image], boxes)
            negatives[image, selected] = True
        return negatives

    def _labels(self, truth: GroundTruth, positives: Positives) -> NDArray[np.int64]:
        param = self.param.multibox_loss_param
        labels = truth.labels[positives.objects]
        return np.full_like(labels, param.background_label_id + 1) if param.map_object_to_agnostic else labels

    def _compare_boxes(self, difference: Rows, positives: Positives) -> tuple[float, Rows]:
        """Return the weighted loss of the predictions and its gradient (N, P, L, 4)."""
        images, count = self._shape
        weight = np.float32(self.param.multibox_loss_param.loc_weight)
        gradient = np.zeros((images, count, self._locations, 4), np.float32)
        slopes = box_gradients(difference, self._squared)
        gradient[positives.images, positives.priors, positives.classes] = weight * slopes
        return float(weight * box_losses(difference, self._squared).sum(dtype=np.float64)), gradient

    def _compare_scores(
        self, scores: Rows, truth: GroundTruth, positives: Positives, negatives: NDArray[np.bool_] | None
    ) -> tuple[float, Rows]:
        """Return the loss of the scores of positive and mined priors, and its gradient (N, P, C)."""
        param = self.param.multibox_loss_param
        matched, labels = positives.images * self._shape[1] + positives.priors, self._labels(truth, positives)
        if negatives is None:
            rows = np.arange(scores.size // self._classes)
        else:
            negatives[positives.images, positives.priors] = True
            rows = np.flatnonzero(negatives)
        indices = np.searchsorted(rows, matched)
        if param.conf_loss_type == _Parameter.SOFTMAX:
            row_labels = np.full(len(rows), param.background_label_id, np.int32)
            row_labels[indices] = labels
            return softmax_loss(host_threads(self), scores, rows, row_labels)
        # As in multibox_loss_layer.cpp, targets start as the background's index, which is 0 only for class 0.
        targets = np.full((len(rows), self._classes), param.background_label_id, np.float32)
        if negatives is not None:
            targets[:, param.background_label_id] = 1
            targets[indices, param.background_label_id] = param.background_label_id
        targets[indices, labels] = 1
        return logistic_loss(scores, rows, targets)


# -- confidence losses ---------------------------------------------------------------------------------


_FLT_MIN = float(np.finfo(np.float32).tiny)
_ROWS_PER_THREAD = 4096
"""Minimum number of rows for each thread."""


@kernel
def _class_losses(
    begin: Int, end: Int, scores: Floats, labels: Ints, classes: Int, logistic: Int, losses: Floats
) -> None:
    """losses = loss of each row of scores for its label; 0 if the label is negative."""
    for row in range(begin, end):
        losses[row] = 0
        label = labels[row]
        if label < 0:
            continue
        at = row * classes
        if logistic:
            loss = np.float32(0)
            for c in range(classes):
                x = scores[at + c]
                target = np.float32(1 if c == label else 0)
                over = np.float32(1 if x >= 0 else 0)
                negative = x if x < 0 else -x
                loss -= x * (target - over) - math.log(np.float32(1) + math.exp(negative))
            losses[row] = loss
            continue
        largest = scores[at]
        for c in range(1, classes):
            largest = max(largest, scores[at + c])
        total = np.float32(0)
        for c in range(classes):
            total += math.exp(scores[at + c] - largest)
        losses[row] = -math.log(max(math.exp(scores[at + label] - largest) / total, np.float32(_FLT_MIN)))


def class_losses(threads: int, scores: Rows, labels: NDArray[np.int32], logistic: bool) -> Rows:
    """Return the loss of each prior's scores (N, P, C) for its label (N, P); 0 if the label is negative."""
    losses = np.empty(labels.shape, np.float32)
    _class_losses.run(threads, labels.size, _ROWS_PER_THREAD, scores, labels, scores.shape[-1], int(logistic), losses)
    return losses


@kernel
def _softmax_rows(
    begin: Int, end: Int, scores: Floats, rows: Words, labels: Ints, classes: Int, losses: Floats, gradients: Floats
) -> None:
    """losses = -log softmax(row)[label], gradients = softmax(row) - onehot(label), for the rows of these indices."""
    for i in range(begin, end):
        at = rows[i] * classes
        largest = scores[at]
        for c in range(1, classes):
            largest = max(largest, scores[at + c])
        total = np.float32(0)
        for c in range(classes):
            gradients[at + c] = math.exp(scores[at + c] - largest)
            total += gradients[at + c]
        for c in range(classes):
            gradients[at + c] /= total
        losses[i] = -math.log(max(gradients[at + labels[i]], np.float32(_FLT_MIN)))
        gradients[at + labels[i]] -= np.float32(1)


def softmax_loss(threads: int, scores: Rows, rows: NDArray[np.int64], labels: NDArray[np.int32]) -> tuple[float, Rows]:
    """Return the loss of the given rows of scores (..., C) for labels (K,), and its gradient, 0 in all other rows."""
    losses, gradients = np.empty(len(rows), np.float32), np.zeros(scores.shape, np.float32)
    _softmax_rows.run(threads, len(rows), _ROWS_PER_THREAD, scores, rows, labels, scores.shape[-1], losses, gradients)
    return float(losses.sum(dtype=np.float64)), gradients


def logistic_loss(scores: Rows, rows: NDArray[np.int64], targets: Rows) -> tuple[float, Rows]:
    """As `softmax_loss`, for the sum over classes of the cross entropy of sigmoid(score) and targets (K, C)."""
    classes = scores.shape[-1]
    x = scores.reshape(-1, classes)[rows]
    small = np.exp(-np.abs(x))
    losses = np.maximum(x, 0) - x * targets + np.log1p(small)
    gradients = np.zeros(scores.shape, np.float32)
    gradients.reshape(-1, classes)[rows] = np.where(x >= 0, 1, small) / (1 + small) - targets
    return float(losses.sum(dtype=np.float64)), gradients


# -- localization losses -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Positives:
    """The K predictions that are matched with an object: image, location class, prior and object (K,) of each."""

    images: NDArray[np.intp]
    classes: NDArray[np.intp]
    priors: NDArray[np.intp]
    objects: NDArray[np.int32]

    @classmethod
    def of(cls, matches: NDArray[np.int32]) -> Positives:
        """Return the positives of matches (N, L, P)."""
        images, classes, priors = np.nonzero(matches >= 0)
        return cls(images, classes, priors, matches[images, classes, priors])


def differences(
    priors: Priors, locations: Rows, truth: GroundTruth, positives: Positives, param: caffe_pb2.MultiBoxLossParameter
) -> Rows:
    """Return prediction - encoded object (K, 4); with `bp_inside` 0 for coordinates outside of the image."""
    matched_priors = Priors(priors.boxes[positives.priors], priors.variances[positives.priors])
    codes = locations[positives.images, positives.classes, positives.priors]
    predicted = codes / matched_priors.variances if param.encode_variance_in_target else codes
    result = predicted - encode(matched_priors, truth.boxes[positives.objects], param.code_type)
    if param.bp_inside:
        boxes = matched_priors.boxes
        if not param.use_prior_for_matching:
            boxes = decode(matched_priors, codes, param.code_type, param.encode_variance_in_target)
        result[(boxes < 0) | (boxes > 1)] = 0
    return result


def box_losses(difference: Rows, squared: bool) -> Rows:
    """Return the loss of each coordinate: d^2 / 2, or smooth L1 (|d| - 1 / 2 for |d| >= 1) unless `squared`."""
    size = np.abs(difference)
    half = np.float32(0.5)
    square = half * difference * difference
    return square if squared else np.where(size < 1, square, size - half)


def box_gradients(difference: Rows, squared: bool) -> Rows:
    """Return the derivative of `box_losses`."""
    return difference if squared else np.clip(difference, -1, 1)


# -- on the device -------------------------------------------------------------------------------------


_OBJECT, _CLASS, _PRIOR = 1, 2, 3
"""Kinds of errors that `BoxLoss.forward` records."""
PROBLEM = 10
"""Size of the record of an error."""


def device_settings(param: caffe_pb2.MultiBoxLossParameter, counts: Sequence[bool]) -> BoxLossSettings | None:
    """Return the settings of a backend's BoxLoss; None if the loss must be computed on the host."""
    logistic, mines = param.conf_loss_type == _Parameter.LOGISTIC, param.mining_type != _Parameter.NONE
    background, fractions = param.background_label_id, (param.overlap_threshold, param.neg_overlap, param.loc_weight)
    supported = (
        param.share_location
        and param.use_prior_for_matching
        and param.mining_type != _Parameter.HARD_EXAMPLE
        and not (mines and param.HasField("nms_param") and param.nms_param.nms_threshold > 0)
        and (background == 0 or (background > 0 and not logistic))
        and all(map(math.isfinite, fractions))
        and 0 <= param.neg_pos_ratio < math.inf
    )
    if not supported:
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
