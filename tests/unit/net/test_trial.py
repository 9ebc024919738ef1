"""`caffepy.net.trial`: nets without their data, with labels that fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from caffepy.errors import ConfigError, DataError, ShapeError
from caffepy.formats.load import filter_net, net_state
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.net.trial import BUILDS, RUNS, TRIAL_BATCH, net_states, prepared, try_net

DATA = (
    'layer { name: "d" type: "Data" top: "x" top: "t" transform_param { crop_size: 8 } data_param { batch_size: 9 } }'
)
CONVOLUTION = (
    'layer { name: "c" type: "Convolution" bottom: "x" top: "y" convolution_param { num_output: 5 kernel_size: 3 } }'
)
PRODUCT = 'layer { name: "p" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 5 } }'


def net_of(text: str) -> caffe_pb2.NetParameter:
    return text_format.Parse(text, caffe_pb2.NetParameter())


def layer(kind: str, more: str = "") -> str:
    return f'layer {{ name: "l" type: "{kind}" bottom: "y" bottom: "t" top: "l" {more} }}'


def shapes(text: str, record: tuple[int, ...] | None = None) -> list[list[int]]:
    """Shapes of the tops of the first layer, for the TRAIN phase."""
    net = filter_net(net_of(text), net_state(caffe_pb2.TRAIN))
    first = prepared(net, record, PathResolver(None)).layer[0]
    assert first.type == "DummyData"
    return [list(shape.dim) for shape in first.dummy_data_param.shape]


@pytest.mark.parametrize(
    ("body", "label"),
    [
        (PRODUCT + layer("SoftmaxWithLoss"), []),
        (PRODUCT + layer("EuclideanLoss"), [5]),
        (PRODUCT + layer("SmoothL1Loss"), [5]),
        (PRODUCT + layer("SigmoidCrossEntropyLoss"), [5]),
        (CONVOLUTION + layer("SoftmaxWithLoss"), [1, 6, 6]),
        (CONVOLUTION + layer("Accuracy"), [1, 6, 6]),
        (CONVOLUTION + layer("EuclideanLoss"), [5, 6, 6]),
        (
            PRODUCT
            + 'layer { name: "f" type: "Flatten" bottom: "t" top: "f" }'
            + layer("EuclideanLoss").replace('"t"', '"f"'),
            [5],
        ),
    ],
)
def test_a_label_has_the_shape_that_its_reader_takes(body: str, label: list[int]) -> None:
    assert shapes(DATA + body) == [[TRIAL_BATCH, 3, 8, 8], [TRIAL_BATCH, *label]]


def test_a_label_that_is_sliced_has_the_sizes_of_all_predictions() -> None:
    text = (
        DATA
        + PRODUCT
        + """layer { name: "q" type: "InnerProduct" bottom: "x" top: "z" inner_product_param { num_output: 3 } }
        layer { name: "s" type: "Slice" bottom: "t" top: "t1" top: "t2" slice_param { slice_point: 5 } }
        layer { name: "l1" type: "EuclideanLoss" bottom: "y" bottom: "t1" top: "l1" }
        layer { name: "l2" type: "EuclideanLoss" bottom: "z" bottom: "t2" top: "l2" }"""
    )
    assert shapes(text)[1] == [TRIAL_BATCH, 8]


def test_a_batch_that_a_layer_wants_stays() -> None:
    reshape = 'layer { name: "r" type: "Reshape" bottom: "y" top: "r" reshape_param { shape { dim: 3 dim: 15 } } }'
    assert shapes(DATA + PRODUCT + reshape)[0][0] == 9


def test_a_record_of_unknown_size_needs_a_shape() -> None:
    text = DATA.replace("transform_param { crop_size: 8 }", "") + PRODUCT
    with pytest.raises(DataError, match=r"layer 'd' \(Data\): its fields do not tell .* --shape 3,224,224"):
        shapes(text)
    assert shapes(text, (1, 4, 4))[0] == [TRIAL_BATCH, 1, 4, 4]


def test_states_are_those_of_the_rules() -> None:
    rules = 'include { phase: TRAIN stage: "a" } include { phase: TEST not_stage: "b" }'
    text = f'layer {{ name: "a" type: "Input" top: "a" {rules} }}'
    states = [(state.phase, list(state.stage)) for state in net_states(net_of(text))]
    assert states == [(caffe_pb2.TRAIN, ["a"]), (caffe_pb2.TEST, [])]
    assert [state.phase for state in net_states(net_of('layer { name: "a" type: "Input" top: "a" }'))] == [1]


def test_a_net_runs_in_each_phase(tmp_path: Path) -> None:
    text = DATA.replace("data_param", "include { phase: TRAIN } data_param")
    text += 'layer { name: "m" type: "MemoryData" top: "x" top: "t" include { phase: TEST }'
    text += " memory_data_param { batch_size: 1 channels: 3 height: 8 width: 8 } }"
    text += 'layer { name: "b" type: "BatchNorm" bottom: "x" top: "x" }' + PRODUCT + layer("SoftmaxWithLoss")
    assert list(try_net(net_of(text), tmp_path / "net.prototxt")) == [BUILDS, RUNS]


def test_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = 'layer { name: "i" type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 } } }'
    text += 'layer { name: "o" type: "HDF5Output" bottom: "x" bottom: "x" hdf5_output_param { file_name: "o.h5" } }'
    assert list(try_net(net_of(text), tmp_path / "net.prototxt")) == [BUILDS, RUNS]
    assert not list(tmp_path.iterdir())


def test_a_phase_is_built_in_one_of_its_stages(tmp_path: Path) -> None:
    first = 'layer { name: "i" type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 } } }'
    staged = PRODUCT.replace('bottom: "x"', 'bottom: "h" include { stage: "a" }')
    hidden = 'layer { name: "h" type: "ReLU" bottom: "x" top: "h" include { stage: "b" } }'
    assert list(try_net(net_of(first + hidden + staged), tmp_path / "n.prototxt")) == [BUILDS, RUNS]
    with pytest.raises(ConfigError, match="unknown bottom blob 'h'"):
        list(try_net(net_of(first + staged.replace('stage: "a"', "phase: TEST")), tmp_path / "n.prototxt"))


def test_a_net_that_fits_no_label_is_refused(tmp_path: Path) -> None:
    text = DATA + PRODUCT + CONVOLUTION.replace('"y"', '"z"')
    text += 'layer { name: "l" type: "Eltwise" bottom: "y" bottom: "z" top: "l" }'
    with pytest.raises(ShapeError, match="layer 'l'"):
        list(try_net(net_of(text), tmp_path / "n.prototxt"))
