"""Mean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from layer_harness import Runner, check_layer, gaussian

from caffepy.errors import ConfigError, DataError, ShapeError
from caffepy.formats.proto import caffe_pb2


def mean(fields: str) -> str:
    return f"type: 'Mean' mean_param {{ {fields} }}"


def test_value_of_each_channel() -> None:
    x, y = gaussian((2, 4, 3, 5)), gaussian((1, 2, 2, 2))
    fields = "operation: SUBTRACT value: 0.5 value: -2 mean_scale: 3 input_scale: 0.5 output_scale: 2"

    def formula(*inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        parts = [np.resize([0.5, -2], a.shape[1]).reshape(-1, 1, 1) for a in inputs]
        return tuple(2 * (0.5 * a - 3 * part) for a, part in zip(inputs, parts, strict=True))

    check_layer(mean(fields), [x, y], formula)
    check_layer(mean("operation: ADD value: 0.25"), [x], lambda x: x + 0.25, in_place=True)


def test_file_of_each_pixel(tmp_path: Path) -> None:
    values = gaussian((2, 3, 5))
    blob = caffe_pb2.BlobProto(num=1, channels=2, height=3, width=5, data=values.ravel())
    (tmp_path / "mean").write_bytes(blob.SerializeToString())
    text = mean(f"operation: ADD file: '{tmp_path}/mean'")
    check_layer(text, [gaussian((2, 4, 3, 5))], lambda x: x + np.concatenate([values, values]))
    with pytest.raises(ShapeError, match="does not fit"):
        Runner(text, [gaussian((2, 4, 3, 4))])


def test_bad_settings_of_mean() -> None:
    x = gaussian((1, 2, 3, 3))
    for fields in ("operation: ADD", "operation: ADD value: 1 file: 'x'"):
        with pytest.raises(ConfigError, match="either file or value"):
            Runner(mean(fields), [x])
    with pytest.raises(DataError, match="cannot be read"):
        Runner(mean("operation: ADD file: '/nowhere/x'"), [x])
