"""Checks of a process that has registered fork.proto; test_schemas_registration.py runs this program beside the file.

Imports stand in functions: the schema is registered before anything reads it.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import caffepy

INPUT = 'layer { name: "d" type: "Input" top: "d" input_param { shape { dim: 1 dim: 2 dim: 4 dim: 4 } } }'
FOCAL = INPUT + 'layer { name: "f" type: "Blurred" bottom: "d" top: "f" note: "n" blurred_param { alpha: 0.5 } }'
OLD = 'input: "d" input_dim: [1, 1, 2, 2] layers { name: "f" type: BLURRED bottom: "d" top: "f" blurred_param { } }'


def pooling(method: str, more: str = "") -> str:
    settings = f"pooling_param {{ pool: {method} kernel_size: 2 }}"
    return f'{INPUT} layer {{ name: "p" type: "Pooling" bottom: "d" top: "p" {more} {settings} }}'


def check_modules() -> None:
    import caffe
    from caffe.proto import caffe_pb2
    from google.protobuf import descriptor_pool

    from caffepy.formats.proto import caffe_pb2 as own

    assert caffe_pb2 is own is caffe.proto.caffe_pb2
    assert own.DESCRIPTOR.pool is not descriptor_pool.Default()
    assert not own.SolverParameter().test_initialization
    assert own.PoolingParameter.MEDIAN == own.PoolingParameter.PoolMethod.Value("MEDIAN") == 2


def said_about(text: str) -> str:
    """The error of a net's text; empty if the net can be built."""
    import caffe

    Path("x.prototxt").write_text(text)
    try:
        caffe.Net("x.prototxt", caffe.TEST)
    except Exception as error:
        return str(error)
    return ""


def check_texts() -> None:
    from caffepy.errors import ConfigError
    from caffepy.formats.load import read_solver

    assert said_about(pooling("MAX")) == said_about(pooling("STOCHASTIC")) == ""
    assert said_about(FOCAL) == said_about(OLD) == ""
    assert said_about(pooling("MAX", "rank: 3")) == ""  # its default
    said = said_about(pooling("MEDIAN"))
    assert "layer 'p' (Pooling): MEDIAN, the value of pool, is of fork.proto, and caffepy does not know it" in said, (
        said
    )
    said = said_about(pooling("MAX", 'note: "n"'))
    assert "layer 'p' (Pooling): note of LayerParameter is a field of fork.proto that caffepy does not" in said, said
    assert 'register_layer("Pooling", cls, replace=True)' in said, said
    said = said_about(f'owner: "me" {INPUT}')
    assert "owner of NetParameter is a field of fork.proto that caffepy does not know; leave it out" in said, said
    Path("s.prototxt").write_text("wobble: 1")
    try:
        read_solver("s.prototxt")
    except ConfigError as error:
        assert "wobble of SolverParameter is a field of fork.proto" in str(error)
    else:
        raise AssertionError("the solver's field was accepted")


def check_binary_files() -> None:
    import caffe
    from caffe.proto import caffe_pb2

    layer = caffe_pb2.LayerParameter(name="f", blurred_param={"alpha": 2})
    assert b"\xd2\x06\x05\x0d" in layer.SerializeToString()  # field 106, which caffepy uses for another message
    assert layer.DESCRIPTOR.fields_by_name["convolution_param"].number >= 100_000
    assert pickle.loads(pickle.dumps(layer)) == layer
    Path("x.prototxt").write_text(FOCAL)
    net = caffe.Net("x.prototxt", caffe.TEST)
    net.blobs["d"].data[...] = 4
    assert (net.forward()["f"] == 2).all()
    net.save("f.caffemodel")
    read = caffe_pb2.NetParameter.FromString(Path("f.caffemodel").read_bytes())
    assert [(layer.type, layer.blurred_param.alpha) for layer in read.layer][1] == ("Blurred", 0.5)
    net.copy_from("f.caffemodel")


def check_scripts() -> None:
    import caffe

    n = caffe.NetSpec()
    n.d = caffe.layers.Input(shape={"dim": [1, 2]})
    n.f = caffe.layers.Blurred(n.d, alpha=3)
    assert n.to_proto().layer[1].blurred_param.alpha == 3


def check_children() -> None:
    assert os.environ["CAFFEPY_PROTO"] == os.path.abspath("fork.proto")
    program = "from caffepy.formats.proto.caffe_pb2 import LayerParameter as L; print(L().blurred_param.alpha)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "0.25\n"


def check_other_schemas() -> None:
    from caffepy.errors import ConfigError

    caffepy.register_proto("./fork.proto")
    try:
        caffepy.register_proto("other.proto")
    except ConfigError as error:
        assert "this process already has the schema" in str(error)
    else:
        raise AssertionError("a second schema was registered")


if __name__ == "__main__":
    caffepy.register_proto("fork.proto")
    importlib.import_module("caffepy.as_caffe").install(force=True)
    importlib.import_module("focal")
    for check in (check_modules, check_texts, check_binary_files, check_scripts, check_children, check_other_schemas):
        check()
        sys.stdout.write(f"{check.__name__} passed\n")
