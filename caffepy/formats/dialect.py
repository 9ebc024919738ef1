"""Dialect: whether a net computes as BVLC Caffe or as NVIDIA Caffe where the two differ.

A field that only NVIDIA Caffe has, in the net or its solver, selects NVIDIA's dialect; otherwise it is BVLC's.
`caffepy --dialect` or, for scripts, the variable CAFFEPY_DIALECT overrides it. See docs/reference/differences.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

from google.protobuf.message import Message

from caffepy.errors import ConfigError
from caffepy.formats.messages import walk_fields
from caffepy.formats.proto.caffe_pb2 import BatchNormParameter
from caffepy.utils.environment import environment_variable

log = logging.getLogger(__name__)

VARIABLE = "CAFFEPY_DIALECT"

LEAST_EPSILON = 1e-5
"""Minimum eps of BatchNorm in NVIDIA's dialect, as cuDNN requires (`batch_norm_layer.cpp` of NVIDIA Caffe)."""


class Dialect(Enum):
    """The Caffe to follow where the two differ; the values are those of --dialect."""

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
"""Fields, by message, that neither BVLC Caffe nor its SSD branch has (NVIDIA Caffe adopted the SSD fields)."""
INTEL_FIELDS = frozenset({"filler", "use_weight_bias", "stats_batch_size"})
"""Fields of BatchNormParameter that only Intel Caffe has."""
INTEL_ENGINES = frozenset({BatchNormParameter.MKL2017, BatchNormParameter.MKLDNN})


def parse_dialect(name: str) -> Dialect:
    """Return the dialect of a CAFFEPY_DIALECT value.

    Raises:
        ConfigError: the name is unknown.
    """
    try:
        return Dialect(name.strip().lower())
    except ValueError:
        raise ConfigError(f"{VARIABLE}: unknown dialect '{name}'; give bvlc or nvidia") from None


@contextmanager
def override_dialect(name: str) -> Iterator[None]:
    """Set the dialect that `choose_dialect` returns within the block, in all threads."""
    with environment_variable(VARIABLE, name):
        yield


def choose_dialect(messages: Iterable[Message], log_line: Callable[..., None] = log.info) -> Dialect:
    """Return CAFFEPY_DIALECT's dialect if set, else the dialect of the nets and solvers.

    Args:
        messages: nets and solvers; the first field that only NVIDIA Caffe has decides.
        log_line: logs the choice and its reason; called as `logging.info`.

    Raises:
        ConfigError: the variable has an unknown name.
    """
    if name := os.environ.get(VARIABLE):
        dialect = parse_dialect(name)
        log_line("Dialect: %s, set by --dialect or %s", dialect.value, VARIABLE)
        return dialect
    for message in messages:
        if field := nvidia_field(message):
            log_line("Dialect: nvidia, because of %s, which only NVIDIA Caffe has (--dialect bvlc overrides)", field)
            return Dialect.NVIDIA
    return Dialect.BVLC


def _is_intel(message: Message) -> bool:
    """Whether a message has a field or value of Intel Caffe, whose BatchNorm shares names with NVIDIA Caffe's."""
    names = {field.name for field, _ in message.ListFields()}
    engine = getattr(message, "engine", 0)
    return not names.isdisjoint(INTEL_FIELDS) or (isinstance(engine, int) and engine in INTEL_ENGINES)


def nvidia_field(message: Message) -> str:
    """Return the first field in a message that only NVIDIA Caffe has, as Message.field, or ''."""
    for owner, field, _, _ in walk_fields(message):
        name = owner.DESCRIPTOR.name
        if field.name in NVIDIA_FIELDS.get(name, frozenset()) and not _is_intel(owner):
            return f"{name}.{field.name}"
    return ""
