"""Which of the two Caffes' numbers a net gets where they differ: BVLC's or NVIDIA's.

The net decides: NVIDIA's where the net or its solver uses a field that NVIDIA Caffe alone has, BVLC's otherwise.
`caffepy --dialect` overrides it, for scripts the variable CAFFEPY_DIALECT. What differs: docs/reference/differences.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

from google.protobuf.message import Message

from caffepy.config.messages import walk_fields
from caffepy.errors import ConfigError

log = logging.getLogger(__name__)

VARIABLE = "CAFFEPY_DIALECT"

LEAST_EPSILON = 1e-5
"""BatchNorm's eps is at least this in NVIDIA's dialect, as cuDNN demands (`batch_norm_layer.cpp` of NVIDIA Caffe)."""


class Dialect(Enum):
    """The Caffe whose numbers are computed where the two differ; the values are what --dialect takes."""

    BVLC = "bvlc"
    NVIDIA = "nvidia"


NVIDIA_FIELDS: dict[str, frozenset[str]] = {
    message: frozenset(fields.split())
    for message, fields in {
        "BatchNormParameter": "bias_filler engine scale_bias scale_filler",
        "ConvolutionParameter": "conv_algos_override cudnn_convolution_algo_seeker",
        "DataParameter": "cache parser_threads precache shuffle threads",
        "DropoutParameter": "engine random_seed",
        "ELUParameter": "lambda",
        "ImageDataParameter": "cache dataset_share_per_node precache short_side threads",
        "LayerParameter": "backward_math backward_type cudnn_math_override debug detectnet_augmentation_param "
        "detectnet_groundtruth_param forward_math forward_type trt_param",
        "LossParameter": "label_smoothing",
        "NetParameter": "default_backward_math default_backward_type default_conv_algos_override "
        "default_cudnn_math_override default_forward_math default_forward_type eltwise_mem_sharing global_grad_scale "
        "global_grad_scale_adaptive reduce_buckets",
        "PoolingParameter": "torch_pooling",
        "SolverParameter": "larc larc_eta larc_policy larc_turbo max_momentum max_weight_decay min_lr momentum_policy "
        "momentum_power rampup_interval rampup_lr solver_data_type store_blobs_in_old_format "
        "test_and_snapshot_last_epochs weight_decay_policy weight_decay_power",
        "TransformationParameter": "allow_upscale display forward_packing horizontal_stretch_lower "
        "horizontal_stretch_upper img_rand_resize_lower img_rand_resize_upper interpolation_algo_down "
        "interpolation_algo_up num_labels rand_resize_ratio_lower rand_resize_ratio_upper random_seed "
        "use_gpu_transform vertical_stretch_lower vertical_stretch_upper",
    }.items()
}
"""By message the fields that neither BVLC Caffe nor its SSD branch has (NVIDIA Caffe took over the latter's)."""


def named_dialect(name: str) -> Dialect:
    """The dialect that CAFFEPY_DIALECT names.

    Raises:
        ConfigError: there is none.
    """
    try:
        return Dialect(name.strip().lower())
    except ValueError:
        raise ConfigError(f"{VARIABLE}: unknown dialect '{name}'; give bvlc or nvidia") from None


@contextmanager
def overriding(name: str) -> Iterator[None]:
    """Let `choose_dialect` give the dialect of that name within the block, in all threads."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def choose_dialect(messages: Iterable[Message], say: Callable[..., None] = log.info) -> Dialect:
    """The dialect that CAFFEPY_DIALECT names, else that of the nets and solvers in `messages`.

    Args:
        messages: nets and solvers; the first field of theirs that only NVIDIA Caffe has decides.
        say: takes the line that says which it is and why, as `logging.info` does.

    Raises:
        ConfigError: the variable names no dialect.
    """
    if name := os.environ.get(VARIABLE):
        dialect = named_dialect(name)
        say("Dialect: %s, as --dialect or %s says", dialect.value, VARIABLE)
        return dialect
    for message in messages:
        if field := nvidia_field(message):
            say("Dialect: nvidia, because of %s, which only NVIDIA Caffe has (--dialect bvlc overrides)", field)
            return Dialect.NVIDIA
    return Dialect.BVLC


def nvidia_field(message: Message) -> str:
    """The first field of a message or of those within it that only NVIDIA Caffe has, as Message.field; else ''."""
    for owner, field, _, _ in walk_fields(message):
        name = owner.DESCRIPTOR.name
        if field.name in NVIDIA_FIELDS.get(name, frozenset()):
            return f"{name}.{field.name}"
    return ""
