"""Nets of a single layer for every type, to be run on any backend: eagerly, captured and in half precision."""

from __future__ import annotations

from typing import Any

from field_cases import CASES, FORMS, Case, add_inputs, values_of
from google.protobuf import text_format

from caffepy.backend import Backend
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net import Net

ELSEWHERE = {
    "BoxData": "gpu/test_data_layers_gpu.py",
    "Cast": "gpu/test_layers_gpu.py",
    "DenseImageData": "unit/forks/segmentation/test_dense_labels.py",
    "CustomData": "unit/forks/pose/test_custom_data.py",
    "HDF5Data": "gpu/test_data_layers_gpu.py",
    "HDF5Output": "unit/layers/input/test_arrays.py",
    "ImageLabelmapData": "unit/forks/segmentation/test_dense_labels.py",
    "ImageSegData": "unit/forks/segmentation/test_dense_labels.py",
    "MemoryData": "unit/layers/input/test_arrays.py",
    "Python": "gpu/test_solvers_gpu.py",
    "CPMData": "unit/forks/pose/test_people_data.py",
    "OPData": "unit/forks/pose/test_people_data.py",
    "SegData": "unit/forks/segmentation/test_dense_labels.py",
    "VideoSegmentationData": "unit/layers/input/test_video_clips.py",
    "VideoWithVoxelTruthData": "unit/layers/input/test_video_clips.py",
    "VideoData": "gpu/test_data_layers_gpu.py",
    "WindowData": "gpu/test_data_layers_gpu.py",
}
"""The GPU tests of types that need files, a program's arrays or a user's class."""


def type_of(one: Case) -> str:
    """The case's layer type."""
    return text_format.Parse(one.layer, caffe_pb2.LayerParameter()).type


def own_cases() -> list[Case]:
    """Every case's layer without its changes, each once."""
    seen = {}
    for one in (*CASES, *FORMS):
        if "source:" not in one.layer:
            seen.setdefault((one.layer, one.bottoms, one.phase, one.tops), one)
    return list(seen.values())


def build_case(backend: Backend, one: Case, kind: str) -> Net:
    """The case's net with its inputs, after a first forward pass; the tops' gradients are theirs as weights of 1.

    Args:
        backend: where it runs.
        one: the case.
        kind: of the blobs: FLOAT, FLOAT16 or BFLOAT16.
    """
    layer = text_format.Parse(one.layer, caffe_pb2.LayerParameter(name="L"))
    net = caffe_pb2.NetParameter(force_backward=True)
    net.default_forward_type = net.default_backward_type = caffe_pb2.Type.Value(kind)
    inputs = add_inputs(net, layer, one)
    net.layer.append(layer)
    made_net = Net(net, LayerContext(backend, phase=one.phase, seed=1))
    for index, text in enumerate(inputs):
        backend.from_host(values_of(text, index), made_net.blobs[f"b{index}"].data)
    made_net.forward()
    return made_net


def pass_once(net: Net) -> None:
    """Forward, and backward where there is such a thing."""
    net.clear_param_diffs()
    net.forward()
    if net.layers[net.layer_names.index("L")].has_backward:
        net.backward()


def results(net: Net) -> dict[str, Any]:
    """The tops, and the gradients of the parameters that are learned and of the bottoms that have one."""
    node = next(node for node in net.nodes if node.layer.name == "L")
    layer = node.layer
    found = {name: blob.host_data() for name, blob in net.blobs.items() if name.startswith("t")}
    if not layer.has_backward:
        return found
    for index, blob in enumerate(layer.blobs):
        if layer.propagate_to_params[index]:
            found[f"gradient of parameter {index}"] = blob.host_diff()
    for index, wanted in enumerate(node.propagate_down):
        if wanted:
            found[f"gradient of b{index}"] = net.blobs[f"b{index}"].host_diff()
    return found
