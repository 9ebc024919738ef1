"""Runs all that the CUDA backend can do and the project's nets, in every dtype, on a GPU that computes nothing.

    python tests/support/cuda_runs.py OUT.json [NET.prototxt]

With a net, one training iteration of it alone. Writes down the kernels that `fake_cuda.Recorder` saw;
`kernel_compiler.py` compiles them. It is a process of its own, since it puts the fake where CuPy would be imported
from.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import pkgutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_cuda import ROOT, Recorder, fake_backend, install

BLOB_DTYPES = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}
SHAPES = ((2, 16, 4, 8), (3, 5, 7, 3), (6, 40))
"""Of the arrays of formulas: with wide loads, without, and matrices."""

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 4 dim: 3 dim: 12 dim: 12 } shape { dim: 4 } } }
layer { name: "a" type: "Convolution" bottom: "data" top: "a" convolution_param { num_output: 24 kernel_size: 3 pad: 1
  bias_term: false } }
layer { name: "a_n" type: "BatchNorm" bottom: "a" top: "a" }
layer { name: "a_s" type: "Scale" bottom: "a" top: "a" scale_param { bias_term: true } }
layer { name: "a_r" type: "ReLU" bottom: "a" top: "a" }
layer { name: "b" type: "Convolution" bottom: "a" top: "b" convolution_param { num_output: 24 kernel_size: 3 pad: 1 } }
layer { name: "b_n" type: "BatchNorm" bottom: "b" top: "b" }
layer { name: "b_s" type: "Scale" bottom: "b" top: "b" scale_param { bias_term: true } }
layer { name: "s" type: "Eltwise" bottom: "a" bottom: "b" top: "s" }
layer { name: "s_r" type: "ReLU" bottom: "s" top: "s" }
layer { name: "c" type: "Convolution" bottom: "s" top: "c"
  convolution_param { num_output: 16 kernel_size: 3 group: 2 } }
layer { name: "c_r" type: "ReLU" bottom: "c" top: "c" }
layer { name: "p" type: "Pooling" bottom: "c" top: "p" pooling_param { pool: MAX kernel_size: 3 stride: 2 } }
layer { name: "i" type: "InnerProduct" bottom: "p" top: "i" inner_product_param { num_output: 33 } }
layer { name: "i_r" type: "ReLU" bottom: "i" top: "i" }
layer { name: "i_d" type: "Dropout" bottom: "i" top: "i" }
layer { name: "k" type: "InnerProduct" bottom: "i" top: "k" inner_product_param { num_output: 30 } }
layer { name: "k_s" type: "Sigmoid" bottom: "k" top: "k" }
layer { name: "j" type: "InnerProduct" bottom: "k" top: "j" inner_product_param { num_output: 7 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "j" bottom: "label" top: "loss" }
layer { name: "accuracy" type: "Accuracy" bottom: "j" bottom: "label" top: "accuracy" }
"""


def all_expressions() -> list[Any]:
    """Every formula of the package."""
    from caffepy import backend, forks, layers, net
    from caffepy.backend.expression import Expression

    for part in (backend, layers, net, forks):
        for module in pkgutil.walk_packages(part.__path__, f"{part.__name__}."):
            if not module.name.endswith("_rules"):  # of exports, whose libraries may be absent
                importlib.import_module(module.name)
    from caffepy.training.rules import RULES, SGD, update_formula

    for rule in map(RULES.get, RULES):
        wanted = [rule.formula, rule.decoupled_formula] if issubclass(rule, SGD) else [rule.formula]
        for formula in wanted:
            update_formula(formula, store_change=False)
            update_formula(formula, store_change=True)
    formulas = [value for value in gc.get_objects() if isinstance(value, Expression)]
    return sorted(formulas, key=lambda e: (e.name, repr(e.parameters)))


def run_formulas(backend: Any) -> None:
    """Every formula over arrays of each dtype, as numbers and as sums, its scalars on the host and on the device."""
    for formula in all_expressions():
        for dtype in BLOB_DTYPES.values():
            for shape in SHAPES:
                run_formula(backend, formula, shape, dtype)


def run_formula(backend: Any, formula: Any, shape: tuple[int, ...], dtype: str) -> None:
    """One formula over arrays of one shape, where Channel arguments follow the second axis."""
    from caffepy.backend.expression import Kind

    for scalar in (1.0, backend.zeros(())) if Kind.SCALAR in formula.kinds and shape == SHAPES[0] else (1.0,):
        given = {Kind.CHANNEL: backend.zeros((shape[1],)), Kind.SCALAR: scalar}
        inputs = [given[kind] if kind in given else backend.zeros(shape, dtype) for kind in formula.kinds]
        results = [backend.zeros(shape, dtype) for _ in range(formula.output_count)]
        backend.apply(formula, inputs, results)
        if Kind.EACH in formula.kinds:
            for kept in ((shape[1],), ()):
                backend.reduce(formula, inputs, [backend.zeros(kept) for _ in results])


def run_nets(backend: Any) -> None:
    """The golden nets, one for each layer, forward and backward in each dtype."""
    from google.protobuf import text_format

    from caffepy.formats.proto import caffe_pb2
    from caffepy.layers import LayerContext
    from caffepy.net.net import Net

    golden = ROOT / "tests" / "golden"
    for path in sorted([*(golden / "layers").glob("*.npz"), *(golden / "nvidia" / "layers").glob("*.npz")]):
        case = np.load(path)
        for kind in BLOB_DTYPES:
            param = text_format.Parse(str(case["prototxt"]), caffe_pb2.NetParameter())
            param.default_forward_type = param.default_backward_type = caffe_pb2.Type.Value(kind)
            net = Net(param, LayerContext(backend, caffe_pb2.Phase.Value(str(case["phase"]))))
            net.forward()
            if any(layer.has_backward for layer in net.layers):
                net.backward()


def run_training(backend: Any) -> None:
    """Two iterations of a net of which much is fused, in each dtype."""
    from training import solver_param

    from caffepy.training.solver import create_solver
    from caffepy.utils.options import ExecutionOptions

    text = 'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.1 clip_gradients: 1 snapshot_diff: '
    for kind, diff in [*((kind, "false") for kind in BLOB_DTYPES), ("FLOAT16", "true")]:
        types = f"default_forward_type: {kind} default_backward_type: {kind}\n"
        solver = create_solver(solver_param(text + diff, types + NET), backend, engine=ExecutionOptions(eager=True))
        solver.step(2)
        solver.close()


def run_iteration(backend: Any, net: str) -> None:
    """One training iteration of a net."""
    from training import solver_param

    from caffepy.training.solver import create_solver
    from caffepy.utils.options import ExecutionOptions

    param = solver_param('base_lr: 0.01 lr_policy: "fixed" momentum: 0.9 snapshot_diff: false', net)
    solver = create_solver(param, backend, engine=ExecutionOptions(eager=True))
    solver.step(1)
    solver.close()


def run_inference(backend: Any) -> None:
    """The same net in the TEST phase, folded, in each dtype; input and output by pinned memory."""
    from google.protobuf import text_format

    from caffepy.formats.proto import caffe_pb2
    from caffepy.layers import LayerContext
    from caffepy.net.executor import ForwardExecutor
    from caffepy.net.net import Net

    for kind in BLOB_DTYPES:
        param = text_format.Parse(NET, caffe_pb2.NetParameter())
        param.default_forward_type = param.default_backward_type = caffe_pb2.Type.Value(kind)
        net = Net(param, LayerContext(backend, caffe_pb2.TEST), fuse=True)
        assert any("Convolution + BatchNorm + Scale + Eltwise + ReLU" in node.layer.type for node in net.schedule)
        for wanted in (True, False):
            runner = ForwardExecutor(net, eager=wanted)
            for _ in range(3):
                runner.forward()
        for shape in ((2, 3, 8, 8), (2, 600, 32, 32), (4, 5)):
            blob = backend.zeros(shape, BLOB_DTYPES[kind])
            backend.upload(np.zeros(shape, np.uint8), blob)
            assert [values.shape for values in backend.download([blob, blob])] == [shape] * 2


def run_windows(backend: Any, dtype: str) -> None:
    """Pooling by windows of several sizes, and LRN, with wide loads and without."""
    from caffepy.backend import Geometry, LrnWindow

    def zeros(shape: tuple[int, ...], dtype: str = dtype) -> Any:
        return backend.zeros(shape, dtype)

    for channels, (kernel, stride) in itertools.product((16, 5), ((3, 2), (2, 2), (5, 1), (3, 1))):
        size = (12 - kernel) // stride + 1
        x, y = zeros((2, channels, 12, 12)), zeros((2, channels, size, size))
        geometry = Geometry((kernel, kernel), (stride, stride), (0, 0), (1, 1))
        for kind in ("uint8", "int32"):
            mask = zeros(y.shape, kind)
            backend.pool_max_forward(x, y, mask, geometry)
            backend.pool_max_backward(y, mask, x, geometry)
        backend.pool_average_forward(x, y, geometry)
        backend.pool_average_backward(y, x, geometry)
        y, mask = zeros((2, channels, 1, 1)), zeros((2, channels, 1, 1), "int32")
        backend.pool_max_forward(x, y, mask, Geometry((12, 12), (1, 1), (0, 0), (1, 1)))
        backend.pool_average_forward(x, y, Geometry((12, 12), (1, 1), (0, 0), (1, 1)))
        for size in (3, 40):
            backend.lrn_across_forward(x, x, None, LrnWindow(size, 0.1, 0.75))
            backend.lrn_across_backward(x, None, None, x, x, LrnWindow(size, 0.1, 0.75))


def run_softmax(backend: Any) -> None:
    """Softmax, its loss and label ranks: few positions, many neighbouring classes, and classes far apart."""
    for shape in ((8, 10), (2000, 10), (3000, 1500), (2, 5, 40, 40), (2, 2000, 30, 30)):
        x, labels = backend.zeros(shape), backend.zeros((shape[0], *shape[2:]))
        totals, bad = backend.zeros((2,)), backend.zeros((1,), "int32")
        backend.softmax_forward(x, x, 1)
        backend.softmax_backward(x, x, x, 1)
        backend.softmax_loss_forward(x, labels, x, totals, bad, 1, 3)
        backend.softmax_loss_backward(x, labels, x, totals, 1, None, 1.0)
        backend.softmax_loss_backward(x, labels, x, None, 1, None, 1.0)
        backend.smooth_loss_forward(x, labels, totals, 1, 3, 0.1)
        backend.smooth_loss_backward(labels, x, totals, 1, None, 1.0)
        for higher_wins in (False, True):
            backend.label_ranks(x, labels, backend.zeros(labels.shape), bad, 1, higher_wins)


def run_batch_norm(backend: Any, dtype: str) -> None:
    """Batch normalisation with everything that may be part of its launches, ReLU's gradient and sums of arrays."""
    from caffepy.backend.types import BatchNormState, mask_bytes
    from caffepy.layers.activation import sigmoid_gradient

    for shape in ((4, 32, 8, 8), (4, 5, 7, 7), (16, 24)):
        n = BatchNormState(*(backend.zeros((shape[1],)) for _ in range(6)), backend.zeros((1,)), 1e-5, 0.999)
        x, sums = backend.zeros(shape, dtype), [backend.zeros((shape[1],)) for _ in range(2)]
        mask = backend.zeros((mask_bytes(x.size),), "uint8")
        backend.batch_norm_measure(x, n)
        backend.batch_norm_measure_sums(backend.zeros((2, shape[1])), x.size // shape[1], n)
        backend.batch_norm_load(n)
        for residual, relu, bits in itertools.product((None, x), (False, True), (None, mask)):
            if relu or bits is None:
                backend.batch_norm_forward(x, n, x, residual, relu, bits)
        for sources, relu, bits in itertools.product((1, 2, 3, 4, 5), (False, True), (None, mask)):
            dys = [backend.zeros(shape, dtype) for _ in range(sources)]
            if relu or bits is None:
                backend.batch_norm_backward_sums(x, dys, n, sums, relu, bits, x if sources > 1 else None)
        for relu in (False, True):
            backend.batch_norm_backward_data(x, x, n, sums, x, relu)
        for bias in (None, sums[0]):
            backend.relu_backward(x, x, x, bias, False)
            backend.activation_backward(sigmoid_gradient, x, x, x, bias, False)
        for count in (2, 3, 5, 11):
            backend.add_n([backend.zeros(shape, dtype) for _ in range(count)], x)


def run_products(backend: Any, dtype: str) -> None:
    """Products of matrices with a formula of their elements, as they lie and turned, with wide loads and without."""
    from caffepy.layers.activation import sigmoid_with_channel

    for (rows, columns, depth), turned, kind in itertools.product(
        ((100, 30, 250), (100, 256, 512), (7, 5, 19)), (False, True), {dtype, "float32"}
    ):
        a, b = (
            backend.zeros((rows, depth), dtype),
            backend.zeros((columns, depth) if turned else (depth, columns), dtype),
        )
        out, channel = backend.zeros((rows, columns), kind), backend.zeros((columns,))
        backend.gemm_and_apply(sigmoid_with_channel, a, b, channel, out, transpose_b=turned)


def run_gradients(backend: Any, dtype: str) -> None:
    """Both gradients of depthwise convolutions behind a batch normalisation, in one pass."""
    from caffepy.backend import Geometry
    from caffepy.backend.types import BatchNormState, NormalisedBottom

    for channels, stride, relu in itertools.product((16, 5), (1, 2), (True, False)):
        x_shape, weights_shape, size = (2, channels, 8, 8), (channels, 1, 3, 3), 8 // stride
        geometry = Geometry((3, 3), (stride, stride), (1, 1), (1, 1), channels)
        plan = backend.plan_convolution(x_shape, weights_shape, geometry, dtype)
        x, dy = backend.zeros(x_shape, dtype), backend.zeros((2, channels, size, size), dtype)
        n = BatchNormState(*(backend.zeros((channels,)) for _ in range(6)), backend.zeros((1,)), 1e-5, 0.999)
        bottom = NormalisedBottom(x, n, relu, (n.scale, n.bias))
        assert plan.forward_normalised is not None and plan.backward_normalised is not None
        for sums in (None, backend.zeros((2, channels))):
            plan.forward_normalised(bottom, backend.zeros(weights_shape, dtype), dy, sums)
        plan.backward_normalised(bottom, dy, backend.zeros(weights_shape, dtype), x, backend.zeros(weights_shape), relu)


def run_convolutions(backend: Any, dtype: str) -> None:
    """Shapes that few kernels are for: few pixels or channels, large windows, one axis."""
    from caffepy.backend import Geometry

    def window(size: tuple[int, ...], stride: int = 1, group: int = 1) -> Geometry:
        zeros, ones = (0,) * len(size), (1,) * len(size)
        return Geometry(size, (stride,) * len(size), zeros, ones, group)

    for x_shape, outputs, geometry in (
        ((1, 64, 6, 6), 240, window((3, 3))),
        ((1, 64, 3, 4, 4), 240, window((3, 3, 1))),
        ((9, 48, 5, 7), 80, window((5, 7))),
        ((2, 1, 40, 70), 3, window((11, 9))),
        ((2, 16, 20, 20), 16, window((11, 11))),
        ((2, 12, 200), 40, window((5,), 2, 2)),
        ((2, 12, 1100), 12, window((5,), 1, 12)),
        ((2, 6, 9, 9), 18, window((3, 3), 1, 6)),
        ((2, 6, 30, 20), 6, window((11, 9), 1, 6)),
        ((2, 8, 40, 30), 8, window((9, 9), 6, 8)),
        ((2, 3, 20, 24), 16, window((5, 7), 2)),
        ((2, 6, 9, 9), 12, window((1, 1), 1, 3)),
    ):
        weights_shape = (outputs, x_shape[1] // geometry.group, *geometry.kernel)
        plan = backend.plan_convolution(x_shape, weights_shape, geometry, dtype)
        x, dy = backend.zeros(x_shape, dtype), backend.zeros(plan.problem.y, dtype)
        plan.forward(x, backend.zeros(weights_shape, dtype), None, dy)
        plan.backward_data(dy, backend.zeros(weights_shape, dtype), x)
        for accumulate in (False, True):
            plan.backward_weights(x, dy, backend.zeros(weights_shape), accumulate)


def run_copies(backend: Any) -> None:
    """Copies and sums from each dtype to each, in one order and from one order to the other; random numbers."""
    from caffepy.backend import RandomStream

    for source, target in itertools.product(BLOB_DTYPES.values(), repeat=2):
        for shape in ((2, 32, 8, 8), (2, 5, 7, 3), (6, 40)):
            x, y = backend.zeros(shape, source), backend.zeros(shape, target)
            backend.copy(x, y)
            backend.add(x, y)
            backend.copy(x[:, 1:4], y[:, 2:5])
            backend.from_host(np.zeros(shape, np.float32), y)
            plain = backend.zeros((x.size,), source).reshape(shape)
            backend.copy(plain, y)
            backend.copy(y, plain)
        for shape in ((4, 16, 8, 8), (4, 32), (4, 5), (3, 5, 7, 3)):
            x, y = backend.zeros(shape, source), backend.zeros(shape, target)
            backend.dropout(x, y, 0.5, RandomStream(1, 2), (0, 0))
            backend.random_uniform(x, RandomStream(1, 2), (0, 0))
            backend.all_finite(x)


def run_rows(backend: Any) -> None:
    """Everything that moves elements by index."""
    from caffepy.backend import Geometry, SparseMatrix

    x, planes, rois = backend.zeros((6, 8)), backend.zeros((2, 18, 6, 6)), backend.zeros((3, 5))
    index, bad, mask = backend.zeros((6,)), backend.zeros((1,), "int32"), backend.zeros((2, 18, 3, 3), "int32")
    backend.gather_rows(x, index, x, bad)
    backend.scatter_add_rows(x, index, x)
    backend.one_hot(index, x, bad)
    for dtype in BLOB_DTYPES.values():
        matrix = SparseMatrix(backend.zeros((10,), "int32"), backend.zeros((4,), "int32"), backend.zeros((4,)), (9, 36))
        backend.spatial_product(matrix, backend.zeros(planes.shape, dtype), backend.zeros(mask.shape, dtype))
    backend.largest(planes, 1, *(backend.zeros((2, 2, 6, 6)) for _ in range(2)))
    small = backend.zeros(mask.shape)
    backend.unpool_forward(small, small, planes, bad)
    backend.unpool_backward(planes, small, small)
    backend.pool_stochastic_forward(planes, small, small, mask, Geometry((2, 2), (2, 2), (0, 0), (1, 1)))
    wide, bins = backend.zeros((3, 18, 3, 3)), backend.zeros((3, 2, 3, 3))
    masks = backend.zeros(wide.shape, "int32")
    backend.roi_max_forward(planes, rois, wide, masks, 0.5, bad)
    backend.roi_max_backward(wide, rois, masks, planes, 0.5)
    backend.roi_average_forward(planes, rois, bins, 0.5, bad)
    backend.roi_average_backward(bins, rois, planes, 0.5)
    samples, places = backend.zeros((3,)), backend.zeros((3, 3))
    backend.roi_bilinear_forward(planes, samples, places, places, bins, 3, bad)
    backend.roi_bilinear_backward(bins, samples, places, places, planes, 3)


def run_flow(backend: Any) -> None:
    """Correlation, and sampling at positions."""
    from caffepy.backend import Border, CorrelationWindow

    x, y, positions = backend.zeros((2, 18, 6, 6)), backend.zeros((2, 9, 6, 6)), backend.zeros((2, 2, 6, 6))
    window = CorrelationWindow(1, 1, (0, 0), (-1, -1), (3, 3), 1)
    backend.correlate_forward(x, x, y, window)
    backend.correlate_backward(y, x, x, x, x, window)
    backend.sample_forward(x, positions, x, Border.ZERO, 0.0)
    backend.sample_backward(x, positions, x, x, positions, Border.ZERO)


def run_box_loss(backend: Any) -> None:
    """SSD's loss, with mining and without."""
    from caffepy.formats.proto import caffe_pb2
    from caffepy.layers.detection.multibox_loss import PROBLEM, device_settings

    kinds = caffe_pb2.MultiBoxLossParameter
    locations, scores = backend.zeros((2, 48)), backend.zeros((2, 36))
    priors, objects = backend.zeros((1, 2, 48)), backend.zeros((1, 1, 5, 8))
    for mining, score_loss in ((kinds.MAX_NEGATIVE, kinds.SOFTMAX), (kinds.NONE, kinds.LOGISTIC)):
        param = kinds(num_classes=3, mining_type=mining, conf_loss_type=score_loss)
        loss = backend.box_loss(device_settings(param, (True, True)), 2, 12)
        loss.forward(locations, scores, priors, objects, backend.zeros((2,)), backend.zeros((PROBLEM,)))
        loss.boxes_gradient(locations, priors, objects, locations)
        loss.scores_gradient(scores, scores)


def run_recurrent(backend: Any) -> None:
    """The gates of an LSTM."""
    gates, state, cont = backend.zeros((3, 20)), backend.zeros((3, 5)), backend.zeros((3,))
    backend.lstm_unit_forward(gates, state, cont, state, state)
    backend.lstm_unit_backward(gates, state, cont, state, state, state)
    for dtype in BLOB_DTYPES.values():
        blob, d_gates = backend.zeros((3, 5), dtype), backend.zeros((3, 20), dtype)
        for following in ((), (cont, blob)):
            backend.lstm_step_forward(gates, state, cont, state, blob, *following)
        for following in ((), (cont, state)):
            backend.lstm_step_backward(gates, state, cont, state, state, blob, d_gates, *following)


def run_input(backend: Any) -> None:
    """Images and other values that become blobs, and clocks."""
    from caffepy.backend.types import ImageSlot

    for dtype, channels in itertools.product(BLOB_DTYPES.values(), (1, 3, 5)):
        slot = ImageSlot(8, channels, 96, 96)
        ring = backend.input_ring(slot.size, 1, 2)
        images, labels = backend.zeros(slot.shape, dtype), backend.zeros((8,))
        for mean in ((channels, 1, 1), (channels, 100, 100)):
            backend.take_images(ring, (0, 0), slot, backend.zeros(mean), 1.0, images, labels)
        backend.take_values(ring, (0, 0), 0, images)
    backend.device_timer(3)


def run_all_reduce() -> None:
    """The gradients' average over NVLink."""
    from caffepy.distributed.communicators.nvlink import NvlinkAverage

    for size in (2, 8):
        host: Any = SimpleNamespace(rank=0, size=size, sum=np.asarray, barrier=lambda: None)
        average = NvlinkAverage(host, 4096)
        average.average(average.memory)


def run_all() -> None:
    """Everything that the backend can do."""
    for math_mode in ("fp32", "tf32"):
        with fake_backend(math_mode) as backend:
            run_nets(backend)
            run_training(backend)
            run_inference(backend)
    for dtype in BLOB_DTYPES.values():
        run_windows(backend, dtype)
        run_batch_norm(backend, dtype)
        run_gradients(backend, dtype)
        run_products(backend, dtype)
        run_convolutions(backend, dtype)
    run_softmax(backend)
    run_copies(backend)
    run_recurrent(backend)
    run_input(backend)
    run_rows(backend)
    run_flow(backend)
    run_box_loss(backend)
    run_all_reduce()
    run_formulas(backend)


def main() -> int:
    """Run a net or everything, write what was recorded."""
    sys.path.insert(0, str(ROOT))
    recorder = Recorder()
    install(recorder)
    if len(sys.argv) > 2:
        with fake_backend("tf32") as backend:
            run_iteration(backend, Path(sys.argv[2]).read_text())
    else:
        run_all()
    Path(sys.argv[1]).write_text(json.dumps(recorder.as_list()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
