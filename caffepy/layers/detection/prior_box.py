"""PriorBox."""

from __future__ import annotations

from bisect import bisect, insort

import numpy as np

from caffepy.data.boxes import Rows
from caffepy.formats.blobs import check_shape
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Blobs, Layer, register_layer


@register_layer("PriorBox")
class PriorBoxLayer(Layer):
    """The prior boxes at each position of a feature map (`prior_box_layer.cpp`).

    Shapes: feature map (N, C, H, W), image (N, C, h, w), top (1, 2, H W K 4): boxes and variances. Each position has,
    for each min_size, a square of this side, with max_size a square of side sqrt(min_size * max_size), and for each
    aspect_ratio other than 1, with `flip` also for its inverse, a box of the first square's area. As in Caffe, sizes
    are truncated to whole pixels. With `denser_prior_boxes` each box is followed by the same box around the position's
    lower edge, h + 1 steps down (TextBoxes++'s `prior_box_layer.cpp`). The boxes are computed when the shapes change.

    Raises:
        ConfigError: a setting is missing, given twice or out of range.
        ShapeError: a bottom does not have four axes, or the feature map is empty.
    """

    bottoms = (2, 2)
    has_backward = False
    reads_shapes_only = True
    supports_half = True
    recordable = True
    float32_tops_from = 0

    ratios: list[np.float32]
    """Aspect ratios other than 1, with the ratios that `flip` adds."""
    image_size: tuple[float, float] | None
    """Height and width of the image; None: those of the second bottom."""
    step_size: tuple[float, float] | None
    """Pixels between positions, down and right; None: image_size over the feature map's size."""
    variances: Rows
    """Four numbers."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.prior_box_param
        self.check_sizes()
        self.ratios = self._all_ratios()
        self.image_size = self._pair("img_size", "img_h", "img_w")
        self.step_size = self._pair("step", "step_h", "step_w")
        variances = list(param.variance) or [0.1]
        if len(variances) not in (1, 4) or not all(value > 0 for value in variances):
            raise self.error("variance must be given once or four times, and be above 0; correct prior_box_param")
        self.variances = np.full(4, variances, np.float32)

    def check_sizes(self) -> None:
        """Refuse fields of which `extents` cannot make boxes."""
        param = self.param.prior_box_param
        if param.width or param.height:
            raise self.error("width and height are settings of PriorBoxClustered; give min_size, or change the type")
        if not param.min_size or not all(1 <= size < 2**31 for size in param.min_size):
            raise self.error("min_size is needed, in pixels, and must be at least 1; correct prior_box_param")
        if param.max_size and len(param.max_size) != len(param.min_size):
            raise self.error(
                f"has {len(param.max_size)} max_size for {len(param.min_size)} min_size; give one for each, or none"
            )
        for small, large in zip(param.min_size, param.max_size, strict=False):
            if not small < large < 2**31:
                raise self.error(f"max_size {large:g} must be above its min_size {small:g}; correct prior_box_param")
        if not all(ratio > 0 for ratio in param.aspect_ratio):
            raise self.error("aspect_ratio must be above 0; correct prior_box_param")

    def _all_ratios(self) -> list[np.float32]:
        """Return the distinct ratios other than 1; with `flip` the inverse follows each."""
        param, ratios = self.param.prior_box_param, [np.float32(1)]
        known = list(ratios)
        """Sorted: only the neighbours of a ratio can equal it."""
        for ratio in np.array(param.aspect_ratio, np.float32):
            at = bisect(known, ratio)
            if all(abs(ratio - other) >= 1e-6 for other in known[max(at - 1, 0) : at + 1]):
                new = [ratio, np.float32(1 / float(ratio))] if param.flip else [ratio]
                ratios += new
                for value in new:
                    insort(known, value)
        return ratios[1:]

    def _pair(self, both: str, height: str, width: str) -> tuple[float, float] | None:
        """Return a setting (height, width), given as one number or two; None if it is not given."""
        param = self.param.prior_box_param
        names = [name for name in (height, width) if param.HasField(name)]
        if names and param.HasField(both):
            raise self.error(f"has {both} and {names[0]}; keep {both}, or {height} and {width}")
        if not names and not param.HasField(both):
            return None
        pair = (getattr(param, height), getattr(param, width)) if names else (getattr(param, both),) * 2
        if not all(value > 0 for value in pair):
            raise self.error(f"{f'{height} and {width}' if names else both} must be given and be above 0")
        return pair

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for blob in bottom:
            if len(blob.shape) != 4:
                raise self.shape_error("needs a feature map and an image of 4 axes", *bottom)
        kinds = self.boxes_of_position() * (1 + self.param.prior_box_param.denser_prior_boxes)
        shape = (1, 2, bottom[0].shape[2] * bottom[0].shape[3] * kinds * 4)
        check_shape(shape, self.where)
        if not shape[2]:
            raise self.shape_error("the feature map has no positions", bottom[0])
        top[0].reshape(shape)
        self._priors = self.backend.zeros(shape)
        if self.backend.holds_values:
            boxes = self._boxes(*bottom).reshape(-1)
            variances = np.tile(self.variances, len(boxes) // 4)
            self.backend.from_host(np.stack([boxes, variances])[None], self._priors)

    def _boxes(self, features: Blob, image: Blob) -> Rows:
        """Return all boxes (H, W, K, 4)."""
        height, width = features.shape[2:]
        image_height, image_width = (np.float32(v) for v in self.image_size or image.shape[2:])
        steps = self.step_size or (float(image_height / np.float32(height)), float(image_width / np.float32(width)))
        offset = np.float32(self.param.prior_box_param.offset)
        y, x = (
            (np.arange(count, dtype=np.float32) + offset) * np.float32(step)
            for count, step in zip((height, width), steps, strict=True)
        )
        half = self.extents() / 2.0
        centers = np.stack(np.broadcast_arrays(x[None, :], y[:, None]), axis=-1)[:, :, None].astype(np.float64)
        if self.param.prior_box_param.denser_prior_boxes:
            lower = (np.arange(height, dtype=np.float32) + np.float32(1)) * np.float32(steps[0])
            moved = np.stack(np.broadcast_arrays(x[None, :], lower[:, None]), axis=-1)[:, :, None].astype(np.float64)
            centers = np.tile(np.concatenate([centers, moved], 2), (1, 1, len(half), 1))
            half = np.repeat(half, 2, 0)
        scale = np.array([image_width, image_height], np.float64)
        boxes = np.concatenate([(centers - half) / scale, (centers + half) / scale], axis=-1).astype(np.float32)
        return np.clip(boxes, 0, 1) if self.param.prior_box_param.clip else boxes

    def boxes_of_position(self) -> int:
        """Return the number of boxes that `extents` makes."""
        param = self.param.prior_box_param
        return len(param.min_size) * (len(self.ratios) + 1) + len(param.max_size)

    def extents(self) -> np.ndarray:
        """Return width and height of the boxes of one position (K, 2), in pixels."""
        param = self.param.prior_box_param
        extents: list[tuple[float, float]] = []
        for index, size in enumerate(map(int, param.min_size)):
            extents.append((size, size))
            if param.max_size:
                extents.append((np.sqrt(size * int(param.max_size[index])),) * 2)
            roots = [np.sqrt(ratio) for ratio in self.ratios]
            extents += [(size * root, size / root) for root in roots]
        return np.array(extents, np.float32).astype(np.float64)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.copy(self._priors, top[0].data)
