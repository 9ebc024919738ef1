"""Connectionist temporal classification (Graves et al. 2006): losses, the greedy decoder, accuracies of sequences.

A path has a class for each time step. It spells the labels that remain when classes that repeat are merged and blanks
are removed. The loss is the negative logarithm of the probability of all paths that spell the labels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.host import HostLayer
from caffepy.layers.layer import Blobs, Layer, register_layer
from caffepy.layers.loss import LossLayer

Floats = NDArray[Any]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

PADDING = -1


def kept_left(values: Integers, kept: Flags) -> tuple[Integers, Integers]:
    """Return rows (N, L) with the `kept` values at their left and -1 behind, and their number, (N,)."""
    order, lengths = np.argsort(~kept, axis=1, kind="stable"), kept.sum(axis=1)
    behind = np.arange(values.shape[1]) >= lengths[:, None]
    return np.where(behind, PADDING, np.take_along_axis(values, order, axis=1)), lengths


def written_labels(rows: Floats, blank: int) -> tuple[Integers, Integers]:
    """Return the labels of rows (N, L) that end at the first negative number, without blanks, and their lengths."""
    values = np.trunc(rows.reshape(rows.shape[0], -1)).astype(np.int64)
    return kept_left(values, np.logical_and.accumulate(values >= 0, axis=1) & (values != blank))


def spelled(scores: Floats, blank: int, merge: bool = True) -> tuple[Integers, Integers]:
    """Return the labels, (N, T) with -1 behind, of each step's class with the highest score, and their lengths.

    Args:
        scores: (N, T, C); of equal ones the first class counts.
        blank: the class without a label.
        merge: whether a class that repeats is one label.
    """
    best = scores.argmax(axis=2)
    kept = best != blank
    if merge:
        kept[:, 1:] &= best[:, 1:] != best[:, :-1]
    return kept_left(best, kept)


def edit_distances(first: Integers, sizes: Integers, second: Integers, other_sizes: Integers) -> Integers:
    """Return for each row the fewest insertions, deletions and replacements (Levenshtein 1966)."""
    ends = np.arange(second.shape[1] + 1)
    row = np.broadcast_to(ends, (len(first), len(ends)))
    rows = [row]
    for i in range(int(sizes.max(initial=0))):
        replaced = row[:, :-1] + (second != first[:, i : i + 1])
        row = np.concatenate([row[:, :1] + 1, np.minimum(row[:, 1:] + 1, replaced)], axis=1)
        row = np.minimum.accumulate(row - ends, axis=1) + ends  # insertions
        rows.append(row)
    return np.stack(rows)[sizes, np.arange(len(first)), other_sizes]


def _advanced(states: Floats, skips: Flags) -> Floats:
    """Return the logarithms of the sums over the states before each one: itself, the last, and where `skips` before."""
    total = states.copy()
    total[:, 1:] = np.logaddexp(total[:, 1:], states[:, :-1])
    total[:, 2:] = np.where(skips[:, 2:], np.logaddexp(total[:, 2:], states[:, :-2]), total[:, 2:])
    return total


def ctc_losses(
    scores: Floats, labels: Integers, lengths: Integers, steps: Integers, blank: int
) -> tuple[Floats, Floats]:
    """Return each sequence's loss, (N,), and the gradient of their sum by the scores, (T, N, C), in float64.

    The loss of labels that no path of the sequence's time steps spells is 0, and has no gradient. `scores` are before
    the softmax. Paths are added up forwards and backwards in logarithms, over states: blanks and labels in turn.

    Args:
        scores: (T, N, C).
        labels: (N, L), of which the first ones count.
        lengths: (N,), how many labels count.
        steps: (N,), how many time steps the sequence has.
        blank: the class without a label.
    """
    fits = lengths <= steps
    lengths = np.where(fits, lengths, 0)
    labels = np.where(labels < 0, blank, labels)[:, : lengths.max(initial=0)]
    times, samples, _ = scores.shape
    scores = scores - scores.max(axis=2, keepdims=True).astype(np.float64)
    gradient = np.exp(scores)
    sums = gradient.sum(axis=2, keepdims=True)
    gradient /= sums
    shape = (samples, 2 * labels.shape[1] + 1)
    states, skips, skips_back = np.full(shape, blank), np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    states[:, 1::2] = labels
    skips[:, 3::2] = (labels[:, 1:] != labels[:, :-1]) & (labels[:, 1:] != blank)
    skips_back[:, :-2] = skips[:, 2:]
    emitted = np.take_along_axis(scores, np.broadcast_to(states, (times, *shape)), axis=2) - np.log(sums)

    forwards, backwards = (np.full((times, *shape), -np.inf) for _ in range(2))
    forwards[0, :, :2] = emitted[0, :, :2]
    for t in range(1, times):
        forwards[t] = emitted[t] + _advanced(forwards[t - 1], skips)
    places = np.arange(shape[1])
    ends = (places <= 2 * lengths[:, None]) & (places >= 2 * lengths[:, None] - 1)
    following = np.full(shape, -np.inf)
    for t in reversed(range(times)):
        last = (steps == t + 1)[:, None]
        backwards[t] = np.where(last, np.where(ends, 0.0, -np.inf), following)
        following = _advanced((backwards[t] + emitted[t])[:, ::-1], skips_back[:, ::-1])[:, ::-1]

    likelihoods = np.logaddexp.reduce(forwards[0] + backwards[0], axis=1)
    possible = fits & (likelihoods != -np.inf)
    taken = np.exp(forwards + backwards - np.where(possible, likelihoods, 0.0)[:, None])
    np.subtract.at(gradient, (np.arange(times)[:, None, None], np.arange(samples)[:, None], states), taken)
    counted = possible & (np.arange(times)[:, None] < steps)
    return np.where(possible, -likelihoods, 0.0), np.where(counted[..., None], gradient, 0.0)


def _sequences(layer: Layer, blob: Blob, axes: str = "time steps, sequences, classes") -> tuple[int, int, int]:
    """Return the sizes of scores whose axes are these; one of size 1 may follow."""
    shape = blob.shape
    if len(shape) not in (3, 4) or shape[3:] not in ((), (1,)) or min(shape) < 1:
        raise layer.shape_error(f"needs scores ({axes}), none of them 0", blob)
    return shape[0], shape[1], shape[2]


def _check_rows(layer: Layer, samples: int, bottom: Blobs) -> None:
    if bottom[1].shape[:1] != (samples,):
        raise layer.shape_error(f"needs a row of labels for each of {samples} sequences", *bottom)


def _blank_class(layer: Layer, index: int, classes: int) -> int:
    """Return the class of the blank."""
    if index >= classes:
        raise layer.error(f"the blank is class {index}, but there are {classes} classes, from 0 on")
    return classes - 1 if index < 0 else index


@register_layer("WarpCTCLoss")
class WarpCTCLossLayer(LossLayer):
    """Negative logarithm of the labels' probability, mean over sequences (caffe_ocr's `warp_ctc_loss_layer.cpp`).

    Bottom 0: scores before the softmax, (T, N, C) or (T, N, C, 1). The blank is the class `blank_index`, or with a
    negative one the last class. The other bottoms:

    - 2 bottoms: labels (N, L). Blanks are left out, and a negative number ends a sequence. All have T time steps.
    - 3 bottoms: flags (T, N), of which the first 0 from time step 1 on ends a sequence; labels (L, N) that end at the
      first negative number. If the blank is class 0, they count from the class behind it: 1 is added to each. A
      sequence without labels has no time steps.
    - 4 bottoms: the number of time steps, (N,); that of labels, (N,); labels (L, N).

    The mean is that over sequences with time steps.

    The gradient is that of the sum, N times the mean's, as in caffe_ocr, and is multiplied by the loss weight. Labels
    that no path of the sequence's time steps spells give the loss and the gradient 0, as in warp-ctc. They need a
    blank between equal ones.

    The host computes loss and gradient, in float64: the scores are copied to it.

    Raises:
        ConfigError: the blank is no class.
        ShapeError: the bottoms' shapes do not fit each other.
        DataError: a label is no class, or a length exceeds its bottom.
    """

    bottoms = (2, 4)
    no_gradient_bottoms = frozenset({1, 2, 3})
    _gradient: Any = None
    """Of the last forward pass; None where the backend holds no values."""

    def capture_blocker(self) -> str | None:
        return "it adds up paths on the host"

    def blank(self, classes: int) -> int:
        """Return the class of the blank."""
        return _blank_class(self, self.param.ctc_loss_param.blank_index, classes)

    def time_steps(self, available: int) -> int:
        """Return how many of the scores' time steps the loss reads, without a bottom that says so."""
        return available

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._sizes = times, samples, classes = _sequences(self, bottom[0])
        self._blank, self._steps = self.blank(classes), self.time_steps(times)
        labels, lengths = bottom[-1], bottom[1:-1]
        if len(bottom) == 2:
            _check_rows(self, samples, bottom)
        if len(bottom) > 2 and labels.shape[1:2] != (samples,):
            raise self.shape_error(f"needs labels (L, N), a column for each of {samples} sequences", *bottom)
        if any(blob.count != (times * samples if len(bottom) == 3 else samples) for blob in lengths):
            raise self.shape_error("needs flags (T, N) between scores and labels, or two lengths (N,) each", *bottom)
        top[0].reshape(())

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        scores, *others = (self.backend.to_host(blob.data) for blob in bottom)
        loss = 0.0
        if self.backend.holds_values:
            with np.errstate(all="ignore"):  # the solver handles a loss that is not finite
                labels, lengths, steps = self._read(*others)
                losses, gradient = ctc_losses(scores.reshape(self._sizes), labels, lengths, steps, self._blank)
            loss = losses.sum() / max(np.count_nonzero(steps), 1)
            # Training averages gradients over devices.
            devices = self.context.shard.parts if self.context.phase == caffe_pb2.TRAIN else 1
            self._gradient = np.float32(gradient * devices).reshape(bottom[0].shape)
        self.backend.from_host(np.float32(loss), top[0].data)

    def _read(self, *others: Floats) -> tuple[Integers, Integers, Integers]:
        """Return labels (N, L), their numbers and those of time steps."""
        times, samples, classes = self._sizes
        steps = np.full(samples, self._steps)
        if len(others) == 1:
            labels, lengths = written_labels(others[0], self._blank)
        elif len(others) == 2:
            labels, lengths = written_labels(others[1].reshape(-1, samples).T, PADDING)
            labels += self._blank == 0
            over = np.trunc(others[0].reshape(times, samples) + 0.5) == 0
            over[0] = False
            steps = np.where(over.any(axis=0), over.argmax(axis=0), times) * (lengths > 0)
        else:
            steps, lengths = (numbers.reshape(samples).astype(np.int64) for numbers in others[:2])
            labels = others[2].reshape(-1, samples).T.astype(np.int64)
            for numbers, most, what in ((steps, times, "time steps"), (lengths, labels.shape[1], "labels")):
                for number in np.flatnonzero((numbers < 0) | (numbers > most)):
                    raise self.data_error(f"sequence {number} has {numbers[number]} {what}; there are 0 to {most}")
        counted = np.arange(labels.shape[1]) < lengths[:, None]
        wrong = np.argwhere(counted & ((labels < 0) | (labels >= classes)))
        if len(wrong):
            row, place = wrong[0]
            raise self.data_error(
                f"label {place} of sequence {row} is class {labels[row, place]}, outside the {classes} classes, 0 to "
                f"{classes - 1}; correct the data, or give '{self.bottom_names[0]}' more classes"
            )
        return np.where(counted, labels, PADDING), lengths, steps

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.load_gradient(self._gradient, top, bottom[0].diff)


@register_layer("CtcLoss")
class CtcLossLayer(WarpCTCLossLayer):
    """WarpCTCLoss of two bottoms with the settings of crnn.caffe (`ctc_loss_layer.cpp`).

    The blank is the class `blank_label`. The loss reads the first `time_step` time steps of the scores, which have no
    gradient behind. `alphabet_size` must be C.

    Raises:
        ConfigError: alphabet_size or time_step is not that of the scores, or the blank is no class.
        ShapeError: there is not a row of labels for each sequence.
        DataError: a label is no class.
    """

    bottoms = (2, 2)

    def blank(self, classes: int) -> int:
        param = self.param.ctc_loss_param
        if param.alphabet_size != classes or param.blank_label < 0:
            raise self.error(
                f"ctc_loss_param has alphabet_size {param.alphabet_size} and blank_label {param.blank_label}; the "
                f"scores have {classes} classes, 0 to {classes - 1}"
            )
        return _blank_class(self, param.blank_label, classes)

    def time_steps(self, available: int) -> int:
        steps = self.param.ctc_loss_param.time_step
        if not 0 < steps <= available:
            raise self.error(f"ctc_loss_param.time_step is {steps}; the scores have {available} time steps")
        return steps


@register_layer("CTCGreedyDecoder")
class CTCGreedyDecoderLayer(HostLayer):
    """The labels that the most likely path spells, or how right they are (caffe_ocr's `ctc_decoder_layer.cpp`).

    Bottom 0: scores or probabilities (T, N, C) or (T, N, C, 1). The path has each time step's class with the highest
    score, of equal ones the first. Without `ctc_merge_repeated` classes that repeat are as many labels. The blank is
    the class `blank_index`, or with a negative one the last class.

    With one bottom the top is (N, T, 1, 1): the labels, and -1 behind them. With labels (N, L) as bottom 1, where
    blanks are left out and a negative number ends a sequence, it is (1, 2, 1, 1): 1 - the mean of the edit distance
    over the longer one's length, and the part of sequences without a mistake. A sequence that has no labels and gets
    none counts as right in the first number alone, as in caffe_ocr.

    Raises:
        ConfigError: the blank is no class.
        ShapeError: there is not a row of labels for each sequence, or a size is 0.
    """

    bottoms = (1, 2)
    has_backward = False
    no_gradient_bottoms = frozenset({1})
    blocker = "it decodes sequences on the host"

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        times, samples, classes = self._sizes = _sequences(self, bottom[0])
        self._blank = _blank_class(self, self.param.ctc_decoder_param.blank_index, classes)
        if len(bottom) > 1:
            _check_rows(self, samples, bottom)
        top[0].reshape((1, 2, 1, 1) if len(bottom) > 1 else (samples, times, 1, 1))

    def compute(self, scores: Floats, labels: Floats | None = None) -> list[Floats]:
        merge = self.param.ctc_decoder_param.ctc_merge_repeated
        found, sizes = spelled(scores.reshape(self._sizes).swapaxes(0, 1), self._blank, merge)
        if labels is None:
            return [found[..., None, None]]
        wanted, lengths = written_labels(labels, self._blank)
        distances, longer = edit_distances(wanted, lengths, found, sizes), np.maximum(lengths, sizes)
        scored = (1 - (distances / np.maximum(longer, 1)).mean(), ((distances == 0) & (longer > 0)).mean())
        return [np.reshape(scored, (1, 2, 1, 1))]


@register_layer("LabelsequenceAccuracy")
class LabelsequenceAccuracyLayer(HostLayer):
    """The part of sequences whose labels are all right (crnn.caffe's `labelsequence_accuracy_layer.cpp`).

    Bottoms: scores (N, T, C) and labels (N, L), of which blanks are left out. The labels that count as found are those
    of CTCGreedyDecoder, with `blank_label` as blank.

    Raises:
        ConfigError: the blank is no class.
        ShapeError: there is not a row of labels for each sequence, or a size is 0.
    """

    bottoms = (2, 2)
    has_backward = False
    no_gradient_bottoms = frozenset({1})
    blocker = "it decodes sequences on the host"

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        axes = "sequences, time steps, classes"
        self._sizes = samples, _, classes = _sequences(self, bottom[0], axes)
        self._blank = _blank_class(self, self.param.labelsequence_accuracy_param.blank_label, classes)
        _check_rows(self, samples, bottom)
        top[0].reshape(())

    def compute(self, scores: Floats, labels: Floats) -> list[Floats]:
        found, sizes = spelled(scores.reshape(self._sizes), self._blank)
        wanted, lengths = written_labels(labels, self._blank)
        shared = min(found.shape[1], wanted.shape[1])
        right = (sizes == lengths) & (sizes <= shared) & (found[:, :shared] == wanted[:, :shared]).all(axis=1)
        return [np.asarray(right.mean())]
