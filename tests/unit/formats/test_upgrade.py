from __future__ import annotations

import logging

import pytest
from google.protobuf import text_format

from caffepy.errors import ConfigError
from caffepy.formats.fields import LOGGED
from caffepy.formats.proto.caffe_pb2 import NetParameter, SolverParameter, V0LayerParameter, V1LayerParameter
from caffepy.formats.prototxt import parse_text
from caffepy.formats.upgrade import (
    SETTINGS,
    SOLVER_TYPES,
    V0_TYPES,
    V1_TYPES,
    type_of_v1_name,
    upgrade_net,
    upgrade_solver,
)


def upgraded(text: str) -> NetParameter:
    net = parse_text(text, NetParameter(), "old.prototxt")
    upgrade_net(net, "old.prototxt")
    return net


def net(text: str) -> NetParameter:
    return text_format.Parse(text, NetParameter())


V0_NET = """
name: "old"
input: "data" input_dim: 2 input_dim: 3 input_dim: 8 input_dim: 9
layers { layer { name: "pad" type: "padding" pad: 2 } bottom: "data" top: "padded" }
layers {
  layer {
    name: "conv" type: "conv" num_output: 4 kernelsize: 5 stride: 2 group: 1 biasterm: false
    weight_filler { type: "xavier" } blobs_lr: 1 blobs_lr: 2 weight_decay: 1 weight_decay: 0
  }
  bottom: "padded" top: "conv"
}
layers { layer { name: "relu" type: "relu" } bottom: "conv" top: "conv" }
layers { layer { name: "pool" type: "pool" pool: AVE kernelsize: 3 stride: 2 pad: 1 } bottom: "conv" top: "pool" }
layers { layer { name: "norm" type: "lrn" local_size: 3 alpha: 0.1 beta: 0.5 } bottom: "pool" top: "norm" }
layers { layer { name: "ip" type: "innerproduct" num_output: 10 bias_filler { value: 1 } } bottom: "norm" top: "ip" }
layers { layer { name: "drop" type: "dropout" dropout_ratio: 0.2 } bottom: "ip" top: "ip" }
layers { layer { name: "loss" type: "softmax_loss" } bottom: "ip" bottom: "label" }
"""

V2_OF_V0_NET = """
name: "old"
layer { name: "input" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 9 } } }
layer {
  name: "conv" type: "Convolution" bottom: "data" top: "conv"
  param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  convolution_param {
    num_output: 4 kernel_size: 5 stride: 2 group: 1 bias_term: false pad: 2 weight_filler { type: "xavier" }
  }
}
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer {
  name: "pool" type: "Pooling" bottom: "conv" top: "pool"
  pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 }
}
layer {
  name: "norm" type: "LRN" bottom: "pool" top: "norm" lrn_param { local_size: 3 alpha: 0.1 beta: 0.5 }
}
layer {
  name: "ip" type: "InnerProduct" bottom: "norm" top: "ip"
  inner_product_param { num_output: 10 bias_filler { value: 1 } }
}
layer { name: "drop" type: "Dropout" bottom: "ip" top: "ip" dropout_param { dropout_ratio: 0.2 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" }
"""


def test_a_v0_net_with_padding_and_inputs_becomes_a_current_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "caffepy"):
        assert upgraded(V0_NET) == net(V2_OF_V0_NET)
    assert [record.getMessage() for record in caplog.records] == [
        "Upgraded from an older format in old.prototxt: V0 layers, V1 layers, input fields"
    ]


def test_v0_data_layers_keep_their_sources_and_transforms() -> None:
    old = """
      layers { layer { name: "d" type: "data" source: "db" batchsize: 8 meanfile: "m" cropsize: 5 mirror: true scale: .5
                       rand_skip: 3 } top: "data" top: "label" }
      layers { layer { name: "i" type: "images" source: "list" batchsize: 2 new_height: 7 shuffle_images: true }
               top: "x" }
      layers { layer { name: "w" type: "window_data" source: "win" det_fg_threshold: 0.6 det_crop_mode: "square" } }
      layers { layer { name: "h" type: "hdf5_output" hdf5_output_param { file_name: "out" } } }
    """
    assert upgraded(old) == net("""
      layer { name: "d" type: "Data" top: "data" top: "label"
              transform_param { scale: .5 mean_file: "m" crop_size: 5 mirror: true }
              data_param { source: "db" batch_size: 8 rand_skip: 3 } }
      layer { name: "i" type: "ImageData" top: "x"
              image_data_param { source: "list" batch_size: 2 new_height: 7 shuffle: true } }
      layer { name: "w" type: "WindowData"
              window_data_param { source: "win" fg_threshold: 0.6 crop_mode: "square" } }
      layer { name: "h" type: "HDF5Output" hdf5_output_param { file_name: "out" } }
    """)


def test_v0_settings_that_a_type_never_had_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    result = upgraded('layers { layer { name: "r" type: "relu" num_output: 3 } bottom: "a" top: "a" }')
    assert result == net('layer { name: "r" type: "ReLU" bottom: "a" top: "a" }')
    assert "layer 'r': num_output has no meaning for type relu; ignored" in caplog.text


PADDED = (
    'layers {{ layer {{ name: "p" type: "padding" }} bottom: "a" {} top: "b" }} layers {{ layer {{ {} }} bottom: "b" }}'
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'layers { layer { name: "c" type: "convv" } }',
            r"old\.prototxt: layer 'c': unknown V0 layer type 'convv'; did you mean 'conv'",
        ),
        (PADDED.format("", 'name: "r" type: "relu"'), "padding layer 'p' feeds 'r' of type relu; only conv and pool"),
        (PADDED.format('bottom: "x"', 'name: "c" type: "conv"'), "'p' and 'c' must have one bottom each"),
        ('layer { name: "a" } layers { name: "b" }', "both layer and layers are used"),
        ('input: "a" input_dim: 1 input_dim: 2', "2 input_dim for 1 input; give N, C, H and W"),
        ('input: "a" input: "b" input_shape { dim: 1 }', "2 input but 1 input_shape; give one input_shape per input"),
    ],
)
def test_what_cannot_be_upgraded(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        upgraded(text)


def test_v1_layers_get_type_names_and_param_specs() -> None:
    old = """
      layers {
        name: "c" type: CONVOLUTION bottom: "a" top: "b" blobs_lr: 1 blobs_lr: 2 weight_decay: 0.5
        param: "shared" blob_share_mode: PERMISSIVE loss_weight: 0.1 include { phase: TEST }
        convolution_param { num_output: 3 } blobs { data: 1 data: 2 num: 1 channels: 1 height: 1 width: 2 }
      }
    """
    assert upgraded(old) == net("""
      layer {
        name: "c" type: "Convolution" bottom: "a" top: "b"
        param { name: "shared" share_mode: PERMISSIVE lr_mult: 1 decay_mult: 0.5 } param { lr_mult: 2 }
        loss_weight: 0.1 include { phase: TEST }
        convolution_param { num_output: 3 } blobs { data: 1 data: 2 num: 1 channels: 1 height: 1 width: 2 }
      }
    """)


@pytest.mark.parametrize(
    ("v1_type", "holder", "v2_type"),
    [
        ("DATA", "data_param", "Data"),
        ("IMAGE_DATA", "image_data_param", "ImageData"),
        ("WINDOW_DATA", "window_data_param", "WindowData"),
    ],
)
def test_transform_fields_of_v1_data_layers_move(v1_type: str, holder: str, v2_type: str) -> None:
    fields = 'scale: 2 mean_file: "m" crop_size: 3 mirror: true'
    old = f'layers {{ type: {v1_type} {holder} {{ source: "s" {fields} }} }}'
    new = f'layer {{ type: "{v2_type}" {holder} {{ source: "s" }} transform_param {{ {fields} }} }}'
    assert upgraded(old) == net(new)


V0_SETTINGS = {
    "conv": (
        'num_output: 4 biasterm: false weight_filler { type: "xavier" } bias_filler { value: 2 } pad: 1 kernelsize: 3 '
        "group: 2 stride: 2 blobs_lr: 3 weight_decay: 0.5 blobs { num: 1 channels: 1 height: 1 width: 1 data: 7 }",
        'type: "Convolution" convolution_param { num_output: 4 bias_term: false weight_filler { type: "xavier" } '
        "bias_filler { value: 2 } pad: 1 kernel_size: 3 group: 2 stride: 2 } param { lr_mult: 3 decay_mult: 0.5 } "
        "blobs { num: 1 channels: 1 height: 1 width: 1 data: 7 }",
    ),
    "innerproduct": (
        'num_output: 4 biasterm: false weight_filler { type: "xavier" } bias_filler { value: 2 }',
        'type: "InnerProduct" inner_product_param { num_output: 4 bias_term: false weight_filler { type: "xavier" } '
        "bias_filler { value: 2 } }",
    ),
    "pool": (
        "pool: STOCHASTIC pad: 1 kernelsize: 3 stride: 2",
        'type: "Pooling" pooling_param { pool: STOCHASTIC pad: 1 kernel_size: 3 stride: 2 }',
    ),
    "dropout": ("dropout_ratio: 0.3", 'type: "Dropout" dropout_param { dropout_ratio: 0.3 }'),
    "lrn": (
        "local_size: 3 alpha: 0.2 beta: 0.6 k: 2",
        'type: "LRN" lrn_param { local_size: 3 alpha: 0.2 beta: 0.6 k: 2 }',
    ),
    "data": (
        'source: "s" batchsize: 3 rand_skip: 4 scale: 2 meanfile: "m" cropsize: 5 mirror: true',
        'type: "Data" data_param { source: "s" batch_size: 3 rand_skip: 4 } '
        'transform_param { scale: 2 mean_file: "m" crop_size: 5 mirror: true }',
    ),
    "hdf5_data": ('source: "s" batchsize: 3', 'type: "HDF5Data" hdf5_data_param { source: "s" batch_size: 3 }'),
    "images": (
        'source: "s" batchsize: 3 rand_skip: 4 shuffle_images: true new_height: 5 new_width: 6',
        'type: "ImageData" image_data_param { source: "s" batch_size: 3 rand_skip: 4 shuffle: true new_height: 5 '
        "new_width: 6 }",
    ),
    "window_data": (
        'source: "s" batchsize: 3 det_fg_threshold: 0.6 det_bg_threshold: 0.3 det_fg_fraction: 0.4 det_context_pad: 5 '
        'det_crop_mode: "square"',
        'type: "WindowData" window_data_param { source: "s" batch_size: 3 fg_threshold: 0.6 bg_threshold: 0.3 '
        'fg_fraction: 0.4 context_pad: 5 crop_mode: "square" }',
    ),
    "infogain_loss": ('source: "s"', 'type: "InfogainLoss" infogain_loss_param { source: "s" }'),
    "concat": ("concat_dim: 2", 'type: "Concat" concat_param { concat_dim: 2 }'),
    "hdf5_output": ('hdf5_output_param { file_name: "f" }', 'type: "HDF5Output" hdf5_output_param { file_name: "f" }'),
}
"""By V0 type all of its settings, and the current layer that they make."""


@pytest.mark.parametrize("kind", V0_SETTINGS)
def test_every_v0_setting_goes_where_it_is_now(kind: str) -> None:
    old, new = V0_SETTINGS[kind]
    found = upgraded(f'layers {{ layer {{ name: "a" type: "{kind}" {old} }} bottom: "x" top: "y" }}')
    assert found == net(f'layer {{ name: "a" bottom: "x" top: "y" {new} }}')


V1_SETTINGS = {
    "concat_param": "CONCAT Concat concat_dim: 2",
    "convolution_param": "CONVOLUTION Convolution num_output: 3",
    "data_param": "DATA Data batch_size: 3",
    "dropout_param": "DROPOUT Dropout dropout_ratio: 0.3",
    "hdf5_data_param": "HDF5_DATA HDF5Data batch_size: 3",
    "hdf5_output_param": "HDF5_OUTPUT HDF5Output file_name: 'f'",
    "image_data_param": "IMAGE_DATA ImageData batch_size: 3",
    "infogain_loss_param": "INFOGAIN_LOSS InfogainLoss source: 'f'",
    "inner_product_param": "INNER_PRODUCT InnerProduct num_output: 3",
    "lrn_param": "LRN LRN local_size: 3",
    "pooling_param": "POOLING Pooling stride: 3",
    "window_data_param": "WINDOW_DATA WindowData batch_size: 3",
    "power_param": "POWER Power power: 3",
    "memory_data_param": "MEMORY_DATA MemoryData batch_size: 3",
    "argmax_param": "ARGMAX ArgMax top_k: 3",
    "eltwise_param": "ELTWISE Eltwise operation: MAX",
    "threshold_param": "THRESHOLD Threshold threshold: 3",
    "dummy_data_param": "DUMMY_DATA DummyData num: 3",
    "accuracy_param": "ACCURACY Accuracy top_k: 3",
    "hinge_loss_param": "HINGE_LOSS HingeLoss norm: L2",
    "relu_param": "RELU ReLU negative_slope: 0.3",
    "slice_param": "SLICE Slice slice_dim: 3",
    "mvn_param": "MVN MVN across_channels: true",
    "transform_param": "DATA Data crop_size: 3",
    "tanh_param": "TANH TanH engine: CAFFE",
    "sigmoid_param": "SIGMOID Sigmoid engine: CAFFE",
    "softmax_param": "SOFTMAX Softmax engine: CAFFE",
    "contrastive_loss_param": "CONTRASTIVE_LOSS ContrastiveLoss margin: 3",
    "exp_param": "EXP Exp base: 3",
    "loss_param": "SOFTMAX_LOSS SoftmaxWithLoss ignore_label: 3",
    "interp_param": "INTERP Interp zoom_factor: 3",
    "dense_crf_param": "DENSE_CRF DenseCRF max_iter: 3",
    "seg_accuracy_param": "SEG_ACCURACY SegAccuracy ignore_label: 3",
    "multi_stage_meanfield_param": "MULTI_STAGE_MEANFIELD MultiStageMeanfield num_iterations: 3",
    "unpooling_param": "UNPOOLING Unpooling kernel_size: 3",
    "eltwise_accuracy_param": "ELTWISE_ACCURACY EltwiseAccuracy top_k: 3",
    "bn_param": "BN BN bn_mode: INFERENCE",
    "include": "RELU ReLU phase: TEST",
    "exclude": "RELU ReLU min_level: 3",
}
"""By the V1 layer's message a V1 type, its current name and a setting."""


@pytest.mark.parametrize("holder", V1_SETTINGS)
def test_every_v1_message_is_kept(holder: str) -> None:
    old, new, setting = V1_SETTINGS[holder].split(maxsplit=2)
    assert upgraded(f"layers {{ type: {old} {holder} {{ {setting} }} }}") == net(
        f'layer {{ type: "{new}" {holder} {{ {setting} }} }}'
    )


def test_the_v1_messages_are_all_there_are() -> None:
    fields = V1LayerParameter.DESCRIPTOR.fields
    renamed = {"layer", "blobs", "softmaxloss_param"}
    assert set(V1_SETTINGS) == {field.name for field in fields if field.message_type} - renamed


def test_fields_of_deeplab() -> None:
    old = "layers { type: SOFTMAX_LOSS strict_dim: false softmaxloss_param { ignore_label: 255 } }"
    new = 'layer { type: "SoftmaxWithLoss" strict_dim: false loss_param { ignore_label: 255 } }'
    assert upgraded(old) == net(new)
    old = "layers { type: IMAGE_SEG_DATA image_data_param { batch_size: 2 crop_size: 5 } }"
    new = 'layer { type: "ImageSegData" image_data_param { batch_size: 2 } transform_param { crop_size: 5 } }'
    assert upgraded(old) == net(new)


def test_the_crop_of_old_caffes_finds_its_offset() -> None:
    assert upgraded("layers { type: CROP }") == net('layer { type: "AutoCrop" }')


def test_bn_stats_batch_size_moves_to_the_layers() -> None:
    own = 'layer { type: "BatchNorm" batch_norm_param { stats_batch_size: %d } }'
    assert upgraded(f'bn_stats_batch_size: 4 layer {{ type: "BatchNorm" }} {own % 8} layer {{ type: "ReLU" }}') == net(
        own % 4 + own % 8 + 'layer { type: "ReLU" }'
    )


def test_fields_of_forks_without_effect_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    upgraded(
        'richness: 4 engine: "MKLDNN" multinode { model_parallel { layer_from: "a" } } '
        'layer { type: "ReLU" engine: "CAFFE" quantization_param { bw_params: 8 } } '
        'layer { type: "Convolution" convolution_param { conv_algorithm: "winograd" } }'
    )
    named = {record.args[1] for record in caplog.records if record.args and "has no effect" in record.msg}
    assert named == set(LOGGED)


def test_transform_fields_of_current_data_layers_stay_and_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    text = 'layer { name: "d" type: "Data" data_param { source: "s" mirror: true crop_size: 3 } }'
    assert upgraded(text) == net(text)
    assert (
        "layer 'd': crop_size, mirror of data_param has no effect, as in Caffe; move it to transform_param"
        in caplog.text
    )


def test_every_old_type_has_a_name() -> None:
    assert set(V1_TYPES) == set(V1LayerParameter.LayerType.values())
    assert set(V0_TYPES.values()) <= set(V1_TYPES)
    assert {name for name, _ in SETTINGS.items()} <= set(V0LayerParameter.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("name", "layer_type"),
    [
        ("CROP", "Crop"),
        ("UNPOOLING", "Unpooling"),
        ("WINDOW_SEG_DATA", "WindowSegData"),
        ("ELTWISE_ACCURACY", "EltwiseAccuracy"),
        ("BN", "BN"),
        ("PRELU", "PReLU"),
        ("ROI_POOLING", "ROIPooling"),
        ("SMOOTH_L1_LOSS", "SmoothL1Loss"),
        *(
            (V1LayerParameter.LayerType.Name(old), new)
            for old, new in V1_TYPES.items()
            if new in ("LRN", "ReLU", "TanH")
        ),
    ],
)
def test_old_types_of_forks_become_names_of_layer_types(name: str, layer_type: str) -> None:
    assert type_of_v1_name(name) == layer_type


def test_inputs_become_the_first_layer() -> None:
    old = 'input: "a" input: "b" input_shape { dim: 1 dim: 2 } input_shape { dim: 3 } layer { name: "x" }'
    assert upgraded(old) == net("""
      layer { name: "input" type: "Input" top: "a" top: "b" input_param { shape { dim: 1 dim: 2 } shape { dim: 3 } } }
      layer { name: "x" }
    """)


def test_inputs_without_shapes_are_dropped() -> None:
    assert upgraded('input: "data" layer { name: "x" }') == net('layer { name: "x" }')


def test_three_parameters_of_batch_norm_are_never_learned() -> None:
    result = upgraded('layer { type: "BatchNorm" param { name: "m" } param { lr_mult: 2 } param { } }')
    assert [(spec.name, spec.lr_mult, spec.decay_mult) for spec in result.layer[0].param] == [
        ("m", 0, 0),
        ("", 0, 0),
        ("", 0, 0),
    ]


def test_other_numbers_of_batch_norm_parameters_are_left_alone() -> None:
    text = 'layer { type: "BatchNorm" param { lr_mult: 2 } } layer { type: "Scale" param { } param { } param { } }'
    assert upgraded(text) == net(text)


@pytest.mark.parametrize("text", [V0_NET, V2_OF_V0_NET, "layers { type: DATA data_param { scale: 2 } }"])
def test_upgrading_twice_changes_nothing_more(text: str) -> None:
    once = upgraded(text)
    twice = NetParameter()
    twice.CopyFrom(once)
    upgrade_net(twice, "again")
    assert twice == once


def test_a_current_net_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "caffepy"):
        upgraded(V2_OF_V0_NET)
    assert not caplog.records


@pytest.mark.parametrize(("number", "name"), SOLVER_TYPES.items())
def test_the_solver_type_becomes_a_name(number: int, name: str) -> None:
    param = SolverParameter(solver_type=number)
    upgrade_solver(param, "s")
    assert param == SolverParameter(type=name)


def test_every_solver_type_has_a_name() -> None:
    assert set(SOLVER_TYPES) == set(SolverParameter.SolverType.values())


def test_a_solver_with_both_types_is_refused() -> None:
    with pytest.raises(ConfigError, match="s: both type and solver_type are given; keep type"):
        upgrade_solver(SolverParameter(type="SGD", solver_type=SolverParameter.ADAM), "s")


@pytest.mark.parametrize("field", ["net_param", "train_net_param", "test_net_param"])
def test_nets_inside_a_solver_are_upgraded(field: str) -> None:
    param = text_format.Parse(f'{field} {{ layers {{ name: "r" type: RELU }} }}', SolverParameter())
    upgrade_solver(param, "s")
    assert param == text_format.Parse(f'{field} {{ layer {{ name: "r" type: "ReLU" }} }}', SolverParameter())
