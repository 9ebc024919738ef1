"""Templates of layers' settings, from which `wide_nets` and `export_nets` draw: `<a|b>` is one of several texts.

A template has the bottoms that it takes: `any`, `image`, `vector` or `clip` is an open blob with any number of axes, 4,
2 or 5; `same` has the first bottom's shape; `2x3` is a new input, in which N, C, H and W stand for the first bottom's
sizes, and `.` for no axes. `2x3 ids:5` says which numbers it takes in `wide_nets`, `wide_layers.INPUT_KINDS` or normal
ones; `export_nets` gives all inputs those of the exports' own checks.

`$N`, `$C`, `$H` and `$W` stand for the first bottom's sizes; `tops:2` gives a layer two tops. For `wide_nets` alone,
`tame` marks settings with which no number grows much, and `only` a layer that reads new inputs only. For `export_nets`
alone, `pooled 6x4` is a maximum pooling of an image and its mask; `positive 2x3` the absolute values of an input, since
STOCHASTIC divides by sums, which may cancel out otherwise; SHIFT_FILE and MEAN_FILE are paths.
"""

from __future__ import annotations

Template = tuple[str, ...]

OUTPUTS = "num_output: <1|2|3|5|7|17>"
XAVIER = "weight_filler { type: 'xavier' } bias_filler { type: 'uniform' min: -0.5 max: 0.5 }"
FILLER = "filler { type: 'uniform' min: 0.5 max: 1.5 } bias_filler { type: 'uniform' min: -0.5 max: 0.5 }"
UNIFORM = "filler { type: 'uniform' min: -1 max: 1 }"
WINDOW = "kernel_size: <1|1|2|3|3|4> stride: <1|1|1|2|3> pad: <0|0|1|2>"
SIDES = "kernel_h: <1|2|3|5> kernel_w: <1|2|3> stride_h: <1|2> stride_w: <1|2> pad_h: <0|1> pad_w: <0|1>"
HOLES = "<|dilation: 2|hole: 2|hole_h: 2 hole_w: 1|dilation: 1 dilation: 2>"
CONVOLUTION = f"<{WINDOW}|{SIDES}> {HOLES} bias_term: <true|false> {XAVIER}"
POOL = f"<{WINDOW}|{SIDES}> <|round_mode: FLOOR|round_mode: CEIL|ceil_mode: false|ceil_mode: true>"
AXIS = "<0|1|1|2|-1>"
AXES = "axis: <0|1|2|-1> num_axes: <-1|0|1|2>"
CLIP = (
    f"{OUTPUTS} bias_term: <true|false> kernel_size: <1|2|3> kernel_depth: <1|2> stride: <1|2> temporal_stride: <1|2> "
    "pad: <0|1> temporal_pad: <0|1>"
)
FACTORS = "<|base: 2|base: 3> scale: <1|0.3|-0.2>"
EXPORTED = f"recurrent_param {{ {OUTPUTS} debug_info: <true|false> expose_hidden: false }}"
EXPOSED = "recurrent_param { num_output: 3 debug_info: <true|false> expose_hidden: true }"
CORRELATION = (
    "correlation_param { pad: <0|2|3> kernel_size: <1|3> max_displacement: <1|2> stride_1: <1|2> stride_2: <1|2> "
    "<|correlation_type: SUBTRACT|correlation_type: MULTIPLY> single_direction: <0|-1|1> }"
)
DETECTION = (
    "detection_output_param {{ num_classes: 3 share_location: {} <|background_label_id: <0|1|-1>> "
    "<|code_type: <CORNER|CORNER_SIZE|CENTER_SIZE>> <|keep_top_k: <0|3|9|200>> <|confidence_threshold: <0.1|0.6|1.5>> "
    "<|variance_encoded_in_target: true> nms_param {{ nms_threshold: <0|0.3|0.5|0.9|1|2> <|top_k: <0|4|12|300>> "
    "<|||eta: 0.9> }} }}"
)
PRIORS = (
    "prior_box_param { min_size: <3|4.5> <|max_size: 9> <|aspect_ratio: 2 <|aspect_ratio: 3>> <|flip: false> "
    "<|clip: true> <|variance: 0.1|variance: 0.1 variance: 0.1 variance: 0.2 variance: 0.3> "
    "<|img_size: 30|img_h: 20 img_w: 30> <|step: 4|step_h: 3 step_w: 5> <|offset: 0.2> <||denser_prior_boxes: true> }"
)
CLUSTERED = "prior_box_param { width: 3 height: 4.5 <|width: 7.5 height: 2> <|clip: true> <|step: 4> }"

SHARED: dict[str, list[Template]] = {
    "AbsVal": [("", "any")],
    "ArgMax": [("argmax_param { out_max_val: <true|false> top_k: <1|2> <|axis: <1|2|-1>> }", "any")],
    "BNLL": [("", "any")],
    "BatchReindex": [("", "any", "3 ids:$N"), ("", "any", "N ids:$N")],
    "Bias": [
        (f"bias_param {{ {UNIFORM} }}", "any"),
        (f"bias_param {{ {AXES} {UNIFORM} }}", "any"),
        ("bias_param { axis: <0|1> }", "any", "any"),
        ("bias_param { axis: 0 }", "any", "N"),
        ("bias_param { axis: <1|2> }", "any", "C"),
    ],
    "Clip": [("clip_param { min: <-0.5|0> max: <0.3|0.8|2> }", "any")],
    "Concat": [
        ("concat_param { axis: <0|1|2> }", "any"),
        (f"concat_param {{ axis: {AXIS} }}", "any", "any"),
        (f"concat_param {{ axis: {AXIS} }}", "any", "same"),
        ("concat_param { axis: 1 }", "any", "any", "any"),
        ("concat_param { concat_dim: <0|1|2> }", "image", "same", "same"),
    ],
    "Convolution": [
        *[(f"convolution_param {{ {OUTPUTS} {CONVOLUTION} }}", "image")] * 4,
        (f"convolution_param {{ num_output: $C group: $C {CONVOLUTION} }}", "image"),
        (f"convolution_param {{ num_output: <2|4|6> group: 2 {CONVOLUTION} }}", "image"),
        (f"convolution_param {{ num_output: 6 group: <2|3> {CONVOLUTION} }}", "2x6x7x8"),
        (f"convolution_param {{ {OUTPUTS} kernel_size: <1|2> axis: 2 {XAVIER} }}", "any"),
    ],
    "ConvolutionDepthwise": [(f"convolution_param {{ num_output: $C {CONVOLUTION} }}", "image")],
    "Deconvolution": [
        (f"convolution_param {{ {OUTPUTS} {CONVOLUTION} }}", "image"),
        (f"convolution_param {{ num_output: $C group: $C {CONVOLUTION} }}", "image"),
        (f"convolution_param {{ num_output: 4 group: 2 {CONVOLUTION} }}", "2x4x3x4"),
    ],
    "DepthwiseConvolution": [(f"convolution_param {{ num_output: $C group: $C {CONVOLUTION} }}", "image")],
    "ELU": [("elu_param { alpha: <1|0.5> <|lambda: 1.2> }", "any")],
    "Eltwise": [
        ("", "any"),
        *[("", "any", "same")] * 4,
        ("eltwise_param { coeff: <1|-0.5|-1> coeff: <2|1|0|-1> }", "any", "same"),
        ("eltwise_param { operation: <MAX|PROD|SUM> }", "any", "same"),
        ("eltwise_param { operation: <MAX|PROD|SUM> }", "any", "same", "same"),
    ],
    "Flatten": [("", "any"), ("flatten_param { axis: <0|1|2> end_axis: <1|2|-1> }", "any")],
    "HardSwish": [("", "any")],
    "Im2col": [(f"convolution_param {{ <{WINDOW}|{SIDES}> {HOLES} }}", "image")],
    "InnerProduct": [
        (
            f"inner_product_param {{ {OUTPUTS} bias_term: <true|false> transpose: <true|false> axis: <1|1|2|-1> "
            f"{XAVIER} }}",
            "any",
        )
    ],
    "Interp": [
        ("interp_param { height: <1|3|6|9> width: <2|5|8> <|pad_beg: -1> <|pad_end: -1> }", "image"),
        ("interp_param { <zoom_factor: 2|shrink_factor: 2|zoom_factor: 3 shrink_factor: 2> <|pad_end: -1> }", "image"),
    ],
    "LRN": [
        (
            "lrn_param { local_size: <1|3|5> alpha: <0.5|1e-4> beta: <0.75|0.5> k: <1|2> "
            "<|norm_region: ACROSS_CHANNELS|norm_region: WITHIN_CHANNEL> }",
            "image",
        ),
    ],
    "Mish": [("", "any")],
    "PReLU": [("prelu_param { filler { type: 'uniform' min: -0.3 max: 0.6 } channel_shared: <true|false> }", "any")],
    "Permute": [
        *[("permute_param { order: 0 order: 2 order: 3 order: 1 }", "image")] * 4,
        ("permute_param { order: <0|1> order: <2|0> order: <1|3> }", "image"),
        ("permute_param { order: 1 order: 0 }", "any"),
    ],
    "Pooling": [
        *[(f"pooling_param {{ <|pool: MAX|pool: AVE> {POOL} }}", "image")] * 3,
        ("pooling_param { pool: <MAX|AVE> global_pooling: true }", "image"),
    ],
    "ROIPooling": [
        (
            "roi_pooling_param { pooled_h: <1|2|3> pooled_w: <1|2|4> spatial_scale: <1|0.5|0.3> }",
            "image",
            "<3x5|7x5> rois:$N",
        ),
    ],
    "ReLU": [*[("", "any")] * 2, ("relu_param { negative_slope: <0.1|-0.2> }", "any")],
    "ReLU6": [("", "any"), ("relu_param { negative_slope: <0.1|-0.2> }", "any")],
    "Reduction": [("reduction_param { operation: <SUM|MEAN|ASUM|SUMSQ> axis: <0|1|1|2|-1> coeff: <1|0.1|-2> }", "any")],
    "Reshape": [
        ("reshape_param { shape { dim: 0 dim: -1 } }", "any"),
        ("reshape_param { shape { dim: -1 dim: 1 } }", "any"),
        ("reshape_param { shape { dim: 0 dim: 0 dim: -1 } }", "any"),
        ("reshape_param { shape { dim: 0 dim: -1 dim: $C dim: 1 } }", "any"),
        ("reshape_param { shape { dim: -1 } axis: 1 num_axes: <1|2|-1> }", "any"),
        ("reshape_param { shape { dim: 1 } axis: <1|2|-1> num_axes: 0 }", "any"),
        ("reshape_param { shape { dim: $H dim: -1 dim: 1 dim: $N } }", "any"),
    ],
    "SPP": [("spp_param { pyramid_height: <1|2|3> <|pool: <MAX|AVE>> }", "image")],
    "Scale": [
        *[(f"scale_param {{ bias_term: <true|false> {FILLER} }}", "any")] * 2,
        (f"scale_param {{ {AXES} bias_term: <true|false> {FILLER} }}", "any"),
        ("scale_param { axis: <0|1> }", "any", "any"),
        ("scale_param { axis: 0 bias_term: <true|false> }", "any", "N"),
        ("scale_param { axis: <1|2> bias_term: <true|false> }", "image", "C"),
        ("scale_param { axis: 0 }", "any", "same"),
    ],
    "ShuffleChannel": [
        ("shuffle_channel_param { group: <1|2|3> }", "2x6x3x4"),
        ("shuffle_channel_param { group: <1|2|3|$C> }", "any"),
    ],
    "Sigmoid": [("", "any")],
    "Slice": [
        ("tops:2 slice_param { axis: <0|1|1|2|-1> <|slice_point: <1|2>> }", "any"),
        ("tops:3 slice_param { <axis: <1|1|2>|slice_dim: <1|2>> slice_point: 1 slice_point: <2|3> }", "any"),
    ],
    "Softmax": [(f"softmax_param {{ axis: {AXIS} <|normalize_type: 'Softmax'> }}", "any")],
    "Split": [("tops:2", "any"), ("tops:3", "any")],
    "Swish": [("swish_param { beta: <1|1.5> }", "any")],
    "TanH": [("", "any")],
    "Threshold": [("threshold_param { threshold: <0|0.5> }", "any")],
    "Tile": [(f"tile_param {{ axis: {AXIS} tiles: <1|2|3> }}", "any")],
    "Upsample": [("upsample_param { <scale: 2|scale: 3|scale_h: 3 scale_w: 2> }", "image")],
}
"""Settings and bottoms, by type, that both draw."""

RECURRENT = f"recurrent_param {{ num_output: <1|3|5> {XAVIER} }}"
WIDE: dict[str, list[Template]] = {
    "Axpy": [("", "any", "same", "same")],
    "BN": [
        ("bn_param { slope_filler { type: 'uniform' min: 0.5 max: 2 } bias_filler { value: 0.3 } eps: 1 }", "any"),
        ("bn_param { slope_filler { value: 1 } eps: 1 <inverse_std|frozen>: true }", "any"),
        ("bn_param { bn_mode: INFERENCE scale_filler { type: 'uniform' min: 0.5 max: 2 } }", "any"),
    ],
    "BatchNorm": [
        *[("batch_norm_param { eps: <0.1|0.5> <|scale_bias: true> }", "any")] * 2,
        ("batch_norm_param { eps: <0.1|0.5> use_global_stats: <true|true|false> <|scale_bias: true> }", "any"),
    ],
    "Crop": [("crop_param { axis: <1|2|2|3> offset: <0|1> }", "any", "any"), ("", "any", "any")],
    "Dropout": [("dropout_param { dropout_ratio: <0.3|0.5> }", "any")],
    "Embed": [
        (f"only embed_param {{ {OUTPUTS} input_dim: 5 bias_term: <true|false> {XAVIER} }}", "any", "N ids:5"),
        (f"only embed_param {{ {OUTPUTS} input_dim: 3 bias_term: <true|false> {XAVIER} }}", "any", "NxC ids:3"),
    ],
    "Exp": [("exp_param { scale: 0.2 <|base: 2> }", "any")],
    "LSTM": [(RECURRENT, "any", "NxC cont"), (RECURRENT, "any", "NxC cont", "CxH")],
    "Log": [("log_param { shift: 1.1 }", "any")],
    "MVN": [("mvn_param { normalize_variance: <true|false> across_channels: <true|false> eps: 0.5 }", "any")],
    "Normalize": [("norm_param { across_spatial: <true|false> channel_shared: <true|false> eps: 0.5 }", "image")],
    "Power": [
        ("tame power_param { scale: -0.7 shift: 0.2 }", "any"),
        ("power_param { power: <2|3> shift: 0.5 }", "any"),
        ("tame", "any"),
    ],
    "RNN": [(RECURRENT, "any", "NxC cont")],
}
"""What `wide_nets` draws beside them: settings with which numbers stay tame in training."""

EXPORT: dict[str, list[Template]] = {
    "AutoCrop": [("crop_param { axis: <2|3> offset: <0|1> }", "image", "NxCx2x2")],
    "Axpy": [("", "4x3", "4x3x2x5", "4x3x2x5"), ("", "2x3x1x1", "2x3x2x5", "2x3x2x5")],
    "BN": [
        (
            "bn_param { eps: <1e-3|0.1> momentum: 0.8 frozen: <true|false> <|inverse_std: true|bn_mode: INFERENCE> }",
            "any",
        ),
        ("bn_param { bn_mode: LEARN eps: 0.1 }", "image"),
    ],
    "BatchNorm": [
        (
            "batch_norm_param { <|eps: <0.1|1e-3>> <|scale_bias: true> <|use_global_stats: true> "
            "stats_batch_size: <0|2> "
            "moving_average_fraction: 0.9 }",
            "any",
        ),
        ("batch_norm_param { eps: 0.1 use_global_stats: false <|scale_bias: true> }", "image"),
        ("batch_norm_param { use_weight_bias: true eps: 0.1 }", "image"),
    ],
    "Bias": [("", "any", ".")],
    "ChannelNorm": [("", "image")],
    "ChannelScale": [
        (
            "channel_scale_param { do_forward: <true|false> do_backward_feature: <true|false> "
            "do_backward_scale: true }",
            "2x3x4x5",
            "2x1x4x5",
        ),
        ("channel_scale_param { global_scale: true max_global_scale: 9 min_global_scale: 0 }", "4x3", "4"),
    ],
    "Concat": [("concat_param { per_fla_fuse: true }", "image", "Nx2x3x2")],
    "ContinuationIndicator": [("continuation_indicator_param { time_step: <1|3> batch_size: 2 }",)],
    "Convolution": [
        (f"convolution_param {{ {OUTPUTS} <kernel_size: 2|kernel_size: 1 stride: 2> }}", "clip"),
        (f"convolution_param {{ {OUTPUTS} kernel_size: 2 }}", "3x2x7"),
        (f"convolution_param {{ {OUTPUTS} }}", "vector"),
        (f"tops:2 convolution_param {{ {OUTPUTS} {CONVOLUTION} }}", "image", "same"),
    ],
    "Convolution3D": [(f"convolution3d_param {{ {CLIP} }}", "clip"), (f"convolution_param {{ {CLIP} }}", "clip")],
    "Correlation": [(CORRELATION, "2x3x7x8", "2x3x7x8")],
    "Correlation1D": [(CORRELATION, "2x3x7x8", "2x3x7x8")],
    "Crop": [
        ("crop_param { axis: <1|2|3> offset: <0|1> }", "image", "Nx2x2x3"),
        ("crop_param { axis: 2 offset: <0|1> offset: <0|2> }", "image", "NxCx2x2"),
        ("", "image", "same"),
    ],
    "Deconvolution3D": [(f"convolution3d_param {{ {CLIP} }}", "clip"), (f"convolution_param {{ {CLIP} }}", "clip")],
    "DenseBlock": [
        (
            "denseblock_param { numTransition: <1|3> growthRate: <1|2> use_BC: <true|false> use_dropout: <true|false> "
            "dropout_amount: 0.5 moving_average_fraction: 0.1 }",
            "image",
        )
    ],
    "DetectionOutput": [
        *[(DETECTION.format("true"), "2x80", "2x60", "1x2x80")] * 3,
        (DETECTION.format("false"), "2x240", "2x60", "1x2x80"),
        (DETECTION.format("true"), "1x24", "1x18", "1x2x24"),
        (
            "detection_output_param { num_classes: 3 code_type: CENTER_SIZE use_polygon: true "
            "nms_param { nms_threshold: 0.3 } }",
            "2x240",
            "2x60",
            "1x2x80",
        ),
    ],
    "Downsample": [("downsample_param { top_height: <3|4> top_width: <2|5> }", "2x3x8x9")],
    "Dropout": [
        (
            "dropout_param { dropout_ratio: <0.3|0.5> random_seed: 3 <|scale_train: false> "
            "<|||sample_weights_test: true> }",
            "any",
        )
    ],
    "Eltwise": [("eltwise_param { operation: PROD stable_prod_grad: <true|false> }", "any", "same", "same")],
    "Embed": [("embed_param { num_output: <1|3> input_dim: 5 bias_term: <true|false> }", "<3|3x2>")],
    "Exp": [(f"exp_param {{ {FACTORS} shift: <0|0.5> }}", "any")],
    "ExpMax": [(f"expmax_param {{ {FACTORS} shift: <0|0.5> }}", "image")],
    "Filter": [
        ("", "any", "N"),
        ("tops:2", "any", "same", "N"),
        ("filter_param { num_output: 2 axis: <1|2> }", "2x4x3x2"),
    ],
    "Flip": [("flip_param { flip_width: <true|false> flip_height: <true|false> }", "image"), ("", "image")],
    "FlowWarp": [("flow_warp_param { <|fill_value: ZERO|fill_value: NOT_A_NUMBER> }", "2x3x5x4", "2x2x5x4")],
    "GRN": [("grn_param { <|bias: <0.1|2>> <|dummy_backward: true> }", "image")],
    "Gather": [
        ("gather_param { axis: <0|1|2> indices: <0|1> indices: 1 }", "any"),
        ("tops:2", "any", "same"),
        ("gather_param { axis: 1 indices: 1 indices: 0 <shape: 2 shape: 1|shape: 1 shape: 2> }", "any"),
    ],
    "Grid": [("", "image")],
    "InnerProduct": [
        (
            f"inner_product_param {{ {OUTPUTS} bias_term: <true|false> transpose: <true|false> axis: <1|1|2|-1> "
            "normalize: true }",
            "any",
        )
    ],
    "Interp": [("<|interp_param { use_blob_size: true }>", "2x3x4x5", "2x1x7x6")],
    "LSTM": [
        (EXPORTED, "3x2x4", "3x2"),
        (EXPORTED, "3x2x4", "3x2", "2x5"),
        (
            f"tops:3 {EXPOSED}",
            "3x2x4",
            "3x2",
            "1x2x3",
            "1x2x3",
        ),
    ],
    "LSTMUnit": [("tops:2", "1x2x4", "1x2x16", "1x2")],
    "Log": [("log_param { <|base: 2|base: 3> scale: <0.1|-0.1> shift: 9 }", "any")],
    "Lstm": [
        (f"lstm_param {{ {OUTPUTS} clipping_threshold: <0|0.01> }}", "3x2x4"),
        (f"lstm_param {{ {OUTPUTS} batch_size: 2 }}", "6x4"),
        (f"lstm_param {{ {OUTPUTS} }}", "3x2x4", "3x2"),
    ],
    "MVN": [
        ("mvn_param { normalize_variance: <true|false> across_channels: <true|false> eps: <0.5|1e-3> }", "2x3x5x4"),
        ("mvn_param { normalize_variance: false }", "vector"),
    ],
    "MaskPooling": [("", "image", "Nx1xHxW")],
    "MaskResize": [("mask_resize_param { output_height: <2|9> output_width: <3|7> }", "image")],
    "Mean": [
        (
            "mean_param { operation: <ADD|SUBTRACT> value: 0.5 <|value: 2 value: 1> mean_scale: "
            "<1|2> input_scale: <1|0.5>"
            " output_scale: <1|3> }",
            "2x3x4x5",
        ),
        ("mean_param { operation: <ADD|SUBTRACT> file: MEAN_FILE mean_scale: <1|2> }", "2x3x4x5"),
    ],
    "NegSquare": [("", "any")],
    "Normalize": [
        ("norm_param { across_spatial: <true|false> channel_shared: <true|false> eps: <0.5|1e-3> }", "image"),
        (
            "<|tops:2> normalize_param { <|normalize_type: 'L1'|normalize_type: 'L2'> fix_gradient: "
            "true bp_norm: false }",
            "2x3x4x5",
        ),
    ],
    "Parameter": [("parameter_param { shape { dim: 2 dim: 3 } }",)],
    "Pooling": [
        ("pooling_param { pool: STOCHASTIC global_pooling: true }", "positive 2x3x4x5"),
        (
            "pooling_param { pool: STOCHASTIC <kernel_size: 2|kernel_h: 3 kernel_w: 2> stride: <1|2> "
            "<|round_mode: FLOOR|ceil_mode: false> }",
            "positive 2x3x6x7",
        ),
        (f"tops:2 pooling_param {{ pool: MAX {POOL} }}", "2x3x6x7"),
        ("pooling_param { <|pool: AVE> kernel_size: <2|3> stride: <1|2> pad: <0|1> }", "2x3x5x7x6"),
        ("pooling_param { kernel_size: <2|3> dilation: <1|2> dilation: <2|3> stride: <1|2> pad: <0|1> }", "2x3x8x9"),
        ("tops:2 pooling_param { global_pooling: true }", "2x3x6x7"),
    ],
    "NdConvolution": [
        (
            f"convolution_param {{ {OUTPUTS} kernel_shape {{ dim: <1|2> dim: <2|3> dim: <1|3> }} "
            "<|stride_shape { dim: 1 dim: 2 dim: <1|2> }> <|pad_shape { dim: <0|1> }> }",
            "clip",
        ),
    ],
    "NdPooling": [
        (
            "pooling_param { <|pool: MAX|pool: AVE> kernel_shape { dim: <1|2> dim: <2|3> dim: <2|3> } "
            "<|stride_shape { dim: 1 dim: 2 dim: <1|2> }> <|pad_shape { dim: 0 dim: 1 dim: <0|1> }> }",
            "2x3x5x7x6",
        ),
        ("pooling_param { <|pool: AVE> global_pooling: true kernel_shape { dim: 1 } }", "2x3x5x7x6"),
    ],
    "Pooling3D": [
        (
            "pooling3d_param { <|pool: MAX|pool: AVE> kernel_size: <2|3> stride: <1|2> pad: <0|1|2> "
            "kernel_depth: <1|2> "
            "temporal_stride: <1|2> }",
            "2x3x5x7x6",
        ),
        (
            "pooling_param { <|pool: MAX|pool: AVE> kernel_size: <2|3> stride: <1|2> pad: <0|1|2> kernel_depth: <1|2> "
            "temporal_stride: <1|2> }",
            "2x3x5x7x6",
        ),
    ],
    "PoolingND": [
        (f"pooling_nd_param {{ <|pool: MAX|pool: AVE> <{WINDOW}|{SIDES}> }}", "2x3x6x7"),
        ("pooling_nd_param { <|pool: AVE> kernel_size: <2|3> stride: <1|2> pad: <0|1> }", "2x3x5x7x6"),
        ("pooling_nd_param { <|pool: AVE> global_pooling: true }", "2x3x5x7x6"),
    ],
    "Power": [("power_param { scale: <-0.7|0|1|0.5> shift: <0.2|0|-1> power: <1|2|3|0> }", "any"), ("", "any")],
    "PowerFile": [("power_file_param { <|shift_file: SHIFT_FILE> }", "2x3x2x2")],
    "PriorBox": [(PRIORS, "1x2x3x4", "1x3x24x28"), (PRIORS, "image", "Nx3x24x28")],
    "PriorBoxClustered": [(CLUSTERED, "1x2x3x4", "1x3x24x28"), (CLUSTERED, "image", "Nx3x24x28")],
    "RNN": [
        (EXPORTED, "3x2x4", "3x2"),
        (EXPORTED, "3x2x4", "3x2", "2x5"),
        (
            f"tops:2 {EXPOSED}",
            "3x2x4",
            "3x2",
            "1x2x3",
        ),
    ],
    "Reorg": [("reorg_param { stride: <1|2> reverse: <true|false> }", "2x8x4x6")],
    "ROIPooling": [
        ("roi_pooling_param { pooled_h: 2 pooled_w: 3 spatial_scale: 0.5 pad_ratio: <0.25|1.5> }", "image", "7x5x1x1"),
    ],
    "PixelShuffle": [("reshape_param { pixelshuffler: <1|2> }", "2x8x4x6")],
    "Resample": [
        (
            "resample_param { height: <3|7|9> width: <2|5|8> <|type: <NEAREST|LINEAR|CUBIC>> antialias: <true|false> }",
            "image",
        ),
        ("resample_param { type: LINEAR }", "image", "Nx1x5x6"),
    ],
    "Reverse": [(f"reverse_param {{ axis: {AXIS} }}", "any")],
    "Scale": [
        ("scale_param { axis: <0|1|2|-1> num_axes: <-1|0|1|2> min_value: -1 max_value: 1 }", "any"),
        ("", "any", "."),
    ],
    "Scatter": [("", "any")],
    "ScaleFilter": [("scale_filter_param { min_scale: 0.5 max_scale: 2 }", "image")],
    "SeLU": [("selu_param { <|alpha: 0.5> <|lambda: 2> }", "any")],
    "SeLUDropout": [("selu_dropout_param { <|dropout_ratio: 0.3> <|alpha: -1> }", "any")],
    "SeLu": [("selu_param { <|alpha: 0.5> <|lambda: 2> }", "any")],
    "SeLuDropout": [("selu_dropout_param { <|dropout_ratio: 0.3> <|alpha: -1> }", "any")],
    "Silence": [("tops:0", "any")],
    "Slice": [("slice_param { axis: 1 }", "any")],
    "SpatialTransformer": [
        (
            "st_param { <|output_H: 3 output_W: 4> transform_type: 'affine' sampler_type: "
            "'bilinear' to_compute_dU: false "
            "theta_1_1: 0.9 theta_1_2: 0.2 theta_2_1: -0.1 theta_2_2: 1.2 <|theta_1_3: 0.1> }",
            "2x3x5x4",
            "<2x1|2x2>",
        ),
        ("st_param { theta_2_3: 0.3 }", "2x3x5x4", "2x5"),
    ],
    "SpatialDropout": [
        ("dropout_param { dropout_ratio: <0.3|0.5> <|scale_train: false> <|||sample_weights_test: true> }", "image")
    ],
    "Transpose": [
        ("transpose_param { dim: 3 dim: 2 dim: 0 dim: 1 }", "image"),
        ("transpose_param { dim: 1 dim: 0 }", "vector"),
    ],
    "Upsample": [
        ("upsample_param { upsample_h: 8 upsample_w: <4|12> }", "2x3x4x4"),
        ("upsample_param { <|scale: 2|scale_h: 2 scale_w: 2|upsample_h: 6 upsample_w: 5> }", "pooled 6x4"),
        ("upsample_param { scale: 2 pad_out_h: true pad_out_w: true }", "pooled 5x3"),
    ],
    "Warp": [("warp_param { positions: <true|false> }", "2x3x5x4", "2x2x5x4"), ("", "2x3x5x4", "2x2x5x4")],
}
"""What `export_nets` draws beside them."""

UNTRIED = {
    "detection_output_param.save_output_param": "writes files beside the top, which an export does not",
} | {
    f"detection_output_param.{name}": "makes a YoloDetectionOutput of the layer when a prototxt is read"
    for name in ("classes", "num_box", "coords", "nms_threshold", "biases")
}
"""Fields that act and are in no template, with the reason."""

_IN_PLACE = """
    AbsVal BNLL BatchNorm BN Bias Clip Dropout ELU Exp HardSwish Log Mish PReLU Power ReLU ReLU6 Scale SeLU SeLu
    SeLUDropout SeLuDropout Sigmoid Softmax Swish TanH
"""
_LEAPING = """
    ArgMax DetectionOutput ROIPooling Threshold FlowWarp Warp SpatialTransformer Filter Axpy Downsample PriorBox
    PriorBoxClustered Grid Silence BatchReindex
"""
IN_PLACE = set(_IN_PLACE.split())
"""Types that may work in place."""
LEAPING = set(_LEAPING.split())
"""Types whose bottoms and tops no other layer of `export_nets` has: they may make much of a small difference."""
