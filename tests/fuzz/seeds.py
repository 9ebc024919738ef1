"""Whole inputs of every format, from which the damaged ones are made; built once for each run."""

from __future__ import annotations

import gzip
import json
import struct
from dataclasses import asdict
from pathlib import Path

import numpy as np
from google.protobuf import text_format

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.formats.load import read_net, read_solver
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net import Net

ROOT = Path(__file__).parents[2]

DATA = """
layer { name: "in" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 2 dim: 4 dim: 6 dim: 6 } shape { dim: 2 }
  data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 } } }
"""
END = """
layer { name: "ip" type: "InnerProduct" bottom: "%s" top: "ip" inner_product_param { num_output: 3
  weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
BODIES = {
    "conv": """
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" param { lr_mult: 1 } param { lr_mult: 2 }
  convolution_param { num_output: 4 kernel_size: 3 stride: 1 pad: 1 group: 2 dilation: 1
    weight_filler { type: "msra" } bias_filler { type: "constant" value: 0.1 } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" relu_param { negative_slope: 0.1 } }""",
    "up": """
layer { name: "up" type: "Deconvolution" bottom: "data" top: "up" convolution_param { num_output: 2 kernel_h: 2
  kernel_w: 3 stride_h: 2 stride_w: 1 pad_h: 1 pad_w: 0 axis: 1 weight_filler { type: "bilinear" } } }""",
    "pool": """
layer { name: "pool" type: "Pooling" bottom: "data" top: "pool"
  pooling_param { pool: MAX kernel_size: 3 stride: 2 pad: 1 round_mode: CEIL } }""",
    "norm": """
layer { name: "norm" type: "LRN" bottom: "data" top: "norm"
  lrn_param { local_size: 3 alpha: 0.1 beta: 0.75 k: 1 norm_region: ACROSS_CHANNELS } }""",
    "bn": """
layer { name: "bn" type: "BatchNorm" bottom: "data" top: "bn"
  batch_norm_param { eps: 1e-5 moving_average_fraction: 0.9 } }
layer { name: "scale" type: "Scale" bottom: "bn" top: "bn"
  scale_param { axis: 1 num_axes: 1 bias_term: true filler { value: 1 } } }""",
    "cat": """
layer { name: "cut" type: "Slice" bottom: "data" top: "a" top: "b" slice_param { axis: 1 slice_point: 2 } }
layer { name: "cat" type: "Concat" bottom: "a" bottom: "b" top: "cat" concat_param { axis: 1 } }""",
    "sum": """
layer { name: "drop" type: "Dropout" bottom: "data" top: "d" dropout_param { dropout_ratio: 0.5 } }
layer { name: "sum" type: "Eltwise" bottom: "data" bottom: "d" top: "sum"
  eltwise_param { operation: SUM coeff: 1 coeff: -1 } }""",
    "re": """
layer { name: "re" type: "Reshape" bottom: "data" top: "re"
  reshape_param { shape { dim: 0 dim: -1 } axis: 0 num_axes: -1 } }
layer { name: "p" type: "Power" bottom: "re" top: "re" power_param { power: 2 scale: 0.1 shift: 1 } }""",
    "thresh": """
layer { name: "log" type: "Log" bottom: "data" top: "log" log_param { base: 2 scale: 0.1 shift: 9 } }
layer { name: "elu" type: "ELU" bottom: "log" top: "elu" elu_param { alpha: 1 } }
layer { name: "prelu" type: "PReLU" bottom: "elu" top: "prelu" prelu_param { channel_shared: false } }
layer { name: "swish" type: "Swish" bottom: "prelu" top: "swish" swish_param { beta: 1 } }
layer { name: "clip" type: "Clip" bottom: "swish" top: "clip" clip_param { min: -1 max: 1 } }
layer { name: "bias" type: "Bias" bottom: "clip" top: "bias" bias_param { axis: 1 num_axes: 1 } }
layer { name: "tanh" type: "TanH" bottom: "bias" top: "bias" }
layer { name: "thresh" type: "Threshold" bottom: "bias" top: "thresh" threshold_param { threshold: 0.1 } }""",
    "within": """
layer { name: "within" type: "LRN" bottom: "data" top: "within"
  lrn_param { local_size: 3 norm_region: WITHIN_CHANNEL } }
layer { name: "sig" type: "Sigmoid" bottom: "within" top: "sig" }
layer { name: "soft" type: "Softmax" bottom: "sig" top: "soft" softmax_param { axis: 1 } }
layer { name: "other" type: "EuclideanLoss" bottom: "soft" bottom: "data" top: "other" loss_weight: 0.5 }
layer { name: "cross" type: "SigmoidCrossEntropyLoss" bottom: "sig" bottom: "data" top: "cross"
  loss_param { normalization: VALID ignore_label: 3 } }""",
    "flat": """
layer { name: "flat" type: "Flatten" bottom: "data" top: "flat" flatten_param { axis: 1 end_axis: -1 } }
layer { name: "e" type: "Exp" bottom: "flat" top: "flat" exp_param { base: 2 scale: 0.1 shift: 0 } }
layer { name: "acc" type: "Accuracy" bottom: "flat" bottom: "label" top: "acc" top: "each"
  accuracy_param { top_k: 2 axis: 1 ignore_label: 7 } include { phase: TEST stage: "x" min_level: 1 } }""",
}
"""Layers between `DATA` and `END`, by the blob that they make."""
V1 = """
name: "v1" input: "data" input_dim: 2 input_dim: 3 input_dim: 8 input_dim: 8 force_backward: true
layers { name: "conv" type: CONVOLUTION bottom: "data" top: "conv" blobs_lr: 1 blobs_lr: 2 weight_decay: 1
  convolution_param { num_output: 4 kernel_size: 3 } }
layers { name: "relu" type: RELU bottom: "conv" top: "conv" }
layers { name: "pool" type: POOLING bottom: "conv" top: "pool" pooling_param { pool: AVE kernel_size: 2 stride: 2 } }
layers { name: "prob" type: SOFTMAX bottom: "pool" top: "prob" include { phase: TEST } }
"""
V0 = """
name: "v0" input: "data" input_dim: 2 input_dim: 3 input_dim: 8 input_dim: 8
layers { layer { name: "pad" type: "padding" pad: 1 } bottom: "data" top: "padded" }
layers { layer { name: "conv" type: "conv" num_output: 4 kernelsize: 3 stride: 2 biasterm: false group: 1
  weight_filler { type: "gaussian" std: 0.01 } blobs_lr: 1. weight_decay: 1. } bottom: "padded" top: "conv" }
layers { layer { name: "pool" type: "pool" pool: MAX kernelsize: 2 stride: 2 } bottom: "conv" top: "pool" }
layers { layer { name: "ip" type: "innerproduct" num_output: 3 } bottom: "pool" top: "ip" }
layers { layer { name: "drop" type: "dropout" dropout_ratio: 0.5 } bottom: "ip" top: "ip" }
"""
SOLVERS = tuple(
    f'net_param {{ {DATA.strip()} }} base_lr: 0.01 max_iter: 20 display: 1 snapshot_prefix: "x" random_seed: 1 {more}'
    for more in (
        'lr_policy: "fixed" momentum: 0.9 weight_decay: 0.001 clip_gradients: 5',
        'lr_policy: "step" gamma: 0.1 stepsize: 5 type: "Adam" momentum: 0.9 momentum2: 0.999 delta: 1e-8',
        'lr_policy: "inv" gamma: 0.1 power: 0.75 type: "Nesterov" regularization_type: "L1" iter_size: 2',
        'lr_policy: "multistep" gamma: 0.5 stepvalue: 3 stepvalue: 9 type: "AdaDelta" delta: 1e-6 average_loss: 3',
        'lr_policy: "poly" power: 2 momentum_policy: "poly" max_momentum: 0.95 momentum_power: 1 rampup_interval: 4',
        'lr_policy: "sigmoid" gamma: -0.1 stepsize: 10 type: "RMSProp" rms_decay: 0.9 test_iter: 1 test_interval: 5',
        'lr_policy: "exp" gamma: 0.99 solver_type: ADAGRAD weight_decay_policy: "poly" max_weight_decay: 0.1',
    )
)


FORK = """
syntax = "proto2"; package caffe; import "other.proto"; option optimize_for = SPEED;
message LayerParameter { reserved 4, 7 to 9; optional string name = 1; repeated Focal.Way ways = 145 [packed = true];
  optional Focal focal_param = 106; extensions 1000 to max; oneof kind { float f = 150; .caffe.Kind k = 151; } }
message Focal { enum Way { A = 0; B = -1; } optional Way way = 0x2 [default = B, deprecated = true];
  optional double alpha = 3 [default = .25]; optional string s = 4 [default = "a\\n\\x41" 'b']; /* more */ }
enum Kind { option allow_alias = true; MAX = 0; MORE = 0; }
message PoolingParameter { enum PoolMethod { MAX = 1; AVE = 0; MEDIAN = 2; } repeated uint32 pad = 4; }
message V1LayerParameter { enum LayerType { CONCAT = 4; FOCAL = 3; } optional Focal focal_param = 900; }
service S { rpc F (Focal) returns (Focal); } extend Focal { optional int32 x = 1000; }
"""


def nets() -> list[str]:
    """Texts of current nets that train, small ones with most layer types and those of `models`."""
    small = [f'name: "{top}" {DATA} {body} {END % top}' for top, body in BODIES.items()]
    return [*small, (ROOT / "models/lenet/train_test.prototxt").read_text()]


def solvers() -> list[str]:
    """Texts of solvers of every type and policy."""
    return [*SOLVERS, (ROOT / "models/lenet/solver.prototxt").read_text()]


def schemas() -> list[str]:
    """Parts of caffepy's own schema, and a fork's."""
    messages = (ROOT / "proto/caffe.proto").read_text().split("\nmessage ")[1:]
    named = {text.split(" ", 1)[0]: f"message {text}" for text in messages}
    return [*(named[name] for name in ("PoolingParameter", "BlobProto", "NetStateRule", "ParamSpec")), FORK]


def net_message(text: str) -> caffe_pb2.NetParameter:
    """A net's message, not upgraded."""
    return text_format.Parse(text, caffe_pb2.NetParameter())


def small_net() -> Net:
    """The net that weights are loaded into, on the CPU."""
    path = ROOT / "tests/golden/formats/net.prototxt"
    return Net(read_net(path), LayerContext(CpuBackend(1), resolve=PathResolver(path)))


def old_weights() -> list[bytes]:
    """Weights in V1's and V0's binary formats, which began alike."""
    found = []
    for text in (V1, V0):
        net = net_message(text)
        for layer in net.layers:
            layer.blobs.add(num=1, channels=1, height=2, width=2, data=[1, 2, 3, 4])
        found.append(net.SerializeToString())
    return found


def golden(*names: str) -> list[bytes]:
    """Files of tests/golden/formats."""
    return [(ROOT / "tests/golden/formats" / name).read_bytes() for name in names]


SNAPSHOTS = """
base_lr: 0.1 momentum: 0.9 lr_policy: "fixed" max_iter: 1000000 display: 0 snapshot_after_train: false random_seed: 1
solver_mode: CPU test_iter: 1 test_interval: 1000000 test_initialization: false average_loss: 3 type: "Adam"
snapshot_prefix: "%s" snapshot_format: %s net_param {
layer { name: "in" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 2 dim: 3 } shape { dim: 2 }
  data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 } } }
layer { name: "a/b" type: "InnerProduct" bottom: "data" top: "a" inner_product_param { num_output: 3
  weight_filler { type: "xavier" } } }
layer { name: "norm" type: "BatchNorm" bottom: "a" top: "norm" param { lr_mult: 0 } param { lr_mult: 0 }
  param { lr_mult: 0 } }
layer { name: "drop" type: "Dropout" bottom: "norm" top: "drop" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "drop" bottom: "label" top: "loss" } }
"""
"""A solver whose snapshots have most fields; to be given a prefix and a format."""


def snapshot_solver(folder: Path, form: str = "BINARYPROTO") -> caffe_pb2.SolverParameter:
    """The solver that `snapshots` is of."""
    path = folder / "snapshots.prototxt"
    path.write_text(SNAPSHOTS % (folder / "x", form))
    return read_solver(path)


def snapshots(folder: Path) -> dict[str, bytes]:
    """Snapshots as caffepy writes them, by the ending of their names; those in binary stay in the folder."""
    from caffepy.training.solver import create_solver

    found = {}
    for form, ending in (("HDF5", ".h5"), ("BINARYPROTO", "")):
        backend = CpuBackend(1)
        with backend.activate():
            solver = create_solver(snapshot_solver(folder, form), backend)
            solver.step(2)
            state = solver.snapshot()
            solver.close()
        for kind in ("caffemodel", "solverstate"):
            path = state.with_name(f"x_iter_2.{kind}{ending}")
            found[f"{kind}{ending}"] = path.read_bytes()
            if ending:
                path.unlink()
    return found


def datum() -> list[caffe_pb2.Datum]:
    """Records as bytes, floats and an encoded image."""
    plain = caffe_pb2.Datum(channels=3, height=4, width=5, data=bytes(range(60)), label=3)
    floats = caffe_pb2.Datum(channels=1, height=2, width=2, float_data=[1, 2, 3, 4], label=1)
    return [plain, floats, caffe_pb2.Datum(encoded=True, data=images()[0], label=2)]


def images() -> list[bytes]:
    """PNG and JPEG files, in colour and grey."""
    import cv2

    colour = np.arange(8 * 9 * 3, dtype=np.uint8).reshape(8, 9, 3)
    pictures = (("png", colour), ("png", colour[:, :, 0]), ("jpg", colour), ("jpg", colour[:, :, 0]))
    return [bytes(cv2.imencode(f".{kind}", picture)[1]) for kind, picture in pictures]


def lmdbs(folder: Path) -> list[tuple[Path, int]]:
    """Files data.mdb and their numbers of records: records within a page, a tree of three levels, overflow pages."""
    import lmdb

    found, rng = [], np.random.default_rng(1)
    for number, (count, side, key) in enumerate(((300, 5, b"%08d"), (90, 5, b"%0500d"), (40, 50, b"%08d"))):
        where = folder / f"seed{number}"
        with lmdb.open(str(where), map_size=1 << 22) as environment, environment.begin(write=True) as transaction:
            for at in range(count):
                record = caffe_pb2.Datum(channels=1, height=side, width=side, data=rng.bytes(side * side), label=at)
                transaction.put(key % at, record.SerializeToString())
        found.append((where / "data.mdb", count))
    return found


def idx() -> list[bytes]:
    """MNIST's files, of images and of labels, plain and packed."""
    pictures = struct.pack(">IIII", 2051, 3, 28, 28) + bytes(3 * 28 * 28)
    labels = struct.pack(">II", 2049, 3) + bytes([1, 2, 3])
    return [pictures, labels, gzip.compress(pictures), gzip.compress(labels)]


def profile() -> str:
    """A plan's profile."""
    from caffepy.scaling.profile import FORMAT, Gradient, LayerProfile, Profile

    layers = (LayerProfile("a", 1.0, 2.0), LayerProfile("b", 0.5, 1.0))
    made = Profile("net", "CPU", True, 8, 1, 5.0, 0.1, 2, True, layers, (Gradient(1, 400), Gradient(0, 800)))
    return json.dumps({"format": FORMAT, **asdict(made)}, indent=1)
