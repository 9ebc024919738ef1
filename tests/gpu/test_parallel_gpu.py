"""Training on several GPUs: threads of one process, and ranks of mpirun, against one GPU."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import cv2
import numpy as np
import pytest
from process_groups import run_threads
from process_semaphore import semaphore
from subprocess_training import (
    LIMIT,
    LONG,
    NET,
    NORMALISED_NET,
    Outcome,
    SubprocessTraining,
    assert_same_weights,
    scores_of_snapshot,
)
from training_faults import wait_for_silence

from caffepy.backend import create_backend

ITERATIONS = 30
TOLERANCE = 1e-4
EXACT = ("--math", "fp32")
AT_ONCE = 4
"""Of these tests. NCCL's kernels on two GPUs wait for each other, and the GPUs give each process its time apart: with
many processes on both the two seldom run together, and a stop takes longer than is promised."""

pytestmark = pytest.mark.timeout(450)


@pytest.fixture(autouse=True)
def _semaphore() -> Iterator[None]:
    with semaphore("caffepy-parallel-gpu-tests", AT_ONCE):
        yield


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> SubprocessTraining:
    return SubprocessTraining(tmp_path_factory.mktemp("parallel_gpu"))


@pytest.fixture(scope="module")
def alone(training: SubprocessTraining) -> Outcome:
    """One process with GPU 0."""
    outcome = training.train(devices=("--gpus", "0", *EXACT), iterations=ITERATIONS)
    assert outcome.status == 0, outcome.log
    return outcome


def need_gpus(count: int) -> None:
    from caffepy.backend.cuda.device import device_count

    if device_count() < count:
        pytest.skip(f"needs {count} GPUs, {device_count()} are here")


def test_one_gpu_agrees_with_the_cpu(training: SubprocessTraining, alone: Outcome) -> None:
    cpu = training.train(iterations=ITERATIONS)
    assert_same_weights(alone, cpu, ITERATIONS, 1e-2)


def test_tf32_trains_nearly_the_same(training: SubprocessTraining, alone: Outcome) -> None:
    rounded = training.train(devices=("--gpus", "0"), iterations=ITERATIONS)
    assert rounded.status == 0, rounded.log
    assert_same_weights(rounded, alone, ITERATIONS, 1e-2)
    ours, exact = rounded.weights(ITERATIONS), alone.weights(ITERATIONS)
    assert any((ours[name] != exact[name]).any() for name in exact), "--math fp32 changed nothing"


def test_one_rank_of_mpirun_is_a_single_process(training: SubprocessTraining, alone: Outcome) -> None:
    outcome = training.train(devices=("--gpus", "0", *EXACT), ranks=1, iterations=ITERATIONS)
    assert outcome.status == 0, outcome.log
    assert_same_weights(outcome, alone, ITERATIONS, TOLERANCE)


def test_two_ranks_for_one_gpu_are_refused(training: SubprocessTraining) -> None:
    outcome = training.train(devices=("--gpus", "0", *EXACT), ranks=2, batch=32)
    assert outcome.status == 2
    (message,) = outcome.errors()
    assert re.match(r"\S+ has 2 ranks \(0,1\) for 1 GPU \(0\): 1 rank fits", message)


def test_two_ranks_divide_the_list_that_both_name(training: SubprocessTraining) -> None:
    need_gpus(2)
    threads = training.train(devices=("--gpus", "0,1", *EXACT), iterations=ITERATIONS)
    ranks = training.train(devices=("--gpus", "0,1", *EXACT), ranks=2, batch=32, iterations=ITERATIONS)
    assert ranks.status == 0, ranks.log
    assert ranks.logged("rank 0 takes 0; rank 1 takes 1")
    assert_same_weights(ranks, threads, ITERATIONS, TOLERANCE)


def test_nccl_alone_leaves_the_numbers_as_they_are() -> None:
    """A world of one GPU through NCCL: sum, mean and broadcast are the identity, in place, on the thread's stream."""
    from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
    from caffepy.distributed.communicators.nccl import NcclCommunicator, new_unique_id

    backend = create_backend(0)
    with backend.activate():
        host = LocalCommunicator(ThreadGroup(1), 0)
        communicator = NcclCommunicator(1, new_unique_id(), 0, host)
        values = np.arange(1000, dtype=np.float32)
        array = backend.zeros((1000,))
        backend.from_host(values, array)
        communicator.all_reduce(array)
        communicator.all_reduce(array, average=False)
        communicator.broadcast(array)
        communicator.wait_on_device()
        np.testing.assert_array_equal(backend.to_host(array), values)
        communicator.close()
        communicator.close()
    backend.close()


@pytest.mark.parametrize(
    ("compress", "rounded"), [("none", 1 / 3), ("fp16", float(np.float16(1 / 3))), ("bf16", 0.333984375)]
)
def test_averages_that_are_begun_can_be_captured_and_replayed(compress: str, rounded: float) -> None:
    from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
    from caffepy.distributed.communicators.nccl import NcclCommunicator, new_unique_id

    backend = create_backend(0)
    with backend.activate():
        communicator = NcclCommunicator(1, new_unique_id(), 0, LocalCommunicator(ThreadGroup(1), 0), compress)
        array = backend.zeros((1000,))

        def work() -> None:
            backend.fill(array, 1 / 3)
            works = [communicator.all_reduce_async(array[start : start + 500], nullcontext()) for start in (0, 500)]
            for bucket in works:
                bucket.synchronize()
            backend.add(array, array)

        work()
        graph = backend.capture(work)
        backend.fill(array, 0)
        for _ in range(3):
            graph.launch()
        communicator.wait_on_device()
        np.testing.assert_array_equal(backend.to_host(array), np.full(1000, 2 * np.float32(rounded), np.float32))
        assert communicator.completed == 2
        del graph
        communicator.close()
    backend.close()


@pytest.mark.parametrize("gpus", [(0, 0), (0, 1), (0, 1, 2, 3)])
def test_gpus_average_in_each_others_memory(gpus: tuple[int, ...]) -> None:
    """Eagerly and from a graph, in parts of which some are one block's; a wait for a GPU that never comes ends."""
    from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
    from caffepy.distributed.communicators.nvlink import NvlinkAverage

    need_gpus(max(gpus) + 1)
    size, count = len(gpus), 3_000_064
    values = np.random.default_rng(1).standard_normal((size, count)).astype(np.float32)
    parts = [slice(0, 64), slice(64, 2_000_000), slice(2_000_000, count - 64)]
    wanted = np.zeros(count, np.float32)
    for row in values:
        wanted += row * np.float32(1 / size)
    group = ThreadGroup(size)

    def work(rank: int) -> list[Any]:
        backend, found = create_backend(gpus[rank]), []
        with backend.activate():
            average = NvlinkAverage(LocalCommunicator(group, rank), count)

            def exchange() -> None:
                for part in parts:
                    average.average(average.memory[part])

            run = exchange
            for _ in range(4):
                backend.from_host(values[rank], average.memory)
                run()
                found.append(backend.to_host(average.memory))
                group.wait()
                run = backend.capture(exchange).launch if run is exchange else run
                group.wait()
            if rank == 0:
                exchange()
                average.stop()
                backend.synchronize()
            group.wait()
        backend.close()
        return found

    for rank, found in enumerate(run_threads(size, work)):
        for array in found:
            np.testing.assert_array_equal(array[-64:], values[rank, -64:])
            np.testing.assert_allclose(array[:-64], wanted[:-64], rtol=0, atol=0 if size == 2 else 1e-6)


def test_bfloat16_on_a_gpu_has_the_bits_of_the_hosts() -> None:
    from caffepy.distributed.communicators.communicator import host_compressor
    from caffepy.distributed.communicators.nccl import device_compressor

    bits = np.random.default_rng(1).integers(0, 1 << 32, 100_000, np.uint32)
    bits[:6] = [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0x7F7FFFFF, 0x3F808000]
    values = bits.view(np.float32)
    backend = create_backend(0)
    with backend.activate(), np.errstate(all="ignore"):
        array, found = backend.zeros(values.shape), backend.zeros(values.shape)
        backend.from_host(values, array)
        device, host = device_compressor("bf16", 1), host_compressor("bf16", 1)
        assert device is not None and host is not None
        copy, wanted = device.compress(array), host.compress(values)
        device.decompress(copy, found)
        values_kept = np.isfinite(values) & (np.abs(values) >= np.finfo(np.float32).tiny)
        np.testing.assert_array_equal(copy.get()[values_kept], wanted[values_kept])  # the bits, not the numbers
        widened = np.empty_like(values)
        host.decompress(wanted, widened)
        same = values_kept | ~np.isfinite(values)
        np.testing.assert_array_equal(backend.to_host(found)[same], widened[same])
        assert np.abs(backend.to_host(found)[~same]).max() <= np.finfo(np.float32).tiny, "too small a number grew"
    backend.close()


def test_skipped_updates_are_counted_in_graphs_and_too_many_name_the_layer(training: SubprocessTraining) -> None:
    net = "global_grad_scale: 1e38 " + NET.replace('top: "loss" }', 'top: "loss" loss_weight: 1e4 }')
    outcome = training.train("--max-skipped", "12", devices=("--gpus", "0", *EXACT), iterations=100, net_text=net)
    assert outcome.status == 1, outcome.log
    assert [line.split(" since")[0] for line in outcome.logged("skipped since")] == [
        "Iteration 0, 1 update skipped",
        "Iteration 10, 10 updates skipped",
        "Iteration 20, 10 updates skipped",
    ]
    (message,) = outcome.errors()
    assert re.search(r"iteration 20: 12 updates in a row were skipped, .* layer '(conv|ip1|ip2)'", message)


@pytest.mark.parametrize("options", [(), ("--eager",)])
def test_ignored_labels_are_counted_over_all_gpus(training: SubprocessTraining, options: tuple[str, ...]) -> None:
    need_gpus(2)
    net = NET.replace('top: "loss" }', 'top: "loss" loss_param { ignore_label: 3 } }')
    one, two = (
        training.train(*options, devices=("--gpus", gpus, *EXACT), iterations=ITERATIONS, net_text=net)
        for gpus in ("0", "0,1")
    )
    assert two.status == 0, two.log
    assert_same_weights(two, one, ITERATIONS, TOLERANCE)


def test_a_printed_score_is_that_of_the_snapshot(training: SubprocessTraining) -> None:
    """The CPU scores the snapshot: statistics of one GPU alone would differ in the third digit."""
    need_gpus(2)
    outcome = training.train(
        devices=("--gpus", "0,1", *EXACT),
        iterations=25,
        net_text=NORMALISED_NET,
        solver_text="test_initialization: false",
    )
    assert outcome.status == 0, outcome.log
    printed = [float(score.split(" = ")[1].split()[0]) for score in outcome.scores()]
    found = [float(score.split(" = ")[1].split()[0]) for score in scores_of_snapshot(outcome, 25)]
    np.testing.assert_allclose(found, printed, rtol=1e-4)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_gradients_train_nearly_the_same(
    training: SubprocessTraining, alone: Outcome, compression: str
) -> None:
    need_gpus(2)
    outcome = training.train("--compression", compression, devices=("--gpus", "0,1", *EXACT), iterations=ITERATIONS)
    assert outcome.status == 0, outcome.log
    assert_same_weights(outcome, alone, ITERATIONS, 1e-2)


@pytest.mark.parametrize("solver", ["iter_size: 2", "layer_wise_reduce: false"])
def test_the_solvers_settings_hold_on_two_gpus(training: SubprocessTraining, solver: str) -> None:
    need_gpus(2)
    one, two = (
        training.train(devices=("--gpus", gpus, *EXACT), iterations=ITERATIONS, solver_text=solver)
        for gpus in ("0", "0,1")
    )
    assert two.status == 0, two.log
    assert_same_weights(two, one, ITERATIONS, TOLERANCE)


@pytest.mark.parametrize(("ranks", "gpus"), [(0, "0,1"), (2, "{rank}")])
def test_two_gpus_train_as_one_does(training: SubprocessTraining, alone: Outcome, ranks: int, gpus: str) -> None:
    need_gpus(2)
    devices = ("--gpus", gpus, *EXACT)
    outcome = training.train(devices=devices, ranks=ranks, batch=64 // max(ranks, 1), iterations=ITERATIONS)
    assert outcome.status == 0, outcome.log
    assert_same_weights(outcome, alone, ITERATIONS, TOLERANCE)
    assert len(outcome.logged("Solver performance on device ")) == 2


def test_two_ranks_without_mpi_train_with_the_bits_of_mpis(training: SubprocessTraining) -> None:
    """NCCL's id goes through rank 0's store."""
    need_gpus(2)
    settings = {"devices": ("--gpus", "{rank}", *EXACT), "ranks": 2, "batch": 32, "iterations": ITERATIONS}
    with_mpi = training.train(**settings)
    assert with_mpi.status == 0, with_mpi.log
    without = training.train(mpi=False, FORBID="mpi4py", **settings)
    assert without.status == 0, without.log
    assert_same_weights(without, with_mpi, ITERATIONS, 0.0)
    assert len(without.logged("Solver performance on device ")) == 2


@pytest.mark.parametrize(("kind", "message"), [("raise", "ValueError: injected"), ("kill", "ended unexpectedly")])
def test_a_rank_without_mpi_that_fails_ends_all(training: SubprocessTraining, kind: str, message: str) -> None:
    need_gpus(2)
    devices = ("--gpus", "{rank}", *EXACT)
    outcome = training.train(devices=devices, ranks=2, mpi=False, batch=32, iterations=LONG, FAULT=f"{kind} 1 20")
    assert outcome.status != 0
    assert outcome.seconds_after_fault() < LIMIT
    (error,) = outcome.errors()
    assert re.search(rf"^rank 1 on .*{message}", error), error


HEIGHTS = [32] * 17 + [40] + [32] * 8 + [40, 32] * 3 + [40] * 12 + [24, 32, 40, 32] + [32] * 12
"""Of images; the second of two devices meets another one first, and alone."""
IMAGES_NET = """
layer { name: "data" type: "ImageData" top: "data" top: "label" transform_param { scale: 0.01 }
        include { phase: TRAIN } image_data_param { source: "images.txt" batch_size: %(batch)d } }
layer { name: "data" type: "ImageData" top: "data" top: "label" transform_param { scale: 0.01 }
        include { phase: TEST } image_data_param { source: "images.txt" batch_size: 2 new_height: 32 new_width: 32 } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
        convolution_param { num_output: 16 kernel_size: 5 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "conv2" type: "Convolution" bottom: "conv" top: "conv2"
        convolution_param { num_output: 10 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "pool" type: "Pooling" bottom: "conv2" top: "pool" pooling_param { pool: AVE global_pooling: true } }
%(fault)s
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip"
        inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def train_images(
    training: SubprocessTraining, *options: str, ranks: int = 0, fault: str = "", iterations: int = len(HEIGHTS) // 2
) -> Outcome:
    """Two GPUs, one image of its own size each in an iteration."""
    for number, height in enumerate(HEIGHTS):
        image = np.random.default_rng(number).integers(0, 256, (height, 32, 3), np.uint8)
        cv2.imwrite(str(training.folder / f"{number}.png"), image)
    (training.folder / "images.txt").write_text("".join(f"{n}.png {n % 10}\n" for n in range(len(HEIGHTS))))
    layer = 'layer { name: "fault" type: "Fault" bottom: "pool" top: "pool" }' if fault else ""
    net = IMAGES_NET.replace("%(fault)s", layer)
    devices = ("--gpus", "{rank}" if ranks else "0,1", *EXACT, "--timeout", "60", *options)
    return training.train(
        devices=devices,
        ranks=ranks,
        batch=1 if ranks else 2,
        iterations=iterations,
        net_text=net,
        FAULT=fault or "none -1 -1",
    )


@pytest.mark.parametrize("ranks", [0, 2])
def test_images_of_several_sizes_train_replayed_as_they_do_eagerly(training: SubprocessTraining, ranks: int) -> None:
    """One device's graphs alone no longer fit: all leave theirs, and nobody waits for ever."""
    need_gpus(2)
    replayed, eager = (train_images(training, *options, ranks=ranks) for options in ((), ("--eager",)))
    assert replayed.status == eager.status == 0, replayed.log
    assert_same_weights(replayed, eager, len(HEIGHTS) // 2, 1e-6)


@pytest.mark.parametrize("iteration", [7, 8, 9])
def test_a_stop_among_images_of_several_sizes_stops_all(training: SubprocessTraining, iteration: int) -> None:
    need_gpus(2)
    outcome = train_images(training, ranks=2, fault=f"SIGTERM 1 {iteration}", iterations=LONG)
    assert outcome.status == 0 and not outcome.errors(), outcome.log
    assert len(outcome.snapshots()) == 1, "all have stopped in the same iteration"


def test_the_first_run_of_two_ranks_gives_the_bits_of_the_next_one(training: SubprocessTraining) -> None:
    """Two ranks that tune for themselves decide alike, and as the next run does, which finds the file."""
    need_gpus(2)
    cache = str(training.new_folder())
    runs = [
        training.train(devices=("--gpus", "{rank}"), ranks=2, batch=32, iterations=ITERATIONS, XDG_CACHE_HOME=cache)
        for _ in range(2)
    ]
    assert runs[0].status == runs[1].status == 0, runs[0].log
    assert_same_weights(runs[0], runs[1], ITERATIONS, 0.0)


def test_two_ranks_of_two_gpus_train_as_one_does(training: SubprocessTraining, alone: Outcome) -> None:
    need_gpus(4)
    # 64 a pass: 2 ranks of 32, 2 threads of 16 each.
    devices = ("--gpus", "{2*rank},{2*rank+1}", *EXACT)
    outcome = training.train(devices=devices, ranks=2, batch=32, iterations=ITERATIONS)
    assert outcome.status == 0, outcome.log
    assert_same_weights(outcome, alone, ITERATIONS, TOLERANCE)


@pytest.mark.parametrize(("ranks", "gpus"), [(0, "0,1"), (2, "{rank}")])
def test_an_exception_at_one_gpu_ends_all(training: SubprocessTraining, ranks: int, gpus: str) -> None:
    need_gpus(2)
    devices = ("--gpus", gpus, *EXACT)
    outcome = training.train(devices=devices, ranks=ranks, batch=32, iterations=LONG, FAULT="raise 1 20")
    assert outcome.status == 70
    assert outcome.seconds_after_fault() < LIMIT
    (message,) = outcome.errors()
    assert re.search(r"device 1, iteration 20: layer 'fault' \(Fault\): ValueError: injected", message)


@pytest.mark.parametrize(("ranks", "gpus"), [(0, "0,1"), (2, "{rank}")])
def test_replicas_are_compared_between_graphs(training: SubprocessTraining, ranks: int, gpus: str) -> None:
    """NCCL's averages have the same bits on all GPUs; a weight that changes on one of them is found."""
    need_gpus(2)
    settings = {"devices": ("--gpus", gpus, *EXACT), "ranks": ranks, "batch": 32}
    plain = training.train(iterations=ITERATIONS, **settings)
    checked = training.train("--check-replicas", "1", iterations=ITERATIONS, **settings)
    assert checked.status == 0, checked.log
    assert_same_weights(checked, plain, ITERATIONS, TOLERANCE)
    broken = training.train("--check-replicas", "5", iterations=LONG, FAULT="change 1 12", **settings)
    assert broken.status == 1, broken.log
    (message,) = broken.errors()
    wanted = r"iteration 15: .*device \d no longer has the parameters of .*: parameter 0 of layer 'ip1'"
    assert re.search(wanted, message), message


def test_gpu_ranks_that_differ_are_refused(training: SubprocessTraining) -> None:
    need_gpus(2)
    outcome = training.train("--math", "{tf32|fp32}", devices=("--gpus", "{rank}"), ranks=2, batch=32)
    assert outcome.status == 2, outcome.log
    (message,) = outcome.errors()
    assert re.match(r"--math is tf32 on rank 0 on \S+ and fp32 on rank 1 on \S+; all ranks must train alike", message)


def test_the_root_alone_needs_the_snapshot(training: SubprocessTraining) -> None:
    """Ranks with GPUs go on, bit by bit, from a snapshot that is in rank 0's folder only."""
    need_gpus(2)
    settings = {"devices": ("--gpus", "{rank}", *EXACT), "ranks": 2, "batch": 32, "iterations": 20, "snapshot": 10}
    whole = training.train(**settings)
    assert whole.status == 0, whole.log
    folder = training.new_folder()
    for rank in range(2):
        (folder / f"rank{rank}").mkdir()
    for ending in ("caffemodel", "solverstate"):
        shutil.copy(training.folder / f"{whole.prefix}_iter_10.{ending}", folder / "rank0")
    state = f"{whole.prefix}_iter_10.solverstate"
    resumed = training.train("--snapshot", state, FOLDER=f"{folder}/rank{{rank}}", **settings)
    assert resumed.status == 0, resumed.log
    found = (folder / "rank0" / f"{resumed.prefix}_iter_20.caffemodel").read_bytes()
    assert found == (training.folder / f"{whole.prefix}_iter_20.caffemodel").read_bytes()


@pytest.mark.parametrize(("kind", "words"), [("kill", "rank 1 on .* ended unexpectedly"), ("sleep", "for rank 1 on")])
def test_a_rank_that_falls_out_is_named(training: SubprocessTraining, kind: str, words: str) -> None:
    need_gpus(2)
    outcome = training.train(
        "--timeout", "5", devices=("--gpus", "{rank}", *EXACT), ranks=2, batch=32, iterations=LONG, FAULT=f"{kind} 1 20"
    )
    assert outcome.status != 0
    assert outcome.seconds_after_fault() < 5 + LIMIT
    (message,) = outcome.errors()
    assert re.search(words, message)


@pytest.mark.parametrize("way", ["one graph", "several graphs", "eager"])
@pytest.mark.parametrize("net", [NET, NORMALISED_NET], ids=["plain", "normalised"])
def test_a_stop_ends_the_wait_for_data_and_resuming_gives_the_same_bytes(
    training: SubprocessTraining, net: str, way: str
) -> None:
    outcome, settings = stop_while_stalled(training, 1, 0, net, way)
    assert outcome.status == 0 and not outcome.errors(), outcome.log
    assert outcome.seconds_after_fault() < LIMIT, outcome.log
    assert "Optimization stopped early." in outcome.log and "is not made" in outcome.log, outcome.log
    last = outcome.snapshots()[-1]
    whole = training.train(iterations=last, **settings)
    assert outcome.contents(last) == whole.contents(last), outcome.log
    check_resuming(training, outcome, settings)


@pytest.mark.parametrize("way", ["one graph", "several graphs", "eager"])
@pytest.mark.parametrize(("device", "net"), [(0, NET), (1, NORMALISED_NET)], ids=["plain", "normalised"])
def test_of_two_gpus_one_that_waits_for_data_is_named_and_training_goes_on_from_the_last_snapshot(
    training: SubprocessTraining, device: int, net: str, way: str
) -> None:
    outcome, settings = stop_while_stalled(training, 2, device, net, way, "--timeout", "15")
    assert outcome.status != 0 and outcome.seconds_after_fault() < 15 + LIMIT, outcome.log
    (message,) = outcome.errors()
    assert re.search(rf"device (GPU )?{device},? .* record \d+ of LMDB", message), outcome.log
    assert "SIGTERM: " in outcome.log and "Optimization stopped early." not in outcome.log, outcome.log
    check_resuming(training, outcome, settings)


def stop_while_stalled(
    training: SubprocessTraining, gpus: int, device: int, net: str, way: str, *options: str
) -> tuple[Outcome, dict[str, Any]]:
    """SIGTERM to a process of which one device waits for data that never come. Returns the settings of the training.

    The layer "Fault" divides an iteration's graph unless it is told to be captured; then it fails by a timer.
    """
    need_gpus(gpus)
    net = net.replace("batch_size: %(batch)d", "batch_size: %(batch)d prefetch: 1")
    devices = ("--gpus", ",".join(map(str, range(gpus))), *EXACT, *(["--eager"] if way == "eager" else []))
    captured = {"CAPTURED": "1"} if way == "one graph" else {}
    moment = "0 2.0" if captured else "8"
    settings: dict[str, Any] = {"devices": devices, "net_text": net, **captured}
    snapshots = {"snapshot": 4} if gpus > 1 else {}
    started = training.start(*options, FAULT=f"stall {device} {moment}", iterations=LONG, **(settings | snapshots))
    training.wait_for_fault(started)
    wait_for_silence(training.log(started[1]))
    os.kill(started[0].pid, signal.SIGTERM)
    return training.finish(started, fault=time.time()), settings


def check_resuming(training: SubprocessTraining, outcome: Outcome, settings: dict[str, Any]) -> None:
    """A resumed training gives the same bytes each time, and the bytes of a training that was never ended."""
    last = outcome.snapshots()[-1]
    snapshot = f"{outcome.prefix}_iter_{last}.solverstate"
    again = [training.train("--snapshot", snapshot, iterations=last + 7, **settings) for _ in range(2)]
    assert again[0].contents(last + 7) == again[1].contents(last + 7), again[0].log
    if (
        "BatchNorm" not in settings["net_text"]
    ):  # running statistics of several devices are averaged where training stops
        whole = training.train(iterations=last + 7, **settings)
        assert again[0].contents(last + 7) == whole.contents(last + 7), again[0].log
