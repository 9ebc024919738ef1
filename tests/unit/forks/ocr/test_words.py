"""Small nets of both families learn to read made-up words: digits drawn as bars, with gaps, shifts and noise."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

import caffepy

HEIGHT, WIDTH, LONGEST = 12, 40, 3
BARS = ["1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011"]
"""Of each digit the bars: top, left above, right above, middle, left below, right below, bottom."""


def drawn(digit: int) -> np.ndarray:
    """An image (11, 7) of a digit."""
    image = np.zeros((11, 7), np.float32)
    places = [(0, slice(None)), (slice(0, 6), 0), (slice(0, 6), 6), (5, slice(None))]
    places += [(slice(5, 11), 0), (slice(5, 11), 6), (10, slice(None))]
    for bar, place in zip(BARS[digit], places, strict=True):
        if bar == "1":
            image[place] = 1
    return image


def words(count: int, seed: int) -> tuple[np.ndarray, list[list[int]]]:
    """Images (count, 1, HEIGHT, WIDTH) and their digits."""
    rng = np.random.default_rng(seed)
    images = rng.normal(0, 0.2, (count, 1, HEIGHT, WIDTH)).astype(np.float32)
    texts = [list(rng.integers(0, 10, rng.integers(1, LONGEST + 1))) for _ in range(count)]
    for image, text in zip(images[:, 0], texts, strict=True):
        left = 0
        for i, digit in enumerate(text):
            left += rng.integers(1, (WIDTH - 4 - left - 10 * (len(text) - i)) // 2 + 3)
            top = rng.integers(0, HEIGHT - 10)
            image[top : top + 11, left : left + 7] += drawn(digit)
            left += 7
    return images, texts


def write(folder: Path, name: str, count: int, seed: int, blank: int) -> None:
    """A file of words; labels count from the class behind blank 0."""
    images, texts = words(count, seed)
    labels = np.full((count, LONGEST), blank, np.float32)
    for row, text in zip(labels, texts, strict=True):
        row[: len(text)] = np.array(text) + (blank == 0)
    with h5py.File(folder / f"{name}.h5", "w") as file:
        file["data"], file["label"] = images, labels
    (folder / f"{name}.txt").write_text(str(folder / f"{name}.h5"))


DATA = """
layer {{ name: "data" type: "HDF5Data" top: "data" top: "label" include {{ phase: TRAIN }}
  hdf5_data_param {{ source: "{folder}/train.txt" batch_size: 32 shuffle: true }} }}
layer {{ name: "data" type: "HDF5Data" top: "data" top: "label" include {{ phase: TEST }}
  hdf5_data_param {{ source: "{folder}/test.txt" batch_size: 32 }} }}
"""
CONVOLUTIONS = """
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 16 kernel_size: 3 pad: 1 weight_filler { type: "msra" } } }
layer { name: "bn1" type: "BatchNorm" bottom: "conv1" top: "conv1" batch_norm_param { moving_average_fraction: 0.9 } }
layer { name: "scale1" type: "Scale" bottom: "conv1" top: "conv1" scale_param { bias_term: true } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
layer { name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1" pooling_param { kernel_size: 2 stride: 2 } }
layer { name: "conv2" type: "Convolution" bottom: "pool1" top: "conv2"
  convolution_param { num_output: 32 kernel_size: 5 pad: 2 weight_filler { type: "msra" } } }
layer { name: "bn2" type: "BatchNorm" bottom: "conv2" top: "conv2" batch_norm_param { moving_average_fraction: 0.9 } }
layer { name: "scale2" type: "Scale" bottom: "conv2" top: "conv2" scale_param { bias_term: true } }
layer { name: "relu2" type: "ReLU" bottom: "conv2" top: "conv2" }
layer { name: "pool2" type: "Pooling" bottom: "conv2" top: "pool2" pooling_param { kernel_size: 2 stride: 2 } }
"""
SCORES = 'inner_product_param { num_output: 11 axis: 2 weight_filler { type: "xavier" } }'
CRNN = """
layer { name: "rows" type: "Reshape" bottom: "pool2" top: "rows" reshape_param { shape { dim: 0 dim: 96 dim: -1 } } }
layer { name: "steps" type: "Permute" bottom: "rows" top: "steps"
  permute_param { order: 2 order: 0 order: 1 } }
layer { name: "indicator" type: "ContinuationIndicator" top: "indicator"
  continuation_indicator_param { time_step: 10 batch_size: 32 } }
layer { name: "lstm" type: "LSTM" bottom: "steps" bottom: "indicator" top: "lstm"
  recurrent_param { num_output: 48 weight_filler { type: "xavier" } } }
layer { name: "fc" type: "InnerProduct" bottom: "lstm" top: "fc" SCORES }
layer { name: "loss" type: "CtcLoss" bottom: "fc" bottom: "label" top: "loss"
  ctc_loss_param { blank_label: 10 alphabet_size: 11 time_step: 10 } }
layer { name: "back" type: "Permute" bottom: "fc" top: "back"
  permute_param { order: 1 order: 0 order: 2 } }
layer { name: "accuracy" type: "LabelsequenceAccuracy" bottom: "back" bottom: "label" top: "accuracy"
  labelsequence_accuracy_param { blank_label: 10 } }
"""
CAFFE_OCR = """
layer { name: "steps" type: "Transpose" bottom: "pool2" top: "steps"
  transpose_param { dim: 3 dim: 0 dim: 1 dim: 2 } }
layer { name: "lstm" type: "Lstm" bottom: "steps" top: "lstm"
  lstm_param { num_output: 32 weight_filler { type: "xavier" } } }
layer { name: "back" type: "Reverse" bottom: "steps" top: "back" }
layer { name: "lstm2" type: "Lstm" bottom: "back" top: "lstm2"
  lstm_param { num_output: 32 weight_filler { type: "xavier" } } }
layer { name: "forth" type: "Reverse" bottom: "lstm2" top: "forth" }
layer { name: "both" type: "Concat" bottom: "lstm" bottom: "forth" top: "both" concat_param { axis: 2 } }
layer { name: "fc" type: "InnerProduct" bottom: "both" top: "fc" SCORES }
layer { name: "loss" type: "WarpCTCLoss" bottom: "fc" bottom: "label" top: "loss" }
layer { name: "accuracy" type: "CTCGreedyDecoder" bottom: "fc" bottom: "label" top: "accuracy" include { phase: TEST } }
"""


@pytest.mark.parametrize(
    ("net", "blank", "iterations"), [(CRNN, 10, 160), (CAFFE_OCR, 0, 120)], ids=["crnn.caffe", "caffe_ocr"]
)
def test_most_words_are_read(net: str, blank: int, iterations: int, tmp_path: Path):
    write(tmp_path, "train", 4096, 1, blank)
    write(tmp_path, "test", 320, 2, blank)
    path = tmp_path / "net.prototxt"
    path.write_text(DATA.format(folder=tmp_path) + CONVOLUTIONS + net.replace("SCORES", SCORES))
    solver = {
        "net": str(path),
        "type": "Adam",
        "base_lr": 0.006,
        "lr_policy": "poly",
        "power": 1,
        "momentum": 0.9,
        "clip_gradients": 10,
        "max_iter": iterations,
        "test_iter": [10],
        "test_interval": iterations,
        "test_initialization": False,
        "random_seed": 1,
        "snapshot_after_train": False,
    }
    scores = caffepy.train(solver).scores[iterations][0]
    assert np.ravel(scores["accuracy"])[-1] >= 0.9
