"""Small nets for face recognition learn made-up identities and tell others apart that they have not seen."""

from __future__ import annotations

from pathlib import Path

import lmdb
import numpy as np
import pytest
from training import build_solver

from caffepy.formats.proto import caffe_pb2
from caffepy.training.solver import Solver

SIZE, LATENT, PERSONS, STRANGERS = 16, 6, 16, 12
"""Pixels of a side, numbers that make an identity, identities of the training, identities of the verification."""
SOLVER = """
base_lr: 0.02 momentum: 0.9 weight_decay: 0.0005 lr_policy: "multistep" gamma: 0.1 stepvalue: 200
max_iter: 250 random_seed: 3 snapshot_after_train: false
"""
BODY = """
layer { name: "data" type: "Data" top: "data" top: "label" data_param { source: "SOURCE" batch_size: 32 backend: LMDB }
  transform_param { mean_value: 128 scale: 0.0078125 } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 16 kernel_size: 3 stride: 2 pad: 1 weight_filler { type: "msra" } } }
layer { name: "relu1" type: "PReLU" bottom: "conv1" top: "conv1" }
layer { name: "conv2" type: "Convolution" bottom: "conv1" top: "conv2"
  convolution_param { num_output: 32 kernel_size: 3 stride: 2 pad: 1 weight_filler { type: "msra" } } }
layer { name: "relu2" type: "PReLU" bottom: "conv2" top: "conv2" }
layer { name: "fc5" type: "InnerProduct" bottom: "conv2" top: "fc5"
  inner_product_param { num_output: 16 weight_filler { type: "xavier" } } }
"""
HEADS = {
    "sphereface": """
layer { name: "fc6" type: "MarginInnerProduct" bottom: "fc5" bottom: "label" top: "scores" top: "lambda"
  margin_inner_product_param { num_output: 16 type: QUADRUPLE weight_filler { type: "xavier" }
    base: 100 gamma: 0.2 power: 1 lambda_min: 5 } }
layer { name: "silence" type: "Silence" bottom: "lambda" }
""",
    "center": """
layer { name: "fc6" type: "InnerProduct" bottom: "fc5" top: "scores"
  inner_product_param { num_output: 16 weight_filler { type: "xavier" } } }
layer { name: "center" type: "CenterLoss" bottom: "fc5" bottom: "label" top: "center" loss_weight: 0.02
  param { lr_mult: 10 decay_mult: 0 } center_loss_param { num_output: 16 center_filler { type: "xavier" } } }
""",
    "amsoftmax": """
layer { name: "norm1" type: "Normalize" bottom: "fc5" top: "norm1" normalize_param { } }
layer { name: "fc6" type: "InnerProduct" bottom: "norm1" top: "fc6"
  inner_product_param { num_output: 16 normalize: true bias_term: false weight_filler { type: "xavier" } } }
layer { name: "margin" type: "LabelSpecificAdd" bottom: "fc6" bottom: "label" top: "margin"
  label_specific_add_param { bias: -0.2 } }
layer { name: "scale" type: "Scale" bottom: "margin" top: "scores" param { lr_mult: 0 }
  scale_param { filler { value: 15 } } }
""",
}
LOSS = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "scores" bottom: "label" top: "loss" }'


def faces(identities: np.ndarray, each: int, rng: np.random.Generator) -> np.ndarray:
    """Images (persons, each, H, W) of patterns that an identity weights, in changing light and with noise; uint8."""
    places = np.linspace(0, 1, SIZE)
    waves = [np.outer(np.cos(np.pi * a * places), np.cos(np.pi * b * places)) for a in range(4) for b in range(4)]
    patterns = np.tensordot(np.random.default_rng(5).normal(size=(LATENT, 16)), np.array(waves), 1)
    clean = np.tanh(np.tensordot(identities, patterns, 1) / 3)[:, None]
    shape = (len(identities), each, SIZE, SIZE)
    light = rng.uniform(-60, 60, (*shape[:2], 1, 1)) * places + rng.uniform(-40, 40, (*shape[:2], 1, 1))
    noise = rng.normal(0, 20, shape)
    return (128 + 50 * clean + light + noise).clip(0, 255).astype(np.uint8)


def write(path: Path, images: np.ndarray, rng: np.random.Generator) -> str:
    with lmdb.open(str(path), map_size=2**24) as environment, environment.begin(write=True) as transaction:
        pairs = [(person, image) for person, own in enumerate(images) for image in own]
        for item, index in enumerate(rng.permutation(len(pairs))):
            person, image = pairs[index]
            datum = caffe_pb2.Datum(channels=1, height=SIZE, width=SIZE, label=person, data=image.tobytes())
            transaction.put(f"{item:05}".encode(), datum.SerializeToString())
    return str(path)


def verification(solver: Solver, images: np.ndarray) -> float:
    """The best share of pairs of images that a threshold on the cosine of their features judges rightly.

    As many pairs of one person as of two are judged.
    """
    net, backend = solver.net, solver.backend
    features = []
    for image in images.reshape(-1, 32, 1, SIZE, SIZE):
        backend.from_host((image.astype(np.float32) - 128) / 128, net.blobs["data"].data)
        for layer, bottoms, tops in zip(net.layers[1:], net.bottoms[1:], net.tops[1:], strict=True):
            layer.forward(bottoms, tops)
            if layer.name == "fc5":
                break
        features.append(net.blobs["fc5"].host_data())
    unit = np.concatenate(features)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    cosines, persons = unit @ unit.T, np.repeat(np.arange(len(images)), images.shape[1])
    above = np.triu(np.ones(cosines.shape, bool), 1)
    same = persons[:, None] == persons
    own, other = cosines[above & same], cosines[above & ~same]
    return max((np.mean(own > t) + np.mean(other <= t)) / 2 for t in np.linspace(-1, 1, 201))


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_a_tiny_face_net_tells_strangers_apart(tmp_path: Path, head: str) -> None:
    rng = np.random.default_rng(1)
    identities = rng.normal(size=(PERSONS + STRANGERS, LATENT))
    source = write(tmp_path / "train", faces(identities[:PERSONS], 40, rng), rng)
    strangers = faces(identities[PERSONS:], 16, rng)
    with build_solver(SOLVER, BODY.replace("SOURCE", source) + HEADS[head] + LOSS) as solver:
        untrained = verification(solver, strangers)
        solver.step(250)
        trained = verification(solver, strangers)
    assert untrained < 0.8
    assert trained > 0.95
