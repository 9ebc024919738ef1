"""Inputs that were written to do harm, by the format that reads them: each with what is said of it.

Faults were found by most of them. tests/unit/test_fuzz.py sees that each is told what it was told before; the fuzzing
program damages them too.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from caffepy.distributed.store.wire import Kind
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.proto.caffe_pb2 import (
    BlobProto,
    BlobShape,
    LayerParameter,
    NetParameter,
    SolverState,
    V1LayerParameter,
)
from caffepy.scaling.profile import FORMAT

Input = str | bytes | Callable[[], bytes]
Cases = list[tuple[Input, str]]
"""An input, or what makes it, and a pattern of the message; without a pattern it is read or refused."""


def all_alike(message: str, *inputs: Input) -> Cases:
    """Inputs of which the same is said."""
    return [(each, message) for each in inputs]


# -- texts -----------------------------------------------------------------------------------------------


def layer(text: str, message: str, shape: str = "dim: 2 dim: 3 dim: 8 dim: 8") -> tuple[str, str]:
    """A net that ends with this layer, which takes an image `x` and two labels `y`."""
    data = f'layer {{ name: "in" type: "DummyData" top: "x" top: "y" dummy_data_param {{ shape {{ {shape} }}'
    return f"{data} shape {{ dim: 2 }} }} }} {text}", message


def in_place(kind: str, bottoms: str, tops: str) -> tuple[str, str]:
    """A loss whose top is a bottom."""
    ip = 'layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param { num_output: 1 } }'
    loss = f'layer {{ name: "loss" type: "{kind}" {bottoms} {tops} }}'
    return layer(f"{ip} {loss}", rf"layer 'loss' \({kind}\): cannot work in place")


def many_axes(text: str, size: int) -> tuple[str, str]:
    """A shape whose number of elements has more digits than Python prints."""
    message = "(a shape of 500[0-9] axes is not possible: a blob has at most 32 axes|2 elements cannot take the shape)"
    return layer(f'layer {{ name: "l" top: "l" {text % (f"dim: {size} " * 5000)} }}', f"layer 'l' .*{message}")


def windows(settings: str, message: str, kind: str = "Convolution", **more: str) -> tuple[str, str]:
    """A convolution that would compute for minutes, or none."""
    settings = f"convolution_param {{ num_output: 4 {settings} }}"
    text = f'layer {{ name: "c" type: "{kind}" bottom: "x" top: "c" {settings} }}'
    return layer(text, rf"layer 'c' \({kind}\): .*{message}", **more)


def power(kind: str, settings: str) -> tuple[str, str]:
    """An exponent beyond the largest number."""
    text = f'layer {{ name: "e" type: "{kind}" bottom: "x" top: "e" {kind.lower()}_param {{ {settings} }} }}'
    return layer(text, rf"layer 'e' \({kind}\): base")


LONG = "a" * 10_000_000
BLOCK = "found a block where 'top' takes a value"
UNKNOWN = "unknown field 'zzz_param' of LayerParameter"
NETS: Cases = [
    in_place("SoftmaxWithLoss", 'bottom: "ip" bottom: "y"', 'top: "l" top: "y"'),
    in_place("EuclideanLoss", 'bottom: "y" bottom: "ip"', 'top: "y"'),
    in_place("Accuracy", 'bottom: "y" bottom: "ip"', 'top: "y"'),
    *(
        many_axes(text, size)
        for size in (1, 9)
        for text in (
            'type: "Input" input_param { shape { %s } }',
            'type: "DummyData" dummy_data_param { shape { %s } }',
            'type: "Parameter" parameter_param { shape { %s } }',
            'type: "Reshape" bottom: "y" reshape_param { shape { dim: 2 dim: 1 %s } }',
        )
    ),
    windows("kernel_size: 3 pad: 1", "the bottom has no channels", shape="dim: 2 dim: 0 dim: 8 dim: 8"),
    windows("kernel_size: 1000000 pad: 1000000", "kernel is .1000000, 1000000.; at most 16384 along an axis"),
    windows("kernel_h: 1000000 kernel_w: 1 pad_h: 500000", "kernel is .1000000, 1.; at most 16384"),
    windows("kernel_size: 9999 pad: 9999", "windows of an image 3 9999 9999 10008 10008"),
    windows("kernel_h: 16000 kernel_w: 1 pad_h: 100000 pad_w: 0", "windows of an image"),
    windows("kernel_size: 3 pad: 1000000 stride: 1000000", "padded image 3 2000008 2000008"),
    windows("kernel_size: 1 pad: 1000000", "shape .* is not possible"),
    windows("kernel_size: 2 stride: 1000000", "shape .* is not possible", "Deconvolution"),
    power("Exp", "base: 2 shift: 3e38"),
    power("Exp", "base: inf"),
    power("Log", "base: inf"),
    # each took minutes at a hundredth of its length where a regular expression tried each place in it
    (f'name: "{LONG}" x: 1', "unknown field 'x'"),
    (f'layer {{ name: "{LONG}" top {{ }} }}', BLOCK),
    ('layer { name: "x" top' + " " * 2_000_000 + "{ } }", BLOCK),
    ('layer { type: "X" zzz_param { } "' + '\\"' * 2_000_000, UNKNOWN),
    ('layer { type: "X" zzz_param { } ' + "'\\" * 2_000_000, UNKNOWN),
    ('name: "a"\nlayer { name: "' + "\\" * 200_000 + '" }', "prototxt:2: 1000 consecutive backslashes"),
    ("layer { " + "type: 'X' name: 'x' " * 1000 + "}", "field 'type' of LayerParameter is given twice"),
    ("input_dim: 0x" + "9" * 1_000_000, "a number is outside the range of its field"),
    ("input_dim: " + "9" * 1_000_000, "a whole number is expected"),
    ("layer { " * 100_000, "unknown field 'layer' of LayerParameter"),
]


def solver(settings: str, message: str) -> tuple[str, str]:
    """A solver with these settings."""
    return f'net: "n" max_iter: 10 base_lr: 0.1 {settings}', f"solver.prototxt: {message}"


def rate(policy: str, settings: str) -> tuple[str, str]:
    """A policy whose numbers leave what a double can hold."""
    text = f'net: "n" max_iter: 50 base_lr: 0.1 lr_policy: "{policy}" {settings}'
    return text, rf"lr_policy '{policy}' makes the learning rate of iteration \d+ inf"


ADAM = 'lr_policy: "fixed" type: "Adam"'
SOLVERS: Cases = [
    solver('lr_policy: "fixed" momentum: nan', "momentum is nan; it must be a finite number"),
    solver('lr_policy: "exp" gamma: inf', "gamma is inf; it must be a finite number"),
    solver(f"{ADAM} momentum: 1", "momentum is 1; with Adam it must be at least 0 and below 1"),
    solver(f"{ADAM} momentum2: 1", "momentum2 is 1; with Adam it must be at least 0 and below 1"),
    solver('lr_policy: "fixed" iter_size: 2000000000', "iter_size is 2000000000; it must be at most 65536"),
    solver('lr_policy: "fixed" momentum_power: -1', "momentum_power is -1; it must be at least 0"),
    solver('lr_policy: "fixed" weight_decay_power: -1', "weight_decay_power is -1; it must be at least 0"),
    solver('lr_policy: "fixed" snapshot_prefix: "a\\000b"', "snapshot_prefix has a NUL character"),
    rate("exp", "gamma: 1e30"),
    rate("step", "gamma: 1e30 stepsize: 1"),
    rate("inv", "gamma: 1e30 power: -30"),
    rate("poly", "power: -1"),
    # the search for several `device_id` passes each character once
    *all_alike(
        "solver.prototxt:1:", *(piece * 100_000 + " x: 1" for piece in ('\\"', "device_id: [", "device_id: 1 "))
    ),
]
HOSTS: Cases = [
    ("h slots=" + "9" * 4301, "hosts:1: host 'h' has 9+ slots; at most 1048576 are possible"),
    ("h:1048577", "hosts:1: host 'h' has 1048577 slots; at most 1048576 are possible"),
    ("-x slots=2", "hosts:1: '-x slots=2' begins with a dash"),
    *(
        (f"# hosts\n{line}\n", f"hosts:2: '{line}' is no host; write host, 'host slots=4' or host:4")
        for line in ("a b", "a slots=", "a slots=x", "a:", ":4", "a:4 slots=4")
    ),
]


def slurm(message: str, **variables: str) -> tuple[str, str]:
    """Variables of an allocation."""
    return json.dumps({"SLURM_JOB_ID": "1", **variables}), message


SLURM: Cases = [
    slurm("SLURM_JOB_NUM_NODES: 'many' is not a number from 1", SLURM_JOB_NUM_NODES="many"),
    slurm("SLURM_JOB_NUM_NODES: '9+' is not a number from 1", SLURM_JOB_NUM_NODES="9" * 4301),
    slurm("speaks of more than|is not a number", SLURM_NTASKS_PER_NODE="2(x99999999)"),
    slurm("speaks of more than 1048576 hosts", SLURM_NTASKS_PER_NODE="2(x1000000),2(x1000000)"),
    slurm(r"SLURM_JOB_CPUS_PER_NODE=4 oxen: is no list such as 4\(x2\),2", SLURM_JOB_CPUS_PER_NODE="4 oxen"),
    slurm("SLURM_CPUS_PER_TASK: '²' is not a number from 1", SLURM_CPUS_PER_TASK="²"),
]
PROFILE = {"format": FORMAT, "net": "n", "device": "CPU", "on_cpu": True, "batch": 1, "passes": 1, "iteration_ms": 1.0}
PROFILE |= {"update_ms": 0.1, "reduce_buckets": 1, "layer_wise_reduce": True, "layers": [], "gradients": []}
PROFILES: Cases = [
    ("[" * 100_000, "cannot be read as a profile: (maximum recursion depth|Stack overflow)"),
    ("9" * 5000, "cannot be read as a profile: Exceeds the limit"),
    (json.dumps(PROFILE | {"batch": 10**400}), "batch: is an integer beyond 2.128, must be a int of at least 1"),
    (json.dumps(PROFILE | {"iteration_ms": 1e300}), "iteration_ms: is 1e.300, must be a float .* at most 1e.15"),
    ("\0", "cannot be read as a profile"),
    *all_alike("make one with", "", "[]", "net: 'LeNet'", "{}"),
]
MEASUREMENTS: Cases = [
    *all_alike("allreduce.txt: lacks the number of devices", "", "size  time (us)\n4096  10\n"),
    ("# 4 devices\nsize  duration (us)\n4096  10\n", "allreduce.txt: lacks a header with columns for size and time"),
]
IMAGE_LISTS: Cases = [
    (b"good.png -1\n" + line, message)
    for line, message in (
        (b"a\0.png 1", r"':2: the line has a NUL character"),
        (b"a.png 2147483648", r"':2: '2147483648' is not a label"),
        (b"a.png " + b"9" * 5000, rf"':2: '{'9' * 40}' is not a label"),
        ("a.png \u0663".encode(), "is not a label; a line is a path, a space"),
    )
]

# -- images and means ------------------------------------------------------------------------------------


def png(height: int, width: int) -> bytes:
    """The begin of a grey PNG."""
    head = b"IHDR" + struct.pack(">2I5B", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + rows


JPEG = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xff\xc2\x00\x0b\x08" + struct.pack(">2H", 60000, 50000) + b"\x01\x01\x11\x00"
IMAGES: Cases = [
    (png(30000, 32000), "is an image of 30000 x 32000 pixels; the limit is 67108864"),
    (png(2**31, 1), "is an image of 2147483648 x 1 pixels; the limit is 67108864"),
    (JPEG, "is an image of 60000 x 50000 pixels; the limit is 67108864"),
    *all_alike(
        "that OpenCV cannot decode",
        *(JPEG[:9], JPEG[:14], b"\xff\xd8\xff", b"\x89PNG\r\n\x1a", b"\xff\xd8" + b"\xff" * 50),
    ),
]
RAW = BlobProto(shape=BlobShape(dim=[1, 1, 1]), raw_data=b"abcde", raw_data_type=caffe_pb2.FLOAT)
MEANS: Cases = [
    (RAW.SerializeToString(), "mean_file '.*/mean.binaryproto' has 5 bytes of raw_data, not a multiple of 4")
]


HEADER_OF_WINDOWS = "filename,xmin,ymin,xmax,ymax\n"
WINDOWS: Cases = [
    ("filename,xmin,ymin\na,1,2\n", r"have no column ymax, xmax; the first line must be filename,xmin,ymin,xmax"),
    ("", "have no column filename, ymin"),
    (HEADER_OF_WINDOWS, "has no line after its header"),
    (f"{HEADER_OF_WINDOWS}a,1,2,x,4\n", "line 2: ymin,xmin,ymax,xmax = 2,1,4,x are not four numbers"),
    (f"{HEADER_OF_WINDOWS}a,1,2\n", "line 2: .* are not four numbers"),
    (f"{HEADER_OF_WINDOWS}a,1,2,inf,4\n", "line 2: .* are not four numbers"),
]

# -- snapshots -------------------------------------------------------------------------------------------

BLOB = BlobProto(shape=BlobShape(dim=[2]), data=[1, 2])


def raw(kind: int, data: bytes, size: int = 1, values: tuple[float, ...] = ()) -> BlobProto:
    """A blob with raw data."""
    return BlobProto(shape=BlobShape(dim=[size]), data=values, raw_data_type=kind, raw_data=data)  # type: ignore[arg-type]


BLOBS = [
    (raw(caffe_pb2.BFLOAT16, b"1234", 2), "has raw_data of type BFLOAT16, which is not a type of blobs"),
    (raw(caffe_pb2.INT, b"1234"), "raw_data of type INT"),
    (raw(caffe_pb2.FLOAT, b"12345"), "end within a value"),
    (raw(caffe_pb2.FLOAT, b"12345678", 2, (1, 2)), "holds its values in several ways at once"),
    (BlobProto(shape=BlobShape(dim=[1] * 33), data=[1]), "has 33 axes, but blobs have at most 32"),
    (BlobProto(shape=BlobShape(dim=[2**62, 2**62])), "has the impossible shape"),
    (BlobProto(shape=BlobShape(dim=[2**40])), "has the impossible shape"),
    (BlobProto(shape=BlobShape(dim=[-2, -1]), data=[1, 2]), "has the impossible shape"),
    (BlobProto(num=2**31 - 1, channels=2**31 - 1, height=2, width=1, data=[1]), "has the impossible shape"),
]


def field(number: int, content: bytes) -> bytes:
    """A short length-delimited field on the wire."""
    tag = number << 3 | 2
    start = bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7])
    return start + bytes([len(content)]) + content


def weights(**fields: Any) -> bytes:
    """A binary NetParameter."""
    return NetParameter(**fields).SerializeToString()


def state(content: bytes = b"", **fields: Any) -> bytes:
    """A binary SolverState, and bytes that follow it."""
    return SolverState(**fields).SerializeToString() + content


OTHERS: Cases = [
    (b"", "it is empty, for example after an interrupted copy"),
    (b'layer { name: "x" }', r"it is text \('layer \{ name: \"x\" \}'\); give the binary file"),
    (b"version https://git-lfs.github.com/spec/v1\noid 1", "it is a Git LFS pointer; .*git lfs pull"),
    (gzip.compress(b"net", mtime=0), "it is packed with gzip; unpack it first, with gunzip"),
    (b"PK\x03\x04 and so on", "it is a zip archive; unpack it first, with unzip"),
    (bytes(range(256)), "it is truncated or of another format; copy it again"),
    (BLOB.SerializeToString(), "it is a single blob, such as a mean image"),
]
"""Files that are none of snapshots."""
WEIGHTS: Cases = [
    *OTHERS,
    *(
        (weights(**{key: [kind(name="ip", blobs=[blob])]}), f"x.caffemodel: layer 'ip' blob 0 .*{message}")
        for blob, message in BLOBS
        for key, kind in (("layer", LayerParameter), ("layers", V1LayerParameter))
    ),
    (field(100, field(1, b"\xff") + field(7, BLOB.SerializeToString())), "x.caffemodel: layer.name is not UTF-8"),
    # two or three bytes each; to look at them all would take minutes
    (b"\xa2\x06\x00" * 100_001, "x.caffemodel: has 100001 layers; the file is damaged"),
    (weights(layer=[{"blobs": [BlobProto()] * 1001}]), "x.caffemodel: has a layer of 1001 blobs; the file is"),
    (weights(layers=[{"name": "a"}], layer=[{"name": "b"}]), "x.caffemodel: "),
    (b" \n" * 20, r"not a binary NetParameter: it is text \(''\)"),
    (weights(layers=[{"name": "naem"}]).replace(b"naem", b"na\xe8m"), "layers.name is not UTF-8"),
]
UNTYPED = BlobProto(shape=BlobShape(dim=[2]), raw_data=b"12345678")
ONE = state(iter=1, history=[BLOB])
"""A whole state, to which fields are appended."""
STATES: Cases = [
    *OTHERS,
    *((state(iter=1, history=[blob]), f"x.solverstate: history 0 .*{message}") for blob, message in BLOBS),
    (
        state(iter=1, history=[BlobProto.FromString(UNTYPED.SerializeToString() + b"\x50\x4d")]),  # the type 77
        r"x.solverstate: history 0 holds 1 values where its shape \(2,\) needs 2",
    ),
    *(
        (ONE + content, f"x.solverstate: {message}")
        for content, message in (
            (field(2, b"\xff\xfe"), "learned_net is not UTF-8"),
            (field(2003, b"\xff\xfe"), "solver_type is not UTF-8"),
            (field(2000, field(1, b"\xff")), "data_position.layer is not UTF-8"),
            (state(current_step=-1), "current_step is -1, which is out of range"),
            (state(pass_number=2**64 - 1), "pass_number is 18446744073709551615"),
            (state(test_pass_number=[2**63]), "test_pass_number is 9223372036854775808"),
            (state(seed=2**63), "seed is 9223372036854775808, which is out of range"),
            (state(loss_scale=float("nan")), "loss_scale is nan"),
        )
    ),
    (state(iter=-5), "x.solverstate: iter is -5, which is out of range"),
    (state(b"\x1a\x00" * 100_001, iter=1), "x.solverstate: has 100001 history blobs; the file is damaged"),
    *(
        (state(iter=1, learned_net=name), "its weights .* do not exist, nor")
        for name in ("x" * 5000, "a\0b", "/dev/zero", "")
    ),
]

# -- HDF5 ------------------------------------------------------------------------------------------------

NUMBERS = np.arange(4, dtype=np.float32)
Making = Callable[[Any], Any]


def hdf5(make: Making) -> Callable[[], bytes]:
    """A file, to be made."""

    def made() -> bytes:
        buffer = io.BytesIO()
        with h5py.File(buffer, "w") as file:
            make(file)
        return buffer.getvalue()

    return made


def virtual(parent: Any, name: str = "0") -> None:
    """A dataset of another file's."""
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("/etc/passwd", "secret", (4,))
    parent.create_virtual_dataset(name, layout)


def many_names(parent: Any) -> None:
    """A hundred names of one dataset."""
    parent["0"] = np.zeros(1 << 18, np.float32)
    for index in range(1, 99):
        parent[str(index)] = parent["0"]


def doubling(file: Any) -> None:
    """Groups with 2^40 paths in a few kilobytes."""
    inner = file.create_group("data")
    for _ in range(40):
        deeper = inner.create_group("a")
        inner["b"] = deeper
        inner = deeper
    inner["0"] = NUMBERS


def created(*arguments: Any, **more: Any) -> Making:
    """What creates a dataset `0`."""
    return lambda parent: parent.create_dataset("0", *arguments, **more)


def put(**values: Any) -> Making:
    """What puts values into a group; `_0` is the name `0`."""
    return lambda parent: [parent.__setitem__(name.lstrip("_"), value) for name, value in values.items()]


PACKED: dict[str, Any] = {"compression": "gzip"}
ARRAYS: list[tuple[Making, str]] = [
    (created((4,), "f4", external=[("/etc/passwd", 0, 16)]), "external storage"),
    (put(_0=h5py.ExternalLink("/etc/passwd", "/secret")), "external link"),
    (virtual, "a virtual dataset"),
    (created((1 << 31,), "f4"), "would take 8589934592 bytes"),
    (created((1 << 31,), "f4", chunks=(1 << 20,), fillvalue=1, **PACKED), "would take 8589934592 bytes"),
    (
        lambda parent: created(data=np.zeros(1 << 25, np.float32), chunks=(1 << 22,), **PACKED)(parent),
        "would unpack a file of .* bytes to 1342177",
    ),
    (created((1,), "f4", maxshape=(None,), chunks=(1 << 29,)), "would take"),
    (many_names, "would take|would bring"),
    (put(_0="a string"), "blobs hold floats|which snapshots do not contain"),
    (put(_0=np.zeros(3, [("a", "f4"), ("b", "f4")])), "which snapshots do not contain"),
    (created((2,), h5py.vlen_dtype(np.float32)), "which snapshots do not contain"),
    (created((2,), h5py.ref_dtype), "which snapshots do not contain"),
    (put(_0=np.zeros(4, np.int8)), "has type int8; blobs hold floats"),
    (put(_0=h5py.Empty("f4")), "cannot be read"),
    (
        lambda parent: (created((1,) * 32, "f4")(parent), parent.create_dataset("1", (0,) + (1 << 40,) * 3, "f4")),
        "impossible shape|cannot be read",
    ),
]
"""Arrays that read other files or take far more memory than they have bytes, and those that are none of blobs."""


def within(group: str, make: Making, **fields: Any) -> Callable[[], bytes]:
    """A file with fields and something made in a group."""
    return hdf5(lambda file: (put(**fields)(file), make(file.create_group(group))))


def nested(file: Any) -> None:
    """Groups that are too deep."""
    for _ in range(2000):
        file = file.create_group("data" if file.name == "/" else "a")


ITER = np.array([3], np.int32)
WEIGHTS_HDF5: Cases = [
    *((within("data/ip", make), f"x.caffemodel.h5.*({message})") for make, message in ARRAYS),
    (
        hdf5(lambda file: (put(**{"data/ip/0": NUMBERS})(file), put(again=file["data"])(file["data/ip"]))),
        "x.caffemodel.h5.*the group 'data/ip/again' occurs twice",
    ),
    (
        hdf5(put(**{"data/ip/0": h5py.SoftLink("/data/ip/1"), "data/ip/1": h5py.SoftLink("/data/ip/0")})),
        "x.caffemodel.h5.*needs more than 16 soft links",
    ),
    (hdf5(doubling), "x.caffemodel.h5.*occurs twice"),
    (hdf5(nested), "x.caffemodel.h5.*nested too deeply"),
    (hdf5(put(data=NUMBERS)), "x.caffemodel.h5: is not a .caffemodel.h5 but another file"),
]
NO_BYTES = np.zeros(0, "S3")
STATES_HDF5: Cases = [
    *((within("history", make, iter=ITER), f"x.solverstate.h5.*({message})") for make, message in ARRAYS),
    *(
        (
            within("history", put(), **{"iter": ITER, name: value}),
            # no bytes are a message without fields, which is read
            "its weights . do not exist" if name == "caffepy" and value is NO_BYTES else "x.solverstate.h5",
        )
        for name in ("iter", "learned_net", "current_step", "caffepy")
        for value in (3.5, [1, 2], np.zeros(2, [("a", "f4")]), np.int64(2**40), b"\xff\xfe", NO_BYTES)
    ),
    (
        hdf5(lambda file: [file.create_group(name) for name in ("iter", "history")]),
        "x.solverstate.h5: is not a .solverstate.h5 but another file",
    ),
    (within("history", put(_0=NUMBERS, _2=NUMBERS), iter=ITER), "history 1 of 2 is missing; the file is damaged"),
]


def data_hdf5(make: Making, kind: str) -> tuple[Input, str]:
    """A file of HDF5Data, with labels."""
    return hdf5(lambda file: (put(label=NUMBERS)(file), make(file))), f"HDF5 file '.*/data.h5' cannot be read: .*{kind}"


def dataset(*arguments: Any, **more: Any) -> Making:
    """What creates the dataset `data`."""
    return lambda file: file.create_dataset("data", *arguments, **more)


DATA_HDF5: Cases = [
    data_hdf5(lambda file: virtual(file, "data"), "'/data' is a virtual dataset"),
    data_hdf5(put(data=h5py.ExternalLink("/etc/passwd", "x")), "it has an external link"),
    data_hdf5(
        put(**{"group/there": h5py.ExternalLink("/etc/passwd", "/"), "data": h5py.SoftLink("group/there/data")}),
        "it has an external link",
    ),
    data_hdf5(put(data=h5py.SoftLink("/data")), "more than 16 soft links"),
    data_hdf5(dataset((3,), "u1", external=[("/etc/passwd", 0, 3)]), "external storage"),
    data_hdf5(dataset((2**31 - 1,), "f4", chunks=(1 << 20,), **PACKED), "would take 8589934588 bytes"),
    data_hdf5(dataset((2**31 - 1,), "f4"), "would take 8589934588 bytes"),
    data_hdf5(
        dataset((5,), "f4", chunks=(1 << 25,), maxshape=(None,)),
        "would take 134217728 bytes, but the file has only 0 of it",
    ),
]

# -- ONNX ------------------------------------------------------------------------------------------------

X, Y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", (1, 4)), ("y", None)))


def model(nodes: list[Any], constants: list[TensorProto] | None = None, **changes: Any) -> ModelProto:
    """A model of one input and one output."""
    graph = helper.make_graph(nodes, "g", [changes.get("input", X)], [Y], constants or [])
    opsets = changes.get("opsets", [helper.make_opsetid("", 17)])
    made = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    helper.set_model_props(made, changes.get("props", {}))
    return made


def node(kind: str, inputs: str, output: str = "y", **attributes: Any) -> Any:
    """A node; inputs have commas between them."""
    return helper.make_node(kind, inputs.split(","), [output], name=f"n{output}", **attributes)


NEG = [node("Neg", "x")]


def constant(values: Any, name: str = "w", dtype: Any = np.int64, **changes: Any) -> TensorProto:
    """A tensor, of which fields are then changed."""
    made = numpy_helper.from_array(np.array(values, dtype), name)
    made.MergeFrom(TensorProto(**changes))
    return made


def tensor(message: str, **changes: Any) -> tuple[bytes, str]:
    """A product with a tensor that is not whole."""
    made = constant(np.ones((4, 3)), dtype=np.float32)
    if "dims" in changes:
        del made.dims[:]
    made.MergeFrom(TensorProto(**changes))
    return model([node("MatMul", "x,w")], [made]).SerializeToString(), message


def nodes(message: str, *made: Any) -> tuple[bytes, str]:
    """Nodes that ask for the impossible, of constants that help them."""
    numbers = {"huge": [2**40, 2**40], "huge2": [2**30, 2**30], "zero": 0, "million": 2**50, "step": 1}
    constants = [constant(values, name) for name, values in numbers.items()]
    constants.append(constant([[1.0] * 3] * 4, dtype=np.float32))
    return model(list(made), constants).SerializeToString(), message


def image_of(shape: tuple[Any, ...], kind: int = TensorProto.FLOAT) -> bytes:
    """A model whose input has a shape and a type."""
    return model(NEG, input=helper.make_tensor_value_info("x", kind, shape)).SerializeToString()


def described(param: str) -> bytes:
    """A model with a description of a layer that caffepy has not written."""
    text = json.dumps({"param": param, "inputs": ["x"], "outputs": ["y"], "parameters": []})
    return model(NEG, props={"caffepy.layer.evil": text}).SerializeToString()


CONSTANT = "it makes a constant of the shape"
ADD = node("Add", "x,c")
ONNX: Cases = [
    (b"\xff" * 40, "not an ONNX model, or damaged"),
    (b"", "has no graph with nodes"),
    nodes(
        "node 'na' depends on itself: the graph has a cycle",
        *(node("Add", "x,b", "a"), node("Neg", "a", "b"), node("Neg", "b")),
    ),
    nodes("the value 'y' is made more than once", *NEG, node("Abs", "x")),
    nodes("node 'ny' reads 'z', which nothing gives", node("Neg", "z")),
    nodes("output 'y' does not depend on the inputs", node("Neg", "x", "a")),
    (model(NEG, opsets=[]).SerializeToString(), "names no version of ONNX's operators"),
    (image_of((1, "C")), "input 'x' leaves axes open; give its shape with --shape"),
    (image_of((2**20, 2**20)), "at most 2147483647 elements"),
    (image_of((1, 4), TensorProto.STRING), "input 'x' is no tensor of floats"),
    tensor(r"tensor 'w' has not the values that its shape \[4, 30000\] needs", dims=[4, 30000]),
    tensor("tensor 'w' has the shape .* at most 2147483647 elements are read", dims=[2**31, 2**31]),
    tensor(r"tensor 'w' has the shape \[-4, -3\]", dims=[-4, -3]),
    tensor("tensor 'w' is of the type 8, which holds no numbers", data_type=TensorProto.STRING),
    tensor("tensor 'w' is of the type 77", data_type=77),
    nodes(CONSTANT, node("ConstantOfShape", "huge", "c"), ADD),
    nodes("'ny' .Expand.", node("Expand", "x,huge")),
    nodes(CONSTANT, node("Tile", "w,huge2", "c"), ADD),
    nodes(CONSTANT, node("Range", "zero,million,step", "c"), ADD),
    nodes("cannot be reshaped to", node("Reshape", "x,huge")),
    nodes("'ny' .Pad.", node("Pad", "x,huge2")),
    nodes("it resizes something else than an image", node("Resize", "x,,,huge")),
    nodes("axis 9 does not exist among 2", node("Softmax", "x", axis=9)),
    nodes(r"its perm \[0, 0\] does not name each", node("Transpose", "x", perm=[0, 0])),
    nodes("'ny' .If.: Caffe has no layer for it", node("If", "x")),
    nodes("its input 'x' is computed; only a constant can be imported", node("MatMul", "x,x")),
    nodes("its image has 0 spatial axes", node("MaxPool", "x", kernel_shape=[2, 2])),
    nodes("its image has 0 spatial axes", node("Conv", "x,w")),
    nodes("local_size is 4, but must be odd", node("LRN", "x", size=4)),
    nodes("its attribute transB is 'no', no whole number", node("Gemm", "x,w", transB="no")),
    nodes("its input 1 is missing", node("Gemm", "x")),
    nodes("its attribute alpha is 'much', no number", node("LeakyRelu", "x", alpha="much")),
    nodes("its attributes or constants do not fit|do not make up", node("Split", "x", split=[1.5, 2.5])),
    nodes("it divides by 0", node("Div", "step,zero", "c"), ADD),
    *all_alike(
        "its description (names the layer type|is no layer)",
        *(described('type: "Python" python_param { module: "os" layer: "x" }'), described('type: "HDF5Output"')),
        described("{"),
    ),
]

# -- what comes over sockets -----------------------------------------------------------------------------

GARBAGE = {
    "a letter": b"x",
    "an empty list": b"[]",
    "a line": b"\n",
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(range(190)),
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "NUL bytes": bytes(10000),
    "the longest length": b"\xff" * 600,
    "a length that is too short": b"\x00\x01" + bytes(33),
    "deep JSON": b"[" * 100000,
    "JSON of wrong types": json.dumps({"token": 1, "rank": [], "kind": None}).encode() + b"\n",
    "no UTF-8": b"\xc3\x28" * 100,
    "a forged proof": b"\x00\x60" + bytes(32) + b"\x01" + bytes(95),
    "its own greeting": b"caffepy1" + bytes(32),
    "the beginning of a header": b"\x00",
}
"""What strangers send to rank 0's port."""
HEADER = struct.Struct("!BHQdi")
MALFORMED = {
    "no kind": HEADER.pack(99, 0, 0, 0.0, 0),
    "no request": HEADER.pack(Kind.FAILURE, 0, 0, 0.0, 0),
    "the longest value": HEADER.pack(Kind.PUT, 0, 1 << 60, 0.0, 0),
    "a long key": HEADER.pack(Kind.PUT, 60000, 0, 0.0, 0),
    "endless seconds": HEADER.pack(Kind.TAKE, 0, 0, float("inf"), 0),
    "no number of seconds": HEADER.pack(Kind.TAKE, 0, 0, float("nan"), 0),
    "a key of no UTF-8": HEADER.pack(Kind.PUT, 2, 0, 0.0, 0) + b"\xc3\x28",
}
"""Frames of a rank that has joined."""
RECORDS = [
    b"",
    b"{",
    b"7",
    b"[7]",
    b"{}",
    b'{"rank": 1}',
    b'[{"rank": "x"}]',
    b'[{"rank": 1, "seconds": null}]',
    b'[{"rank": 1, "seconds": "1"}]',
    b'[{"rank": 1, "other": 1}]',
    b'[{"rank": 1, "host": "\\ud800"}]',
    b"[" * 100000,
    b"\xff",
]
"""Values of frames with records."""

HOSTILE: dict[str, Cases] = {
    "net prototxt": NETS,
    "solver prototxt": SOLVERS,
    "hostfile": HOSTS,
    "Slurm variables": SLURM,
    "plan profile": PROFILES,
    "measurements": MEASUREMENTS,
    "image list": IMAGE_LISTS,
    "PNG and JPEG": IMAGES,
    "mean binaryproto": MEANS,
    ".caffemodel": WEIGHTS,
    ".solverstate": STATES,
    ".caffemodel.h5": WEIGHTS_HDF5,
    ".solverstate.h5": STATES_HDF5,
    "HDF5 data": DATA_HDF5,
    "ONNX model": ONNX,
    "windows as CSV": WINDOWS,
    "handshake": all_alike(".", *GARBAGE.values()),
    "store frames": all_alike("", *MALFORMED.values()),  # the server refuses some of them later
    "control records": all_alike(".", *RECORDS),
}
LONGEST = 1 << 16
"""Bytes of those that are damaged."""


def content(given: Input) -> bytes:
    """What the target reads."""
    return given() if callable(given) else given.encode() if isinstance(given, str) else given
