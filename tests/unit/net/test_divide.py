"""Which layers say that their passes depend on earlier ones, and what that means for devices that share a net."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from field_cases import CONV_LSTM, LSTM, Case, add_inputs, values_of
from google.protobuf import text_format
from layer_cases import own_cases, type_of
from training import CPU

from caffepy.data.sharding import Shard
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.layers.layer import LAYERS, import_layer_types, layer_class
from caffepy.net import Net

TIMES = "4x2x5 4x2L2"
MARGIN = "num_output: 3 type: DOUBLE base: 10 gamma: 1"
STATEFUL = (
    Case(f'type: "LSTM" recurrent_param {{ {LSTM} }}', TIMES),
    Case(f'type: "RNN" recurrent_param {{ {LSTM} }}', TIMES),
    Case(f'type: "Lstm" lstm_param {{ {LSTM} }}', TIMES),
    Case(CONV_LSTM, "4x2x2x3x3 4x2L2"),
    Case('type: "SegAccuracy" seg_accuracy_param { reset: false }', "2x3x4x4 2x1x4x4L3"),
    Case('type: "GeneralContrastiveLoss" general_contrastive_loss_param { add_intra_mae: true }', "4x3 4L3"),
    Case(
        'type: "LpqLoss" lpq_loss_param { p: 1 p: 3 q: 1 q: 2 pq_episode_starts_at_iter: 0 '
        "pq_episode_starts_at_iter: 1 }",
        "2x2x3x3 2x2x3x3",
        "",
        "",
    ),
    Case(f'type: "MarginInnerProduct" margin_inner_product_param {{ {MARGIN} }}', "4x5 4L3"),
    Case(f'type: "LargeMarginInnerProduct" largemargin_inner_product_param {{ {MARGIN} }}', "4x5 4L3"),
    Case(
        'type: "GenerateAugmentationParameters" augmentation_param { augment_during_test: true crop_width: 4 '
        'crop_height: 4 rotate { rand_type: "uniform" spread: 0.4 } } coeff_schedule_param { half_life: 1 '
        "initial_coeff: 0.1 final_coeff: 1 }",
        "2x3x6x6",
        "",
        "",
    ),
    Case('type: "Dropout" dropout_param { sample_weights_test: true }', "4x8"),
    Case('type: "BatchNorm" batch_norm_param { use_global_stats: false }', "4x3x2x2"),
)
"""Forms of layers that say yes; `own_cases` has the forms of all types."""


class Passes:
    """A case's net in the TEST phase, whose batch j has the same values on every device."""

    def __init__(self, one: Case, shard: Shard) -> None:
        layer = text_format.Parse(one.layer, caffe_pb2.LayerParameter(name="L"))
        param = caffe_pb2.NetParameter()
        self._inputs = add_inputs(param, layer, one)
        param.layer.append(layer)
        self.net = Net(param, LayerContext(CPU, caffe_pb2.TEST, seed=1, shard=shard, test_iter=2))
        if self.net.context.first_sample is None:
            self.net.context.number_samples(self.net.batch_size())

    def run(self, batch: int) -> list[np.ndarray]:
        """What the layer leaves after a batch: its tops, and the statistics that later passes read."""
        for index, text in enumerate(self._inputs):
            values = values_of(text, index)
            if re.fullmatch("[0-9x]+", text):  # others are labels and boxes, with values of their own
                values = np.roll(values.ravel(), batch).reshape(values.shape)
            CPU.from_host(values, self.net.blobs[f"b{index}"].data)
        self.net.forward()
        tops = [blob.host_data() for name, blob in self.net.blobs.items() if name.startswith("t")]
        return [*tops, *map(np.array, self.net.statistics())]


def depends(one: Case) -> bool:
    """What the class says of the case's layer in a test."""
    layer = text_format.Parse(one.layer, caffe_pb2.LayerParameter(name="L"))
    layer.bottom.extend(one.bottoms.split())
    layer.top.extend(["t"] * one.tops)
    return layer_class(layer.type).depends_on_earlier_passes(layer, LayerContext(CPU, caffe_pb2.TEST))


def differs(one: Case) -> bool:
    """Whether the second batch of a test gives another result on a second device than behind the first batch."""
    alone, second = Passes(one, Shard()), Passes(one, Shard(1, 2))
    second.net.context.shard = replace(second.net.context.shard, undivided=False)
    alone.run(0)
    return not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(alone.run(1), second.run(1), strict=True))


FILES = "output_directory: 'out' label_map_file: 'map' name_size_file: 'sizes'"
BY_PROTOTXT = {
    'type: "MemoryData"': (False, True),
    'type: "HDF5Output" hdf5_output_param { file_name: "a.h5" }': (False, True),
    'type: "FLOWriter" writer_param { file: "a.flo" }': (False, True),
    'type: "ImgWriter" writer_param { file: "a.ppm" }': (False, True),
    'type: "ImgWriter" writer_param { folder: "images" }': (False, False),
    f'type: "DetectionOutput" detection_output_param {{ save_output_param {{ {FILES} }} }}': (False, True),
    f'type: "FrcnnOutput" frcnn_output_param {{ save_output_param {{ {FILES} }} }}': (False, True),
    'type: "DetectionEvaluate" detection_evaluate_param { name_size_file: "sizes" }': (True, True),
    'type: "Python" python_param { module: "kept_state" layer: "Plain" }': (False, True),
    'type: "Python" python_param { module: "kept_state" layer: "Stateless" }': (False, False),
    'type: "Python" python_param { module: "kept_state" layer: "Sequence" }': (True, True),
    'type: "LSTM"': (True, True),
    'type: "LSTM" recurrent_param { expose_hidden: true }': (False, False),
    'type: "ConvLSTM" recurrent_param { expose_hidden: true }': (False, False),
    'type: "Lstm" bottom: "x"': (False, False),
    'type: "BatchNorm" batch_norm_param { use_global_stats: false }': (False, True),
}
"""What layers that need files, arrays or classes, and those that differ by phase, say in a training and in a test."""
CLASSES = """
class Plain:
    def setup(self, bottom, top): ...
    def reshape(self, bottom, top): ...
    def forward(self, bottom, top): ...

class Stateless(Plain):
    depends_on_earlier_passes = False

class Sequence(Plain):
    depends_on_earlier_passes = True
"""


@pytest.mark.parametrize("text", BY_PROTOTXT)
def test_the_prototxt_says_it_for_each_phase(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept_state.py").write_text(CLASSES)
    monkeypatch.syspath_prepend(tmp_path)
    layer = text_format.Parse(text, caffe_pb2.LayerParameter(name="L"))
    said = [
        layer_class(layer.type).depends_on_earlier_passes(layer, LayerContext(CPU, phase))
        for phase in (caffe_pb2.TRAIN, caffe_pb2.TEST)
    ]
    assert tuple(said) == BY_PROTOTXT[text]


ON_THE_HOST = {
    "AssistedExcitation",
    "BboxAccuracy",
    "BoxGroupOutput",
    "BoxOutput",
    "DataAugmentation",
    "DecodeBBox",
    "DetectNetTransformation",
    "DetectionAccuracy",
    "DetectionGroupAccuracy",
    "DetectionGroupLoss",
    "FlowAugmentation",
    "HardMining",
    "Proposal",
    "ProposalTarget",
    "ROIWarping",
    "ScaleRoute",
}
"""Types that need more than a case gives and say no: a pass computes its tops from its bottoms and its samples."""


def test_no_type_is_left_out() -> None:
    """Types without a case pass `check_layer`, which compares the same, or read records by their positions."""
    import_layer_types()
    known = {type_of(one) for one in (*own_cases(), *STATEFUL)} | ON_THE_HOST
    known |= {text_format.Parse(text, caffe_pb2.LayerParameter()).type for text in BY_PROTOTXT}
    unit = Path(__file__).parents[1]
    for path in (*(unit / "layers").rglob("test_*.py"), *(unit / "forks").rglob("test_*.py")):
        if "check_layer(" in (source := path.read_text()):
            known |= set(re.findall(r"""["'](\w+)["']""", source))
    own = {name for name in LAYERS if LAYERS.get(name).__module__.startswith(("caffepy.layers.", "caffepy.forks."))}
    assert {name for name in own - known if not LAYERS.get(name).prefetches} <= {"Cast"}


@pytest.mark.parametrize("one", STATEFUL, ids=type_of)
def test_layers_that_depend_on_earlier_passes_say_so(one: Case) -> None:
    assert depends(one) and differs(one)


@pytest.mark.parametrize("one", own_cases(), ids=type_of)
def test_each_type_says_whether_a_pass_depends_on_earlier_ones(one: Case) -> None:
    assert depends(one) == differs(one)
