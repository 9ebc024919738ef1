"""extract_features on a GPU writes what it writes on the CPU."""

from __future__ import annotations

from pathlib import Path

import lmdb
import numpy as np
import pytest

from caffepy.cli.main import main
from caffepy.data.sources.databases import record_key, write_datums
from caffepy.formats.proto.caffe_pb2 import Datum, NetParameter

pytestmark = pytest.mark.gpu

NET = """
layer { name: "data" type: "Data" top: "data" top: "label" data_param { source: "db" batch_size: 4 backend: LMDB } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 5 } }
layer { name: "relu" type: "ReLU" bottom: "ip" top: "relu" }
"""


def features(path: str) -> np.ndarray:
    with lmdb.open(path, readonly=True, lock=False) as environment, environment.begin() as transaction:
        return np.array([Datum.FromString(record).float_data for _, record in transaction.cursor()])


def test_features_of_a_gpu_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (8, 3 * 4 * 4), np.uint8)
    records = (Datum(channels=3, height=4, width=4, data=image.tobytes(), label=0) for image in images)
    write_datums(Path("db"), ((record_key(number), datum) for number, datum in enumerate(records)))
    weights = NetParameter()
    layer = weights.layer.add(name="ip", type="InnerProduct")
    layer.blobs.add(data=rng.normal(0, 0.01, 5 * 48)).shape.dim.extend((5, 48))
    layer.blobs.add(data=[0.5] * 5).shape.dim.append(5)
    Path("net.caffemodel").write_bytes(weights.SerializeToString())
    Path("net.prototxt").write_text(NET)
    for device, options in (("CPU", []), ("GPU", ["0", "--math", "fp32"])):
        databases = f"{device}_ip,{device}_relu"
        arguments = ["net.caffemodel", "net.prototxt", "ip,relu", databases, "2", "lmdb", device, *options]
        assert main(["extract_features", *arguments]) == 0
    for name in ("ip", "relu"):
        np.testing.assert_allclose(features(f"GPU_{name}"), features(f"CPU_{name}"), rtol=1e-4, atol=1e-4)
