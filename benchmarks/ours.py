"""caffepy's side of the benchmarks: a process that reads a job as JSON, measures a net of models/, and prints JSON.

A job is one line: a net's name, `train`, batch, device (cpu, gpu), dtype (FLOAT, FLOAT16, BFLOAT16), `quick`, `avx2`
(vectors of eight), and the number of `turns` that a `Side` asks for. With a `file` it writes the net as ONNX instead,
or with `engine: onnxruntime` measures that file.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import alone, measure, measure_job, narrow_vectors, repeated
from zoo_nets import net_param, values

GIB = 2**30
DTYPES = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}


def make_solver(name: str, kind: str, batch: int, backend: Any, engine: Any = None) -> Any:
    """A solver of one of the nets, its made-up inputs already on the backend, which must be active."""
    from caffepy.formats.proto import caffe_pb2
    from caffepy.training.solver import create_solver

    net, made = net_param(name, True, batch, "DummyData")
    net.default_forward_type = net.default_backward_type = caffe_pb2.Type.Value(kind)
    param = caffe_pb2.SolverParameter(
        net_param=net,
        base_lr=1e-9,
        lr_policy="fixed",
        momentum=0.9,
        weight_decay=5e-4,
        max_iter=10**6,
        random_seed=1,
        snapshot_after_train=False,
        type="SGD",
    )
    solver = create_solver(param, backend, **({"engine": engine} if engine else {}))
    solver.net.forward()
    for seed, (blob, each) in enumerate(made.items()):
        backend.from_host(values(each, seed), solver.net.blobs[blob].data)
    return solver


def make_model(name: str, kind: str, batch: int, device: int | None, threads: int | None = None) -> tuple[Any, Any]:
    """`caffepy.load`'s model of one of the nets with made-up weights, and its inputs."""
    from google.protobuf import text_format
    from peers.agreement import fill

    import caffepy

    net, made = net_param(name, False, batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deploy.prototxt"
        path.write_text(text_format.MessageToString(net))
        model = caffepy.load(path, device=device, dtype=DTYPES[kind], threads=threads)
    with model.backend.activate():
        fill(model.net)
    return model, {blob: values(each, seed) for seed, (blob, each) in enumerate(made.items())}


def steps_of(solver: Any) -> Callable[[int], None]:
    """Makes so many iterations and waits for them."""

    def run(count: int) -> None:
        solver.step(count)
        solver.backend.synchronize()

    return run


def memory(device: str) -> dict[str, float]:
    """GiB: of live arrays and with what the pool keeps; on the CPU the process's largest resident set."""
    if device == "cpu":
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        return {"gib": largest, "held": largest}
    import cupy

    pool = cupy.get_default_memory_pool()
    return {"gib": pool.used_bytes() / GIB, "held": pool.total_bytes() / GIB}


def train(job: dict[str, Any]) -> dict[str, Any]:
    """A training iteration."""
    from caffepy.backend import create_backend

    backend = create_backend(0 if job["device"] == "gpu" else None, job.get("threads"), "tf32")
    with alone(job.get("lock", ""), job.get("limit", 280)), backend.activate():
        begin = time.perf_counter()
        solver = make_solver(job["name"], job["dtype"], job["batch"], backend)
        steps = steps_of(solver)
        steps(3)
        ready = time.perf_counter() - begin
        milliseconds = measure_job(steps, job)
        found = {"ms": milliseconds, **memory(job["device"]), "ready": ready, "loss": solver.net.loss()}
        found["captured"] = solver.graph_executor.captured if job["device"] == "gpu" else False
        solver.close()
    return found


def predict(job: dict[str, Any]) -> dict[str, Any]:
    """A forward pass, its inputs already there, and a whole call with arrays of NumPy."""
    model, arrays = make_model(
        job["name"], job["dtype"], job["batch"], 0 if job["device"] == "gpu" else None, job.get("threads")
    )
    with alone(job.get("lock", ""), job.get("limit", 280)):
        begin = time.perf_counter()
        model(**arrays)
        model(**arrays)
        ready = time.perf_counter() - begin
        executor = next(iter(model._executors.values()))
        with model.backend.activate():
            run = repeated(executor.forward, model.backend.synchronize)
            milliseconds = measure_job(run, job)
        call = measure(repeated(lambda: model(**arrays)), True)
        found = {"ms": milliseconds, **memory(job["device"]), "ready": ready, "call": call}
        return {**found, "captured": executor.captured}


def pycaffe(job: dict[str, Any]) -> dict[str, Any]:
    """Calls of pycaffe's `Net.forward` with an array of NumPy, and the same layer by layer."""
    from google.protobuf import text_format
    from peers.agreement import fill

    from caffepy import pycaffe as caffe
    from caffepy.formats.proto import caffe_pb2

    param, made = net_param(job["name"], False, job["batch"])
    param.default_forward_type = param.default_backward_type = caffe_pb2.Type.Value(job["dtype"])
    if job["device"] == "gpu":
        caffe.set_device(0)
        caffe.set_mode_gpu()
    found = {}
    with tempfile.TemporaryDirectory() as folder, alone(job.get("lock", ""), job.get("limit", 280)):
        path = Path(folder) / "deploy.prototxt"
        path.write_text(text_format.MessageToString(param))
        arrays = {blob: values(each, seed) for seed, (blob, each) in enumerate(made.items())}
        for name, plain in (("call", False), ("plain", True)):
            caffe.set_layer_by_layer(plain)
            net = caffe.Net(path, caffe.TEST)
            with net.device.computing():
                fill(net._core)
            for _ in range(3):
                net.forward(**arrays)
            found[name] = measure(repeated(lambda net=net: net.forward(**arrays)), True)
    return {"ms": found["call"], **found, **memory(job["device"])}


def export(job: dict[str, Any]) -> dict[str, Any]:
    """Write the net as ONNX."""
    from peers.agreement import fill

    from caffepy.backend import create_backend
    from caffepy.export.onnx.write import serialised, to_model
    from caffepy.formats.proto import caffe_pb2
    from caffepy.layers.layer import LayerContext
    from caffepy.net import Net

    backend = create_backend(None)
    with backend.activate():
        net = Net(net_param(job["name"], False, job["batch"])[0], LayerContext(backend, phase=caffe_pb2.TEST))
        fill(net)
        Path(job["file"]).write_bytes(serialised(to_model(net)))
    return {}


def onnxruntime(job: dict[str, Any]) -> dict[str, Any]:
    """A pass of the ONNX file by onnxruntime."""
    import onnxruntime as engine

    options = engine.SessionOptions()
    options.intra_op_num_threads = job.get("threads") or 0
    begin = time.perf_counter()
    session = engine.InferenceSession(job["file"], options, providers=["CPUExecutionProvider"])
    wanted = {each.name for each in session.get_inputs()}
    arrays = {blob: values(each, seed) for seed, (blob, each) in enumerate(job["inputs"].items()) if blob in wanted}
    session.run(None, arrays)
    ready = time.perf_counter() - begin
    run = repeated(lambda: session.run(None, arrays))
    milliseconds = measure_job(run, job)
    return {"ms": milliseconds, **memory("cpu"), "ready": ready}


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """What the job says."""
    if job.get("avx2"):
        narrow_vectors()
    if job.get("engine") == "onnxruntime":
        return onnxruntime(job)
    if "file" in job:
        return export(job)
    if job.get("engine") == "pycaffe":
        return pycaffe(job)
    return train(job) if job["train"] else predict(job)


if __name__ == "__main__":
    print(json.dumps(run_job(json.loads(sys.stdin.readline()))))
