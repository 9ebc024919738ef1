"""One layer each, with the shapes of its bottoms, for the tests of exports: all types that have an ONNX form."""

from __future__ import annotations

CLIP, CONV3D = (2, 3, 5, 7, 6), "num_output: 2 kernel_size: 3 kernel_depth: 2"
IMAGE, FLOW, VECTOR = (2, 6, 7, 5), (2, 2, 7, 5), (3, 8)
DENSE = 'numTransition: 2 growthRate: 3 Filter_Filler { type: "msra" } BN_Scaler_Filler { value: 1 }'
CASES: list[tuple[str, tuple[tuple[int, ...], ...]]] = [
    ('type: "ReLU"', (IMAGE,)),
    ('type: "ReLU" relu_param { negative_slope: 0.1 }', (IMAGE,)),
    ('type: "ReLU6" relu_param { negative_slope: 0.1 }', (IMAGE,)),
    ('type: "ReLU6"', (IMAGE,)),
    ('type: "PReLU"', (IMAGE,)),
    ('type: "PReLU" prelu_param { channel_shared: true }', (VECTOR,)),
    ('type: "ELU" elu_param { alpha: 0.7 }', (IMAGE,)),
    ('type: "ELU" elu_param { alpha: 0.7 lambda: 1.2 }', (IMAGE,)),
    ('type: "Sigmoid"', (IMAGE,)),
    ('type: "TanH"', (IMAGE,)),
    ('type: "AbsVal"', (IMAGE,)),
    ('type: "BNLL"', (IMAGE,)),
    ('type: "Clip" clip_param { min: -0.5 max: 0.7 }', (IMAGE,)),
    ('type: "Swish" swish_param { beta: 1.5 }', (IMAGE,)),
    ('type: "HardSwish"', (IMAGE,)),
    ('type: "Threshold" threshold_param { threshold: 0.3 }', (IMAGE,)),
    ('type: "Power" power_param { power: 2 scale: 0.5 shift: 0.1 }', (IMAGE,)),
    ('type: "Power" power_param { power: 3 scale: 0.5 shift: 0.1 }', (IMAGE,)),
    ('type: "Power" power_param { scale: -2 shift: 1 }', (IMAGE,)),
    ('type: "Power"', (IMAGE,)),
    ('type: "Power" power_param { power: 0 }', (IMAGE,)),
    ('type: "Exp" exp_param { base: 2 scale: 0.5 shift: 1 }', (IMAGE,)),
    ('type: "Log" log_param { base: 3 scale: 0.1 shift: 9 }', (IMAGE,)),
    ('type: "Dropout"', (IMAGE,)),
    ('type: "Convolution" convolution_param { num_output: 4 kernel_size: 3 pad: 1 group: 2 dilation: 2 }', (IMAGE,)),
    (
        'type: "Convolution" convolution_param { num_output: 4 kernel_h: 3 kernel_w: 2 stride_h: 2 stride_w: 1 '
        "pad_h: 0 pad_w: 1 bias_term: false }",
        (IMAGE,),
    ),
    ('type: "Convolution" convolution_param { num_output: 4 kernel_size: 3 }', ((2, 3, 5, 6, 4),)),
    ('type: "Convolution" convolution_param { num_output: 4 kernel_size: 2 axis: 2 }', ((2, 3, 5, 6, 4),)),
    ('type: "Convolution" convolution_param { num_output: 4 }', (VECTOR,)),
    ('type: "Convolution" convolution_param { num_output: 4 kernel_size: 4 stride: 3 }', ((2, 3, 5, 2),)),
    ('type: "Convolution" convolution_param { num_output: 4 kernel_size: 3 stride: 2 axis: 2 }', ((2, 3, 5, 2, 6),)),
    ('type: "Im2col" convolution_param { kernel_size: 3 stride: 2 }', ((2, 3, 5, 2),)),
    ('type: "Convolution" top: "y" top: "z" convolution_param { num_output: 4 kernel_size: 1 }', (IMAGE, IMAGE)),
    ('type: "DepthwiseConvolution" convolution_param { num_output: 6 kernel_size: 3 group: 6 }', (IMAGE,)),
    ('type: "ConvolutionDepthwise" convolution_param { kernel_size: 3 stride: 2 }', (IMAGE,)),
    ('type: "Deconvolution" convolution_param { num_output: 4 kernel_size: 3 stride: 2 pad: 1 group: 2 }', (IMAGE,)),
    ('type: "Im2col" convolution_param { kernel_size: 3 stride: 2 pad: 1 }', (IMAGE,)),
    ('type: "InnerProduct" inner_product_param { num_output: 5 }', (IMAGE,)),
    ('type: "InnerProduct" inner_product_param { num_output: 5 transpose: true bias_term: false }', (VECTOR,)),
    ('type: "InnerProduct" inner_product_param { num_output: 5 axis: 2 }', (IMAGE,)),
    ('type: "InnerProduct" inner_product_param { num_output: 5 axis: -1 transpose: true }', (IMAGE,)),
    ('type: "Pooling" pooling_param { pool: AVE global_pooling: true }', (IMAGE,)),
    ('type: "Pooling" pooling_param { pool: MAX global_pooling: true }', (IMAGE,)),
    ('type: "Pooling" top: "y" top: "mask" pooling_param { kernel_size: 3 stride: 2 pad: 1 }', (IMAGE,)),
    ('type: "Pooling" pooling_param { pool: STOCHASTIC kernel_size: 3 stride: 2 }', (IMAGE,)),
    ('type: "Pooling" pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 2 round_mode: FLOOR }', (IMAGE,)),
    ('type: "SPP" spp_param { pyramid_height: 2 pool: AVE }', (IMAGE,)),
    ('type: "SPP" spp_param { pyramid_height: 1 }', (IMAGE,)),
    ('type: "LRN" lrn_param { local_size: 3 alpha: 0.5 beta: 0.6 k: 2 }', (IMAGE,)),
    ('type: "LRN" lrn_param { local_size: 3 alpha: 0.5 beta: 0.6 norm_region: WITHIN_CHANNEL }', (IMAGE,)),
    ('type: "BatchNorm"', (IMAGE,)),
    ('type: "BatchNorm" batch_norm_param { scale_bias: true eps: 1e-3 }', (VECTOR,)),
    ('type: "BatchNorm" batch_norm_param { use_global_stats: false scale_bias: true }', (IMAGE,)),
    ('type: "BN" bn_param { eps: 1e-3 }', (IMAGE,)),
    ('type: "BN" bn_param { inverse_std: true }', (VECTOR,)),
    ('type: "BN" bn_param { bn_mode: LEARN }', (IMAGE,)),
    ('type: "BN" bn_param { bn_mode: INFERENCE }', (IMAGE,)),
    ('type: "Scale" scale_param { bias_term: true }', (IMAGE,)),
    ('type: "Scale" scale_param { axis: 2 num_axes: 2 }', (IMAGE,)),
    ('type: "Scale" scale_param { axis: 0 bias_term: true }', (IMAGE, (2, 6))),
    ('type: "Scale" scale_param { num_axes: 0 bias_term: true }', (IMAGE,)),
    ('type: "Scale" scale_param { bias_term: true }', (IMAGE, ())),
    ('type: "Bias" bias_param { num_axes: 0 }', (IMAGE,)),
    ('type: "Bias" bias_param { axis: 1 num_axes: 2 }', (IMAGE,)),
    ('type: "Bias" bias_param { axis: 2 }', (IMAGE, (7,))),
    (f'type: "Convolution3D" convolution_param {{ {CONV3D} temporal_pad: 1 }}', (CLIP,)),
    (f'type: "Convolution3D" convolution3d_param {{ {CONV3D} stride: 2 pad: 1 }}', (CLIP,)),
    (f'type: "Deconvolution3D" convolution3d_param {{ {CONV3D} stride: 2 temporal_pad: 1 }}', (CLIP,)),
    *(
        (f'type: "Pooling3D" pooling_param {{ kernel_size: 3 kernel_depth: 2 {more} }}', (CLIP,))
        for more in (
            "stride: 2",
            "stride: 2 temporal_stride: 2",
            "pool: AVE stride: 2 temporal_stride: 2",
            "pool: AVE stride: 3 pad: 2",
            "pool: AVE stride: 2 pad: 1",
        )
    ),
    ('type: "Pooling3D" pooling3d_param { pool: AVE kernel_size: 6 kernel_depth: 5 }', ((2, 3, 5, 6, 6),)),
    (
        'type: "NdConvolution" convolution_param { num_output: 6 group: 3 kernel_shape { dim: 2 dim: 3 dim: 3 } '
        "stride_shape { dim: 1 dim: 2 dim: 1 } pad_shape { dim: 1 dim: 0 dim: 1 } }",
        (CLIP,),
    ),
    ('type: "NdPooling" pooling_param { kernel_shape { dim: 2 dim: 3 dim: 2 } stride_shape { dim: 2 } }', (CLIP,)),
    ('type: "NdPooling" pooling_param { pool: AVE global_pooling: true kernel_shape { dim: 1 } }', (CLIP,)),
    ('type: "PoolingND" pooling_nd_param { kernel_size: 2 kernel_size: 3 kernel_size: 2 stride: 2 }', (CLIP,)),
    ('type: "Pooling" pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 }', (CLIP,)),
    ('type: "Pooling" pooling_param { kernel_size: 3 stride: 2 }', ((2, 3, 8),)),
    ('type: "Pooling" pooling_param { kernel_size: 3 dilation: 2 pad: 1 stride: 2 }', (CLIP,)),
    ('type: "Pooling" pooling_param { kernel_size: 2 dilation: 2 dilation: 3 }', (IMAGE,)),
    ('type: "Axpy"', ((2, 6), IMAGE, IMAGE)),
    ('type: "Axpy"', ((2, 6, 1, 1), IMAGE, IMAGE)),
    ('type: "MVN"', (IMAGE,)),
    ('type: "MVN" mvn_param { across_channels: true eps: 0.1 }', (IMAGE,)),
    ('type: "MVN" mvn_param { normalize_variance: false }', (VECTOR,)),
    ('type: "Normalize" norm_param { across_spatial: false }', (IMAGE,)),
    ('type: "Normalize" norm_param { across_spatial: true channel_shared: true }', (IMAGE,)),
    ('type: "SeLU"', (IMAGE,)),
    ('type: "SeLu" selu_param { alpha: 0.5 lambda: 2 }', (IMAGE,)),
    ('type: "SeLUDropout"', (IMAGE,)),
    ('type: "SpatialDropout"', (IMAGE,)),
    ('type: "SeLuDropout"', (IMAGE,)),
    ('type: "InnerProduct" inner_product_param { num_output: 5 normalize: true }', (IMAGE,)),
    ('type: "InnerProduct" inner_product_param { num_output: 5 normalize: true transpose: true axis: 2 }', (IMAGE,)),
    ('type: "Normalize" normalize_param { }', (IMAGE,)),
    ('type: "Normalize" top: "y" top: "norm" normalize_param { normalize_type: "L1" }', (IMAGE,)),
    ('type: "Normalize" top: "y" top: "norm" normalize_param { }', (VECTOR,)),
    ('type: "GRN"', (IMAGE,)),
    ('type: "GRN" grn_param { bias: 0.5 dummy_backward: true }', (VECTOR,)),
    ('type: "ScaleFilter" scale_filter_param { min_scale: 0.5 max_scale: 2 }', (IMAGE,)),
    ('type: "ChannelScale"', (IMAGE, (2, 1, 7, 5))),
    ('type: "ChannelScale"', (VECTOR, (3,))),
    ('type: "ChannelScale" top: "y" top: "a" channel_scale_param { global_scale: true }', (IMAGE, (2, 1, 7, 5))),
    ('type: "ChannelScale" channel_scale_param { do_forward: false }', (VECTOR, (3,))),
    ('type: "Flip" flip_param { flip_height: true }', (IMAGE,)),
    ('type: "Flip"', (IMAGE,)),
    ('type: "Flip" flip_param { flip_width: false }', (IMAGE,)),
    ('type: "Gather" gather_param { axis: 1 indices: 4 indices: 0 indices: 4 }', (IMAGE,)),
    ('type: "Gather" gather_param { axis: 2 indices: 1 indices: 0 shape: 2 shape: 1 }', (IMAGE,)),
    ('type: "Gather" gather_param { axis: 1 indices: 2 shape: 0 }', (IMAGE,)),
    ('type: "Filter" filter_param { num_output: 3 }', (IMAGE,)),
    ('type: "Concat"', (IMAGE, (2, 3, 7, 5))),
    ('type: "Concat" concat_param { axis: 0 }', (IMAGE, IMAGE)),
    ('type: "Concat" concat_param { per_fla_fuse: true }', (IMAGE, (2, 3, 7, 5))),
    ('type: "Slice" top: "a" top: "b" top: "c" slice_param { axis: 1 slice_point: 1 slice_point: 4 }', (IMAGE,)),
    ('type: "Slice" top: "a" top: "b"', (IMAGE,)),
    ('type: "Eltwise" eltwise_param { coeff: 0.5 coeff: -2 coeff: 1 }', (IMAGE, IMAGE, IMAGE)),
    ('type: "Eltwise" eltwise_param { operation: PROD }', (IMAGE, IMAGE, IMAGE)),
    ('type: "Eltwise" eltwise_param { operation: MAX }', (IMAGE, IMAGE, IMAGE)),
    ('type: "Flatten" flatten_param { axis: 1 end_axis: 2 }', (IMAGE,)),
    ('type: "Reshape" reshape_param { shape { dim: 0 dim: -1 dim: 3 } axis: 0 num_axes: 2 }', (IMAGE,)),
    ('type: "Permute" permute_param { order: 0 order: 2 order: 3 }', (IMAGE,)),
    ('type: "Transpose" transpose_param { dim: 3 dim: 2 dim: 0 dim: 1 }', (IMAGE,)),
    ('type: "Reverse" reverse_param { axis: 2 }', (IMAGE,)),
    ('type: "Reverse"', (VECTOR,)),
    ('type: "Gather" top: "a" top: "b"', (IMAGE, VECTOR)),
    ('type: "Scatter"', (IMAGE,)),
    ('type: "Crop" crop_param { axis: 2 offset: 1 offset: 2 }', (IMAGE, (2, 6, 3, 3))),
    ('type: "Crop" crop_param { axis: 1 offset: 1 }', (IMAGE, (9, 5, 4, 3))),
    ('type: "AutoCrop" crop_param { axis: 2 offset: 1 offset: 2 }', (IMAGE, (2, 6, 3, 3))),
    ('type: "Tile" tile_param { axis: 2 tiles: 3 }', (IMAGE,)),
    ('type: "ShuffleChannel" shuffle_channel_param { group: 3 }', (IMAGE,)),
    ('type: "ShuffleChannel" shuffle_channel_param { group: 2 }', (VECTOR,)),
    ('type: "PixelShuffle" reshape_param { pixelshuffler: 2 }', ((2, 8, 4, 6),)),
    ('type: "Reorg" reorg_param { stride: 2 }', ((2, 8, 4, 6),)),
    ('type: "Reorg" reorg_param { stride: 2 reverse: true }', ((2, 8, 4, 6),)),
    ('type: "Mish"', (IMAGE,)),
    *(
        (f'type: "Reduction" reduction_param {{ operation: {name} axis: 2 coeff: 0.5 }}', (IMAGE,))
        for name in ("SUM", "MEAN", "ASUM", "SUMSQ")
    ),
    ('type: "Softmax"', (IMAGE,)),
    ('type: "Softmax" softmax_param { axis: -1 }', (IMAGE,)),
    ('type: "ArgMax" argmax_param { top_k: 3 out_max_val: true }', (IMAGE,)),
    ('type: "ArgMax" argmax_param { top_k: 2 axis: 1 }', (IMAGE,)),
    ('type: "ArgMax" argmax_param { axis: 2 out_max_val: true }', (IMAGE,)),
    ('type: "ArgMax"', (VECTOR,)),
    ('type: "Embed" embed_param { num_output: 4 input_dim: 9 }', ((3, 2),)),
    ('type: "BatchReindex"', (IMAGE, (4,))),
    ('type: "Filter"', (IMAGE, (2,))),
    ('type: "Interp" interp_param { height: 10 width: 9 }', (IMAGE,)),
    ('type: "Interp" interp_param { shrink_factor: 2 pad_beg: -1 }', (IMAGE,)),
    ('type: "Interp" interp_param { height: 1 width: 3 }', (IMAGE,)),
    ('type: "Upsample" upsample_param { scale: 3 }', (IMAGE,)),
    ('type: "NegSquare"', (IMAGE,)),
    ('type: "ChannelNorm"', (IMAGE,)),
    ('type: "ExpMax" expmax_param { base: 2 scale: -0.5 shift: 1 }', (IMAGE,)),
    ('type: "Mean" mean_param { operation: SUBTRACT value: 0.5 value: 2 output_scale: 3 }', (IMAGE,)),
    ('type: "PowerFile"', (IMAGE,)),
    (
        'type: "Correlation" correlation_param { pad: 3 kernel_size: 3 max_displacement: 2 stride_1: 2 stride_2: 2 }',
        (IMAGE, IMAGE),
    ),
    ('type: "Correlation" correlation_param { pad: 2 kernel_size: 1 max_displacement: 2 }', (IMAGE, IMAGE)),
    (
        'type: "Correlation" correlation_param { kernel_size: 1 max_displacement: 1 correlation_type: SUBTRACT }',
        (IMAGE, IMAGE),
    ),
    (
        'type: "Correlation1D" correlation_param { pad: 2 kernel_size: 1 max_displacement: 2 single_direction: -1 }',
        (IMAGE, IMAGE),
    ),
    ('type: "Warp"', (IMAGE, FLOW)),
    ('type: "Warp" warp_param { positions: true }', (IMAGE, (2, 2, 4, 5))),
    ('type: "FlowWarp"', (IMAGE, FLOW)),
    ('type: "Grid"', (IMAGE,)),
    ('type: "SpatialTransformer" st_param { output_H: 3 output_W: 4 theta_1_2: 0.2 }', (IMAGE, (2, 5))),
    ('type: "Resample" resample_param { height: 9 width: 3 }', (IMAGE,)),
    ('type: "Resample" resample_param { height: 3 width: 4 type: CUBIC }', (IMAGE,)),
    ('type: "Downsample" downsample_param { top_height: 3 top_width: 4 }', (IMAGE,)),
    ('type: "Downsample" downsample_param { top_height: 9 top_width: 12 }', (IMAGE,)),
    ('type: "ROIPooling" roi_pooling_param { pooled_h: 2 pooled_w: 3 }', (IMAGE, (2, 5))),
    ('type: "ROIPooling" roi_pooling_param { pooled_h: 2 pooled_w: 3 pad_ratio: 1.5 }', (IMAGE, (2, 5, 1, 1))),
    ('type: "MaskPooling"', ((2, 3, 4, 5), (2, 1, 4, 5))),
    ('type: "MaskResize" mask_resize_param { output_height: 9 output_width: 2 }', (IMAGE,)),
    ('type: "Dropout" dropout_param { scale_train: false dropout_ratio: 0.2 }', (IMAGE,)),
    ('type: "LSTM" recurrent_param { num_output: 4 }', ((3, 2, 5), (3, 2))),
    ('type: "LSTM" recurrent_param { num_output: 4 }', ((3, 2, 5), (3, 2), (2, 3))),
    (
        'type: "LSTM" top: "y" top: "h" top: "c" recurrent_param { num_output: 4 expose_hidden: true }',
        ((3, 2, 5), (3, 2), (1, 2, 4), (1, 2, 4)),
    ),
    ('type: "Lstm" lstm_param { num_output: 4 }', ((3, 2, 5),)),
    ('type: "Lstm" lstm_param { num_output: 4 batch_size: 2 }', ((6, 5),)),
    ('type: "ContinuationIndicator" continuation_indicator_param { time_step: 3 batch_size: 2 }', ()),
    (f'type: "DenseBlock" denseblock_param {{ {DENSE} }}', (IMAGE,)),
    (f'type: "DenseBlock" denseblock_param {{ {DENSE} use_BC: true }}', (IMAGE,)),
    ('type: "RNN" recurrent_param { num_output: 4 }', ((3, 2, 5), (3, 2))),
    ('type: "LSTMUnit" top: "c" top: "h"', ((1, 2, 4), (1, 2, 16), (1, 2))),
    (
        'type: "PriorBox" prior_box_param { min_size: 4 max_size: 9 aspect_ratio: 2 flip: true variance: 0.1 }',
        (IMAGE, (2, 3, 30, 40)),
    ),
    ('type: "PriorBoxClustered" prior_box_param { width: 4 height: 9 clip: true }', (IMAGE, (2, 3, 30, 40))),
]
CHAIN = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 6 dim: 6 } } }
layer { name: "in" type: "Scale" bottom: "data" top: "data" }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "conv" }
layer { name: "scale" type: "Scale" bottom: "conv" top: "conv" scale_param { bias_term: true } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "bn2" type: "BatchNorm" bottom: "conv" top: "bn2" }
layer { name: "up" type: "Deconvolution" bottom: "bn2" top: "up"
  convolution_param { num_output: 4 kernel_size: 2 group: 2 stride: 2 bias_term: false } }
layer { name: "bn3" type: "BatchNorm" bottom: "up" top: "bn3" batch_norm_param { scale_bias: true } }
layer { name: "fc" type: "InnerProduct" bottom: "bn3" top: "fc" inner_product_param { num_output: 3 } }
layer { name: "bn4" type: "BatchNorm" bottom: "fc" top: "fc" }
layer { name: "one" type: "Parameter" top: "one" parameter_param { shape { dim: 2 dim: 3 } } }
layer { name: "sum" type: "Eltwise" bottom: "fc" bottom: "one" top: "sum" }
layer { name: "quiet" type: "Silence" bottom: "conv" }
"""
DETECT = """
layer { name: "loc" type: "Input" top: "loc" input_param { shape { dim: 2 dim: %d } } }
layer { name: "conf" type: "Input" top: "conf" input_param { shape { dim: 2 dim: 240 } } }
layer { name: "map" type: "Input" top: "map" input_param { shape { dim: 2 dim: 1 dim: 3 dim: 5 } } }
layer { name: "prior" type: "PriorBox" bottom: "map" bottom: "map" top: "prior" prior_box_param {
  min_size: 6 max_size: 12 aspect_ratio: 2 flip: true img_size: 20 variance: 0.1 variance: 0.1 variance: 0.2
  variance: 0.2 } }
layer { name: "out" type: "DetectionOutput" bottom: "loc" bottom: "conf" bottom: "prior" top: "out"
  detection_output_param { num_classes: 4 %s nms_param { nms_threshold: 0.4 %s } } }
"""
POOL = 'type: "Pooling" pooling_param {{ pool: {} {} stride_h: {} stride_w: {} pad_h: {} pad_w: {} round_mode: {} }}'
