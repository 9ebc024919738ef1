"""For each field that acts a tiny layer and another value with which the layer does something else.

A case is a layer, its bottoms, the path to the message whose fields are changed, and one text for each change.
`observe` runs a layer in a net of its own and gives all that can be seen of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from google.protobuf import text_format
from google.protobuf.message import Message
from training import CPU

from caffepy.errors import CaffepyError
from caffepy.formats.fields import schema_name
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext, layer_class
from caffepy.net import Net

IMAGE = "2x4x6x6"
LABELS = "L"
"""Ends a bottom that holds whole numbers, from 0 on, in turn up to the number before it: ``4L3`` are 0 1 2 0."""


@dataclass(frozen=True)
class Case:
    """A layer and its alternatives.

    Args:
        layer: the layer's type and settings.
        bottoms: their shapes, divided by spaces.
        holder: path within the layer to the message that is changed; empty: the layer itself.
        changes: values of one field each, divided by ``|``; empty: none.
        phase: of the net.
        tops: how many; 0: the fewest.
    """

    layer: str
    bottoms: str
    holder: str = ""
    changes: str = ""
    phase: int = caffe_pb2.TRAIN
    tops: int = 0


def case(kind: str, bottoms: str, holder: str, changes: str, settings: str = "", tops: int = 0) -> Case:
    """A case whose settings lie in the message that is changed."""
    text = f'type: "{kind}" {holder} {{ {settings} }}' if settings else f'type: "{kind}"'
    return Case(text, bottoms, holder, changes, tops=tops)


CONV = "num_output: 4 kernel_size: 3 weight_filler { type: 'xavier' }"
POOL = "kernel_size: 3 stride: 2"
XAVIER = "weight_filler { type: 'xavier' }"
GAUSS = "{ type: 'gaussian' }"
IP = f'type: "InnerProduct" inner_product_param {{ num_output: 3 {XAVIER} }}'
LSTM = f"num_output: 3 {XAVIER}"
CONV_LSTM = f'type: "ConvLSTM" lstm_conv_param {{ kernel_size: 3 pad: 1 {LSTM} }}'
DENSE = (
    "numTransition: 2 growthRate: 2 Filter_Filler { type: 'xavier' } BN_Scaler_Filler { value: 1 } dropout_amount: 0.5"
)
CLIP = "2x3x4x5x5"
CONV3D = f"num_output: 2 kernel_size: 3 kernel_depth: 2 {XAVIER}"
POOL3D = "kernel_size: 3 kernel_depth: 3 stride: 2 temporal_stride: 2"
BOX_LOSS = "num_classes: 3 code_type: CENTER_SIZE neg_overlap: 0.1"
HARD = "mining_type: HARD_EXAMPLE nms_param { nms_threshold: 0.1 top_k: 4 }"
BOXES = "1x16B 1x12 1x2x16P 1x1x2x8G"
OUTPUT = "num_classes: 3 nms_param { nms_threshold: 0.45 top_k: 4 } keep_top_k: 4 confidence_threshold: 0.01"
OUTPUT_BOTTOMS = "1x16B 1x12S 1x2x16P"
REGION = "num: 2 num_class: 2 biases: 1 biases: 2 biases: 3 biases: 2"
"""YOLO 2 with two anchors and two classes."""
REGION_BOTTOMS = "1x14x4x4 1x1x2x5Y"
YOLO3 = "num: 2 num_class: 2 biases: 9 biases: 20 biases: 30 biases: 20 biases: 50 biases: 60 mask: 1 mask: 2"
YOLO_OUTPUT = "num_box: 2 num_classes: 2 biases: 1 biases: 2 biases: 3 biases: 2"
YOLO3_OUTPUT = (
    "num_box: 2 num_classes: 2 biases: 9 biases: 20 biases: 30 biases: 20 biases: 50 biases: 60 mask: 0 mask: 1 "
    "mask_group_num: 1 anchors_scale: 16"
)
GRID = "side: 4 num_class: 2 num_object: 2"
GRID_BOTTOMS = "1x192 1x112L2"
PRIORS = "min_size: 4 max_size: 9 aspect_ratio: 2"

MARGINS = f"num_output: 3 type: DOUBLE base: 5 gamma: 0.1 power: 2 {XAVIER}"
MARGIN_CHANGES = (
    f"num_output: 4 | type: TRIPLE | axis: 2 | base: 4 | gamma: 0.2 | power: 1 | iteration: 7 | lambda_min: 9 |"
    f"weight_filler {GAUSS}"
)
CENTERS = "num_output: 3 center_filler { type: 'xavier' }"
BIASES = "bias_base: 1 bias_gamma: 0.5 bias_power: 2 bias_min: -9 bias_max: 9"
DISTANCES = f"num_output: 3 {XAVIER}"

FACE_CASES = (
    case("MarginInnerProduct", "4x2x3 4L3", "margin_inner_product_param", MARGIN_CHANGES, MARGINS, tops=2),
    case("LargeMarginInnerProduct", "4x2x3 4L3", "largemargin_inner_product_param", MARGIN_CHANGES, MARGINS, tops=2),
    case(
        "CenterLoss",
        "4x2x3 4L3",
        "center_loss_param",
        f"num_output: 4 | center_filler {GAUSS} | axis: 2 | distance_type: 'L1'",
        CENTERS,
    ),
    case("LabelSpecificAdd", "4x3 4L3", "label_specific_add_param", "bias: 2 | bias_base: 0.5", "bias: 1"),
    case(
        "LabelSpecificAdd",
        "4x3 4L3",
        "label_specific_add_param",
        "bias_gamma: 0.25 | bias_power: 3 | bias_min: 8 | bias_max: 1 | iteration: 3",
        BIASES,
        tops=2,
    ),
    case(
        "LabelSpecificRescale",
        "4x3 4L3",
        "label_specific_rescale_param",
        "positive_weight: 3 | negative_weight: 2 | for_ip: true | positive_weight_base: 4 | bias_fix: true "
        "| power_on_positive: true",
        "positive_weight: 2",
    ),
    case(
        "LabelSpecificRescale",
        "4x3 4L3",
        "label_specific_rescale_param",
        "gamma: 2 | power: 2 | positive_weight_min: 8 | positive_weight_max: 0.5 | iteration: 3",
        "positive_weight_base: 4 gamma: 1",
    ),
    Case(
        'type: "LabelSpecificRescale" label_specific_rescale_param { positive_weight: 2 }',
        "4x3 4L3",
        "label_specific_rescale_param",
        "rescale_test: true",
        caffe_pb2.TEST,
    ),
    case(
        "InnerDistance",
        "4x2x3",
        "inner_distance_param",
        f"num_output: 4 | weight_filler {GAUSS} | axis: 2 | distance_type: 'L1' | normalize: true |"
        "update_center_only: true",
        DISTANCES,
    ),
    case(
        "ChannelScale",
        IMAGE + " 2x1x6x6",
        "channel_scale_param",
        "do_forward: false | do_backward_feature: false | do_backward_scale: false | global_scale: true",
    ),
    case(
        "ChannelScale",
        IMAGE + " 2x1x6x6",
        "channel_scale_param",
        "max_global_scale: 0.1 | min_global_scale: 9",
        "global_scale: true",
    ),
    case("Normalize", IMAGE, "normalize_param", "normalize_type: 'L1' | fix_gradient: true", "normalize_type: 'L2'"),
    case(
        "GeneralContrastiveLoss",
        "4x3 4L3",
        "general_contrastive_loss_param",
        "positive_margin: -2 | negative_margin: 2 | positive_weight: 2 | negative_weight: 2 |"
        "positive_outlier_thresh: 0.1 | max_negative_only: true | max_positive_only: true |"
        "exp_negative_weight: true | add_intra_mae: true",
    ),
    case(
        "GeneralContrastiveLoss",
        "4x3 4L3",
        "general_contrastive_loss_param",
        "positive_upper_bound: -2",
        "positive_first: true",
    ),
    case(
        "GeneralContrastiveLoss",
        "4x3 4L3",
        "general_contrastive_loss_param",
        "max_negative_margin: -1",
        "add_intra_mae: true",
    ),
    case(
        "GeneralTripletLoss",
        "4x3 4L3",
        "general_triplet_loss_param",
        "margin: 2 | positive_first: true | negative_weight: 2",
        "positive_upper_bound: -2",
    ),
    case(
        "GeneralTripletLoss",
        "4x3 4L3",
        "general_triplet_loss_param",
        "positive_upper_bound: -2",
        "positive_first: true",
    ),
    case("TripletLoss", "4x3 4x3 4x3", "triplet_loss_param", "margin: 2"),
    case("Flip", IMAGE, "flip_param", "flip_width: false | flip_height: true"),
    case(
        "Local",
        IMAGE,
        "local_param",
        f"num_output: 3 | bias_term: false | pad: 1 | kernel_size: 2 | stride: 2 | weight_filler {GAUSS} |"
        f"bias_filler {GAUSS}",
        f"num_output: 2 kernel_size: 3 {XAVIER}",
    ),
    case("SeLU", IMAGE, "selu_param", "alpha: 2 | lambda: 2"),
    case("SeLUDropout", IMAGE, "selu_dropout_param", "dropout_ratio: 0.5 | alpha: -1"),
    case("Gather", IMAGE, "gather_param", "indices: 1 | shape: 1 shape: 1 | axis: 2", "indices: 0"),
    case("Filter", IMAGE, "filter_param", "num_output: 2 | axis: 2", "num_output: 3"),
    case("InnerProduct", IMAGE, "inner_product_param", "normalize: true", f"num_output: 3 {XAVIER}"),
    case("Accuracy", "8x3 8L3", "accuracy_param", "min_is_better: true"),
    case("SoftmaxWithLoss", "4x3 4L3", "softmax_param", "normalize_type: 'L2'"),
    case("GlobalLSEMargin", "4x3 4L3", "scale_param", "min_value: 40 | max_value: 5"),
)

CASES = (
    *FACE_CASES,
    case("Input", "", "input_param", "shape { dim: 3 dim: 2 }", "shape { dim: 2 dim: 2 }"),
    case(
        "DummyData",
        "",
        "dummy_data_param",
        f"shape {{ dim: 2 dim: 5 }} | data_filler {GAUSS}",
        "shape { dim: 3 dim: 2 }",
    ),
    case(
        "DummyData",
        "",
        "dummy_data_param",
        "num: 3 | channels: 3 | height: 3 | width: 3",
        "num: 2 channels: 2 height: 2 width: 2",
    ),
    case(
        "Convolution",
        IMAGE,
        "convolution_param",
        "num_output: 6 | bias_term: false | pad: 1 | kernel_size: 2 | stride: 2 | dilation: 2 | group: 2 | axis: 2 |"
        f"weight_filler {GAUSS} | bias_filler {GAUSS}",
        CONV,
    ),
    case(
        "Convolution",
        IMAGE,
        "convolution_param",
        "pad_h: 1 | pad_w: 1 | kernel_h: 2 | kernel_w: 2 | stride_h: 2 | stride_w: 2",
        "num_output: 4 kernel_h: 3 kernel_w: 3 stride_h: 1 stride_w: 1 weight_filler { type: 'xavier' }",
    ),
    case("Convolution3D", CLIP, "convolution_param", "kernel_depth: 3 | temporal_stride: 2 | temporal_pad: 1", CONV3D),
    case(
        "Convolution3D",
        CLIP,
        "convolution3d_param",
        "num_output: 3 | kernel_size: 2 | kernel_depth: 3 | stride: 2 | temporal_stride: 2 | pad: 1 | temporal_pad: 1",
        CONV3D,
    ),
    case(
        "Deconvolution3D",
        CLIP,
        "convolution3d_param",
        f"bias_term: false | bias_filler {GAUSS} | weight_filler {GAUSS}",
        CONV3D,
    ),
    case("Pooling3D", CLIP, "pooling_param", "kernel_depth: 2 | temporal_stride: 1", POOL3D),
    case(
        "Pooling3D",
        CLIP,
        "pooling3d_param",
        "pool: AVE | kernel_size: 2 | kernel_depth: 2 | stride: 1 | temporal_stride: 1",
        POOL3D,
    ),
    case("Pooling3D", CLIP, "pooling3d_param", "pad: 1", f"pool: AVE {POOL3D}"),
    case("Pooling", IMAGE, "pooling_param", "dilation: 2", POOL),
    case(
        "NdPooling",
        CLIP,
        "pooling_param",
        "kernel_shape { dim: 2 dim: 3 dim: 2 } | stride_shape { dim: 2 } | pad_shape { dim: 0 dim: 1 dim: 0 }",
        "kernel_shape { dim: 2 }",
    ),
    case(
        "PoolingND",
        CLIP,
        "pooling_nd_param",
        "pool: AVE | kernel_size: 2 kernel_size: 3 kernel_size: 2 | stride: 2 | pad: 0 pad: 1 pad: 0 |"
        "global_pooling: true",
        "kernel_size: 2",
    ),
    case(
        "PoolingND",
        IMAGE,
        "pooling_nd_param",
        "kernel_h: 2 | kernel_w: 2 | stride_h: 2 | stride_w: 2 | pad_h: 1 | pad_w: 1",
        "kernel_h: 3 kernel_w: 3 stride_h: 1 stride_w: 1",
    ),
    case(
        "NdConvolution",
        CLIP,
        "convolution_param",
        "kernel_shape { dim: 2 dim: 3 dim: 2 } | stride_shape { dim: 2 } | pad_shape { dim: 0 dim: 1 dim: 0 }",
        "num_output: 2 kernel_shape { dim: 2 }",
    ),
    case(
        "Pooling",
        IMAGE,
        "pooling_param",
        "pool: AVE | kernel_size: 2 | stride: 1 | pad: 1 | global_pooling: true | round_mode: FLOOR |ceil_mode: false",
        POOL,
    ),
    case(
        "Pooling",
        IMAGE,
        "pooling_param",
        "kernel_h: 2 | kernel_w: 2 | stride_h: 2 | stride_w: 2 | pad_h: 1 | pad_w: 1",
        "kernel_h: 3 kernel_w: 3 stride_h: 1 stride_w: 1",
    ),
    case(
        "InnerProduct",
        IMAGE,
        "inner_product_param",
        f"num_output: 4 | bias_term: false | axis: 2 | transpose: true | weight_filler {GAUSS} | bias_filler {GAUSS}",
        f"num_output: 3 {XAVIER}",
    ),
    case(
        "Embed",
        "4L3",
        "embed_param",
        f"num_output: 4 | input_dim: 5 | bias_term: false | weight_filler {GAUSS} | bias_filler {GAUSS}",
        f"num_output: 3 input_dim: 3 {XAVIER}",
    ),
    case(
        "LRN",
        IMAGE,
        "lrn_param",
        "local_size: 5 | alpha: 2 | beta: 0.5 | k: 2 | norm_region: WITHIN_CHANNEL",
        "local_size: 3",
    ),
    case(
        "BatchNorm",
        IMAGE,
        "batch_norm_param",
        "use_global_stats: true | moving_average_fraction: 0.5 | eps: 0.1 | scale_bias: true",
        "eps: 1e-5",
    ),
    case("BatchNorm", IMAGE, "batch_norm_param", f"scale_filler {GAUSS} | bias_filler {GAUSS}", "scale_bias: true"),
    case(
        "BatchNorm",
        IMAGE,
        "batch_norm_param",
        f"filler {GAUSS} | use_weight_bias: true | stats_batch_size: 1",
    ),
    case(
        "BN",
        IMAGE,
        "bn_param",
        f"slope_filler {GAUSS} | bias_filler {GAUSS} | momentum: 0.5 | eps: 0.1 | frozen: true | inverse_std: true",
        "slope_filler { value: 1 } bias_filler { value: 2 } momentum: 0.8",
    ),
    case(
        "BN",
        IMAGE,
        "bn_param",
        f"scale_filler {GAUSS} | shift_filler {GAUSS} | bn_mode: INFERENCE",
        "scale_filler { value: 1 } shift_filler { value: 2 }",
    ),
    case("Scale", IMAGE, "scale_param", f"axis: 2 | num_axes: 2 | filler {GAUSS} | bias_term: true", "axis: 1"),
    case("Scale", IMAGE, "scale_param", f"bias_filler {GAUSS}", "bias_term: true"),
    case("Bias", IMAGE, "bias_param", f"axis: 2 | num_axes: 2 | filler {GAUSS}", "axis: 1"),
    case("MVN", IMAGE, "mvn_param", "normalize_variance: false | across_channels: true | eps: 0.5"),
    case(
        "Normalize",
        IMAGE,
        "norm_param",
        f"across_spatial: false | scale_filler {GAUSS} | channel_shared: false | eps: 9",
        "scale_filler { value: 2 }",
    ),
    case("Dropout", IMAGE, "dropout_param", "dropout_ratio: 0.2 | random_seed: 5"),
    Case('type: "Dropout"', IMAGE, "dropout_param", "sample_weights_test: true", phase=caffe_pb2.TEST),
    case("ReLU", IMAGE, "relu_param", "negative_slope: 0.1"),
    case("PReLU", IMAGE, "prelu_param", f"filler {GAUSS} | channel_shared: true"),
    case("ELU", IMAGE, "elu_param", "alpha: 2 | lambda: 2"),
    case("Swish", IMAGE, "swish_param", "beta: 2"),
    case("Clip", IMAGE, "clip_param", "min: -0.1 | max: 0.1", "min: -0.5 max: 0.5"),
    case("Threshold", IMAGE, "threshold_param", "threshold: 0.5"),
    case("Power", IMAGE, "power_param", "power: 2 | scale: 2 | shift: 1"),
    case("Exp", IMAGE, "exp_param", "base: 2 | scale: 2 | shift: 1"),
    case("Log", IMAGE, "log_param", "base: 2 | scale: 0.5 | shift: 10", "shift: 9"),
    case("Softmax", IMAGE, "softmax_param", "axis: 2"),
    case("LSTM", "4x2x5 4x2L2", "recurrent_param", f"bias_filler {GAUSS}", f"num_output: 3 {XAVIER}"),
    case("Lstm", "4x2x5", "lstm_param", f"bias_filler {GAUSS} | clipping_threshold: 0.001", LSTM),
    case("Lstm", "4x2x5", "lstm_param", f"num_output: 4 | weight_filler {GAUSS}", "num_output: 3"),
    case("Lstm", "4x5", "lstm_param", "batch_size: 2", LSTM),
    Case(
        CONV_LSTM,
        "3x2x2x3x4 3x2L2",
        "lstm_debug_param",
        "disable_hadamard: true | axis_hadamard: 2 | num_axes_hadamard: 1 | ignore_x: true",
    ),
    case("WarpCTCLoss", "5x2x4 2x3L3", "ctc_loss_param", "blank_index: -1"),
    case(
        "CtcLoss",
        "5x2x4 2x3L3",
        "ctc_loss_param",
        "alphabet_size: 5 | time_step: 4 | blank_label: 2",
        "alphabet_size: 4 time_step: 5 blank_label: 3",
    ),
    case("CTCGreedyDecoder", "9x2x3", "ctc_decoder_param", "blank_index: -1 | ctc_merge_repeated: false"),
    case("LabelsequenceAccuracy", "3x2x3 3x1L3", "labelsequence_accuracy_param", "blank_label: 1"),
    case(
        "ContinuationIndicator",
        "",
        "continuation_indicator_param",
        "time_step: 4 | batch_size: 3",
        "time_step: 3 batch_size: 2",
    ),
    case("ReverseTime", "5x3x2 3L4", "reverse_time_param", "copy_remaining: true"),
    case(
        "DenseBlock",
        IMAGE,
        "denseblock_param",
        f"numTransition: 1 | growthRate: 3 | Filter_Filler {GAUSS} | BN_Scaler_Filler {GAUSS} | "
        f"BN_Bias_Filler {GAUSS} | use_dropout: true | use_BC: true | moving_average_fraction: 0.5",
        DENSE,
    ),
    case("DenseBlock", IMAGE, "denseblock_param", "dropout_amount: 0.2", f"use_dropout: true {DENSE}"),
    case("Concat", IMAGE + " " + IMAGE, "concat_param", "axis: 2 | concat_dim: 2 | per_fla_fuse: true"),
    case("Slice", IMAGE, "slice_param", "axis: 2 | slice_dim: 2 | slice_point: 1", tops=2),
    case("Eltwise", IMAGE + " " + IMAGE, "eltwise_param", "operation: MAX | coeff: 1 coeff: 2", "operation: SUM"),
    case("Eltwise", IMAGE + " " + IMAGE, "eltwise_param", "stable_prod_grad: false", "operation: PROD"),
    case("Flatten", IMAGE, "flatten_param", "axis: 2 | end_axis: 2"),
    case(
        "Reshape",
        IMAGE,
        "reshape_param",
        "shape { dim: 4 dim: -1 } | axis: 1 | num_axes: 2",
        "shape { dim: 8 dim: -1 }",
    ),
    case(
        "Permute", IMAGE, "permute_param", "order: 0 order: 2 order: 1 order: 3", "order: 0 order: 3 order: 2 order: 1"
    ),
    case("Transpose", IMAGE, "transpose_param", "dim: 0 dim: 1 dim: 3 dim: 2", "dim: 0 dim: 2 dim: 1 dim: 3"),
    case("Reverse", IMAGE, "reverse_param", "axis: 1", "axis: 2"),
    case("Crop", IMAGE + " 2x4x3x3", "crop_param", "axis: 3 | offset: 2", "axis: 2"),
    case("Tile", IMAGE, "tile_param", "axis: 2 | tiles: 3", "tiles: 2"),
    case("Reduction", IMAGE, "reduction_param", "operation: SUMSQ | axis: 1 | coeff: 2"),
    case("ShuffleChannel", IMAGE, "shuffle_channel_param", "group: 2"),
    case("Interp", IMAGE, "interp_param", "height: 9 | width: 9", "height: 5 width: 5"),
    case("Interp", IMAGE, "interp_param", "use_blob_size: true", "height: 5 width: 5"),
    case("Convolution", IMAGE, "convolution_param", "hole: 2", CONV),
    case("Convolution", IMAGE, "convolution_param", "hole_h: 1 hole_w: 2 | hole_w: 2 hole_h: 1", CONV),
    case(
        "Interp",
        IMAGE,
        "interp_param",
        "zoom_factor: 2 | shrink_factor: 3 | pad_beg: -1 | pad_end: -1",
        "zoom_factor: 3 shrink_factor: 2",
    ),
    case("Upsample", IMAGE, "upsample_param", "scale: 3", "scale: 2"),
    case(
        "Unpooling",
        IMAGE,
        "unpooling_param",
        "unpool: AVE | kernel_size: 4 | stride: 1 | unpool_size: 14 | pad: 1 | pad_h: 1 | pad_w: 1",
        "kernel_size: 3 stride: 2",
    ),
    case("SpatialDropout", IMAGE, "dropout_param", "dropout_ratio: 0.9"),
    case("Unpooling", IMAGE, "unpooling_param", "kernel_h: 4 | kernel_w: 4", "unpool: AVE kernel_h: 2 kernel_w: 2"),
    case("Unpooling", IMAGE, "unpooling_param", "stride_h: 3 | stride_w: 3", "kernel_size: 2 stride_h: 2 stride_w: 2"),
    case("Unpooling", IMAGE, "unpooling_param", "unpool_h: 8 | unpool_w: 8", "kernel_size: 2 unpool_h: 7 unpool_w: 7"),
    case("EltwiseAccuracy", "2x3x2x2 2x1x2x2L3", "eltwise_accuracy_param", "top_k: 2 | ignore_label: 1"),
    case("Upsample", IMAGE, "upsample_param", "scale_h: 3 | scale_w: 3", "scale_h: 2 scale_w: 2"),
    case("Upsample", IMAGE + " 2x4x6x6L144", "upsample_param", "pad_out_h: true | pad_out_w: true", "scale: 2"),
    case(
        "Upsample",
        IMAGE + " 2x4x6x6L144",
        "upsample_param",
        "upsample_h: 11 | upsample_w: 11",
        "upsample_h: 12 upsample_w: 12",
    ),
    case(
        "ROIPooling",
        IMAGE + " 2x5R",
        "roi_pooling_param",
        "pooled_h: 3 | pooled_w: 3 | spatial_scale: 0.5",
        "pooled_h: 2 pooled_w: 2",
    ),
    case(
        "PSROIPooling",
        IMAGE + " 2x5R",
        "psroi_pooling_param",
        "spatial_scale: 0.5 | output_dim: 4 | group_size: 1",
        "spatial_scale: 1 output_dim: 1 group_size: 2",
    ),
    case("SPP", IMAGE, "spp_param", "pyramid_height: 1 | pool: AVE", "pyramid_height: 2"),
    case(
        "Parameter",
        "",
        "parameter_param",
        "shape { dim: 3 } | filler { value: 2 } | blob_filler { value: 2 }",
        "shape { dim: 2 }",
    ),
    Case(
        'type: "SoftmaxWithLoss"',
        "2x3x2 2x2L3",
        "loss_param",
        "ignore_label: 1 | normalization: NONE | normalize: false",
    ),
    case("Accuracy", "8x3 8L3", "accuracy_param", "top_k: 2 | ignore_label: 1 | axis: 0"),
    case("ArgMax", IMAGE, "argmax_param", "out_max_val: true | top_k: 2 | axis: 1"),
    case("SmoothL1Loss", "2x3x4x4 2x3x4x4", "smooth_l1_loss_param", "sigma: 0.5"),
    case("HingeLoss", "4x3 4L3", "hinge_loss_param", "norm: L2"),
    case("ContrastiveLoss", "4x3 4x3 4L2", "contrastive_loss_param", "margin: 3 | legacy_version: true", "margin: 9"),
    Case(
        'type: "InfogainLoss" infogain_loss_param { source: "h" }', "4x3 4L3 1x1x3x3", "infogain_loss_param", "axis: 0"
    ),
    case(
        "PriorBox",
        "1x2x3x3 1x3x24x24",
        "prior_box_param",
        "min_size: 5 | max_size: 12 | aspect_ratio: 3 | flip: false | variance: 0.3 | img_size: 48 |"
        "step: 4 | offset: 0.2",
        PRIORS,
    ),
    case("PriorBox", "1x2x3x3 1x3x24x24", "prior_box_param", "clip: true", "min_size: 20"),
    Case(
        'type: "PriorBoxClustered" prior_box_param { width: 9 height: 5 }',
        "1x2x3x3 1x3x24x24",
        "prior_box_param",
        "width: 8 | height: 4 | clip: true | variance: 0.3 | img_size: 48 | step: 4 | offset: 0.2",
    ),
    case("GRN", IMAGE, "grn_param", "bias: 2 | dummy_backward: true"),
    case(
        "ScaleFilter",
        IMAGE,
        "scale_filter_param",
        "min_scale: 0.4 | max_scale: 3",
        "min_scale: 0.5 max_scale: 2",
    ),
    case(
        "AnchorEmbeddingExtractor",
        "3x11L2 2x4x2x2 2x4x2x2",
        "embedding_extractor_param",
        "label_src_pos: 7 | num_valid_actions: 1",
        "num_anchors: 2 label_src_pos: 6",
    ),
    case("PriorBox", "1x2x3x3 1x3x24x24", "prior_box_param", "img_h: 30 | img_w: 30", PRIORS + " img_h: 24 img_w: 24"),
    case("PriorBox", "1x2x3x3 1x3x24x24", "prior_box_param", "step_h: 5 | step_w: 5", PRIORS + " step_h: 8 step_w: 8"),
    case(
        "MultiBoxLoss",
        BOXES,
        "multibox_loss_param",
        "loc_loss_type: L2 | conf_loss_type: LOGISTIC | loc_weight: 2 | num_classes: 4 | share_location: false |"
        "background_label_id: 2 | code_type: CORNER | encode_variance_in_target: true | map_object_to_agnostic: true |"
        "mining_type: NONE |"
        "use_difficult_gt: false | neg_pos_ratio: 0.4 | neg_overlap: 0.5 | do_neg_mining: false",
        BOX_LOSS,
    ),
    case(
        "MultiBoxLoss",
        BOXES,
        "multibox_loss_param",
        "overlap_threshold: 0.9 | match_type: BIPARTITE",
        BOX_LOSS + " overlap_threshold: 0.1",
    ),
    case(
        "MultiBoxLoss",
        BOXES,
        "multibox_loss_param",
        "ignore_cross_boundary_bbox: true | bp_inside: true | use_prior_for_matching: false",
        BOX_LOSS.replace("CENTER_SIZE", "CORNER") + " overlap_threshold: 0.1",
    ),
    case(
        "MultiBoxLoss",
        BOXES,
        "multibox_loss_param",
        "use_prior_for_nms: true | sample_size: 1",
        BOX_LOSS + f" overlap_threshold: 0.1 {HARD} sample_size: 2",
    ),
    case(
        "DetectionOutput",
        OUTPUT_BOTTOMS,
        "detection_output_param",
        "num_classes: 2 | share_location: false | background_label_id: 1 | code_type: CENTER_SIZE | keep_top_k: 1 |"
        "variance_encoded_in_target: true | confidence_threshold: 0.85 | nms_param { nms_threshold: 0.1 top_k: 1 }",
        OUTPUT,
    ),
    Case(
        f'type: "DetectionOutput" detection_output_param {{ {OUTPUT} }}',
        OUTPUT_BOTTOMS,
        "detection_output_param.nms_param",
        "top_k: 1",
    ),
    Case(IP, "2x4", "inner_product_param.weight_filler", "type: 'gaussian'"),
    Case(IP.replace("xavier'", "constant'"), "2x4", "inner_product_param.weight_filler", "value: 2"),
    Case(IP.replace("xavier'", "uniform'"), "2x4", "inner_product_param.weight_filler", "min: -1 | max: 2"),
    Case(
        IP.replace("xavier'", "gaussian'"), "2x4", "inner_product_param.weight_filler", "mean: 1 | std: 2 | sparse: 1"
    ),
    Case(IP, "2x4", "inner_product_param.weight_filler", "variance_norm: FAN_OUT"),
    Case('type: "Reshape" reshape_param { shape { dim: 2 dim: -1 } }', IMAGE, "reshape_param.shape", "dim: 4 dim: -1"),
    Case(
        IP + " param { decay_mult: 2 }",
        "2x4",
        "",
        "name: 'other' | type: 'Softmax' | loss_weight: 2 | param { lr_mult: 0 } |"
        "include { phase: TEST } | exclude { phase: TRAIN } | bottom: 'none' | top: 'other'",
    ),
    case("PixelShuffle", "2x8x2x3", "reshape_param", "pixelshuffler: 1", "pixelshuffler: 2"),
    case("CropCenter", "3x4", "crop_center_param", "crop_size: 1 crop_size: 0", "crop_size: 0 crop_size: 1"),
    case("Reorg", "2x8x4x4", "reorg_param", "stride: 1 | reverse: true", "stride: 2"),
    case("Region", "1x14x2x2", "region_param", "softmax: true", "boxes_of_each_grid: 2 classes: 2"),
    case("Region", "1x14x2x2", "region_param", "boxes_of_each_grid: 1 classes: 9", "boxes_of_each_grid: 2 classes: 2"),
    case("Region", "1x14x2x2", "region_param", "num: 1 classes: 9", "num: 2 classes: 2"),
    case("Region", "1x14x2x2", "region_param", "coords: 5", "boxes_of_each_grid: 2 classes: 2"),
    case("Region", "1x14x2x2", "region_param", "classes: 1", "boxes_of_each_grid: 2 classes: 2"),
    case(
        "RegionLoss",
        REGION_BOTTOMS,
        "region_loss_param",
        "num_class: 9 num: 1 | bias_match: 0 | coords: 5 | num: 1 num_class: 9 | rescore: 0 | object_scale: 3 |"
        "class_scale: 3 | noobject_scale: 3 | coord_scale: 3 | thresh: 0.01 | class_map: 'none' |"
        "biases: 2 biases: 2 biases: 2 biases: 3",
        REGION,
    ),
    case(
        "YoloDetectionOutput",
        "1x14x4x4",
        "yolo_detection_output_param",
        "num_classes: 9 num_box: 1 | num_box: 1 num_classes: 9 | coords: 5 | confidence_threshold: 0.4 |"
        "nms_threshold: 0.1 | biases: 2 biases: 2 biases: 2 biases: 3 | centers: true",
        YOLO_OUTPUT,
    ),
    case(
        "Yolov3",
        REGION_BOTTOMS,
        "yolov3_param",
        "num_class: 9 num: 1 | num: 1 num_class: 9 | class_scale: 3 | coord_scale: 3 | thresh: 0.01 |"
        "anchors_scale: 8 | biases: 9 biases: 20 biases: 20 biases: 20 | mask: 1 mask: 0 |"
        "use_focal_loss: true | iou_loss: GIOU | iou_thresh: 0.05 | label_smooth_eps: 0.3",
        YOLO3,
    ),
    case("Yolov3", REGION_BOTTOMS, "yolov3_param", "object_scale: 3", f"{YOLO3} use_logic_gradient: true"),
    case("Yolov3", REGION_BOTTOMS, "yolov3_param", "iou_normalizer: 3", f"{YOLO3} iou_loss: CIOU"),
    case(
        "Yolov3DetectionOutput",
        "1x14x4x4",
        "yolov3_detection_output_param",
        "num_classes: 9 num_box: 1 | num_box: 1 num_classes: 9 | confidence_threshold: 0.4 | nms_threshold: 0.1 |"
        "biases: 9 biases: 20 biases: 20 biases: 20 | anchors_scale: 8 | mask_group_num: 2 | mask: 1 mask: 0 |"
        "gaussian_box: true",
        YOLO3_OUTPUT,
    ),
    case(
        "DetectionLoss",
        GRID_BOTTOMS,
        "detection_loss_param",
        "side: 2 | num_class: 7 num_object: 1 | num_object: 1 num_class: 7 | object_scale: 3 | noobject_scale: 3 |"
        "class_scale: 3 | coord_scale: 3 | sqrt: false | constriant: true",
        GRID,
    ),
    case(
        "EvalDetection",
        GRID_BOTTOMS,
        "eval_detection_param",
        "side: 2 | num_class: 7 num_object: 1 | num_object: 1 num_class: 7 | threshold: 0 | score_type: OBJ |"
        "nms: 0.1 | biases: 1 biases: 2 biases: 3 biases: 2",
        GRID,
    ),
    case("YoloSeg", "2x3x4x4 2x3x4x4", "yolo_seg_param", "object_scale: 3"),
    case(
        "MultiStageMeanfield",
        "1x2x3x4 1x2x3x4 1x3x3x4",
        "multi_stage_meanfield_param",
        "theta_alpha: 1 | theta_beta: 1 | theta_gamma: 1 | num_iterations: 1 | spatial_filter_weight: 2 "
        "| bilateral_filter_weight: 2",
        "theta_alpha: 3 theta_beta: 0.5 theta_gamma: 2 num_iterations: 2",
    ),
    case("SegmentationEvaluate", "2x3x4x4 2x3x4x4", "segmentation_evaluate_param", "threshold: 0.1"),
    case("FocalLoss", "4x3 4L3", "focal_loss_param", "gamma: 3 | alpha: 0.5"),
)

DEPTHWISE = "kernel_size: 3 pad: 1 weight_filler { type: 'xavier' }"
EXPOSED = f"{LSTM} expose_hidden: true"
STREAMS = "4x2x5 4x2L2"
"""Four time steps of two streams, and `cont`."""

FORMS = (
    Case(f'type: "ConvolutionDepthwise" convolution_param {{ {DEPTHWISE} }}', IMAGE),
    Case(f'type: "DepthwiseConvolution" convolution_param {{ num_output: 8 group: 4 {DEPTHWISE} }}', IMAGE),
    Case('type: "HardSwish"', IMAGE),
    Case('type: "ReLU6"', IMAGE),
    Case('type: "Mish"', IMAGE),
    Case('type: "LSTMUnit"', "1x2x3 1x2x12 1x2L2", tops=2),
    Case(f'type: "RNN" recurrent_param {{ {LSTM} }}', STREAMS),
    Case(f'type: "RNN" recurrent_param {{ {LSTM} }}', STREAMS + " 2x3"),
    Case(f'type: "RNN" recurrent_param {{ {EXPOSED} }}', STREAMS + " 1x2x3", tops=2),
    Case(f'type: "LSTM" recurrent_param {{ {LSTM} }}', STREAMS),
    Case(f'type: "LSTM" recurrent_param {{ {EXPOSED} }}', STREAMS + " 2x3 1x2x3 1x2x3", tops=3),
    Case('type: "Gather"', IMAGE),
    Case('type: "Scatter"', IMAGE),
    Case(f'type: "Lstm" lstm_param {{ {LSTM} }}', STREAMS),
    Case('type: "Pooling" pooling_param { kernel_size: 3 stride: 2 }', IMAGE, tops=2),
    Case(
        'type: "Convolution" convolution_param { num_output: 2 kernel_size: 2 weight_filler { type: "xavier" } }',
        "2x3x4x4x4",
    ),
    Case(
        'type: "Deconvolution" convolution_param { num_output: 2 kernel_size: 2 weight_filler { type: "xavier" } }',
        "2x3x4x4x4",
    ),
)
"""Types and forms without a field that a case changes."""


def changes(cases: tuple[Case, ...] = CASES) -> Iterator[tuple[str, Case, str]]:
    """Message.field, the case and the change's text, of every change."""
    for one in cases:
        layer = text_format.Parse(one.layer, caffe_pb2.LayerParameter())
        message = schema_name(held(layer, one.holder).DESCRIPTOR)
        for text in one.changes.split("|"):
            yield f"{message}.{text.split()[0].strip(':')}", one, text


def held(layer: caffe_pb2.LayerParameter, holder: str) -> Message:
    """The message at a path within a layer."""
    message: Message = layer
    for name in filter(None, holder.split(".")):
        message = getattr(message, name)
    return message


def add_inputs(net: caffe_pb2.NetParameter, layer: caffe_pb2.LayerParameter, one: Case) -> list[str]:
    """Give a net the Input layers of a case, and its layer these, tops, and weights of 1 as the tops' gradients."""
    inputs = one.bottoms.split()
    for index, text in enumerate(inputs):
        made = net.layer.add(name=f"b{index}", type="Input", top=[f"b{index}"])
        made.input_param.shape.add(dim=values_of(text, index).shape)
        layer.bottom.append(f"b{index}")
    cls = layer_class(layer.type)
    layer.top.extend(f"t{index}" for index in range(one.tops or max(cls.tops[0], 1)))
    if cls.has_backward and inputs and not cls.is_loss:
        layer.loss_weight.extend([1] + [0] * (len(layer.top) - 1))
    return inputs


def observe(one: Case, change: str = "") -> dict[str, object]:
    """All that a layer does, by name: shapes and values of blobs, parameters and gradients; or its error."""
    layer = text_format.Parse(one.layer, caffe_pb2.LayerParameter(name="L"))
    net = caffe_pb2.NetParameter(force_backward=not any(mark in one.bottoms for mark in "LRBGPSY"))
    inputs = add_inputs(net, layer, one)
    if change:
        alter(held(layer, one.holder), change)
    net.layer.append(layer)
    try:
        return run(net, inputs, one.phase)
    except CaffepyError as error:
        return {"error": str(error)}


def alter(message: Message, change: str) -> None:
    other = text_format.Parse(change, type(message)(), allow_unknown_field=False) if change else message
    for field, _ in other.ListFields():
        message.ClearField(field.name)
    message.MergeFrom(other)


def run(param: caffe_pb2.NetParameter, inputs: list[str], phase: int) -> dict[str, object]:
    with CPU.activate():
        net = Net(param, LayerContext(CPU, phase=phase, seed=1))
        for index, text in enumerate(inputs):
            net.blobs[f"b{index}"].data[...] = values_of(text, index)
        net.clear_param_diffs()
        net.forward()  # running statistics show their settings in the second pass
        net.forward()
        net.raise_device_errors()
        if net.layers[-1].has_backward:
            net.backward()
        net.raise_device_errors()
        return dict(look(net))


def look(net: Net) -> Iterator[tuple[str, object]]:
    yield "rates", [(learned.lr_mult, learned.decay_mult) for learned in net.parameters.parameters]
    for name, blob in net.blobs.items():
        yield f"{name} data", (blob.shape, blob.host_data().tobytes())
        if name.startswith("b"):
            yield f"{name} diff", np.asarray(blob.diff).tobytes()
    for layer in net.layers:
        for index, blob in enumerate(layer.blobs):
            yield f"{layer.name} {index}", (blob.shape, blob.host_data().tobytes(), layer.propagate_to_params[index])
            if layer.propagate_to_params[index]:
                yield f"{layer.name} {index} diff", np.asarray(blob.diff).tobytes()


def values_of(text: str, index: int) -> np.ndarray:
    """A bottom's values: normal numbers, or by its last letter labels, regions, boxes, scores, priors, ground truth."""
    shape_text, mark, count = text.partition(LABELS)
    shape = tuple(int(size) for size in shape_text.rstrip("RBGPSY").split("x"))
    if mark:
        return (np.arange(np.prod(shape)) % int(count)).reshape(shape).astype(np.float32)
    random = np.random.default_rng(index)
    kind = shape_text[-1]
    if kind == "R":
        return np.array([[0, 0, 0, 3, 3], [1, 1, 2, 5, 5]], np.float32)
    if kind == "P":
        corners = np.array([[0.1, 0.1, 0.5, 0.5], [0.3, 0.3, 0.7, 0.7], [0.5, 0.5, 0.9, 1.2], [0, 0.6, 0.3, 0.9]])
        return np.stack([corners.ravel(), np.full(16, 0.1)])[None].astype(np.float32)
    if kind == "G":
        return np.array([[[[0, 1, 0, 0.12, 0.1, 0.5, 0.5, 0], [0, 2, 0, 0.52, 0.5, 0.9, 0.9, 1]]]], np.float32)
    if kind == "Y":
        return np.array([[[[0, 0.3, 0.35, 0.4, 0.5], [1, 0.65, 0.55, 0.5, 0.5]]]], np.float32)
    if kind == "S":
        return random.uniform(0.1, 0.9, shape).astype(np.float32)
    return (random.standard_normal(shape) * (4 if kind == "B" else 1)).astype(np.float32)
