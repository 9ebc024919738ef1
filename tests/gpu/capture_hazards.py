"""Which calls of CUDA end a capture, made by the capturing thread itself or by another one meanwhile.

    python tests/gpu/capture_hazards.py

Tells what `CudaGraph` has to keep away: what Python's garbage collection may call in the capturing thread, and what
other solver threads call while they tune, load and free. No test of pytest's.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

TURNS = 8
"""Captures for each call."""
LAUNCHES = 200
"""Of a capture, so that another thread has time for its calls."""


def calls(backend: Any) -> dict[str, Callable[[], None]]:
    """What is called, by name; makes what it destroys before."""
    import cupy
    from cupy.cuda.compiler import compile_using_nvrtc

    runtime, kept = cupy.cuda.runtime, {"graphs": [], "streams": [], "events": [], "modules": []}
    code, _ = compile_using_nvrtc('extern "C" __global__ void nothing() {}')
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(code)
    cubin = file.name
    stream = cupy.cuda.Stream(non_blocking=True)
    memory = cupy.empty(1000)

    def graph() -> Any:
        stream.begin_capture(mode=runtime.streamCaptureModeRelaxed)
        memory.data.memset_async(0, memory.nbytes, stream)
        return stream.end_capture()

    def module() -> Any:
        return cupy.RawModule(path=cubin).get_function("nothing")

    for _ in range(40):
        kept["graphs"].append(graph())
        kept["streams"].append(cupy.cuda.Stream(non_blocking=True))
        kept["events"].append(cupy.cuda.Event())
    event = cupy.cuda.Event()
    event.record(stream)
    driver = cupy.cuda.driver
    loaded = [driver.moduleLoad(cubin) for _ in range(40)]
    blocks = [runtime.malloc(1 << 20) for _ in range(40)]
    return {
        "nothing": lambda: None,
        "cudaMalloc and cudaFree": lambda: runtime.free(runtime.malloc(1 << 20)),
        "cudaFree": lambda: runtime.free(blocks.pop()) if blocks else None,
        "cudaHostAlloc": lambda: runtime.freeHost(runtime.hostAlloc(4096, 0)),
        "cudaMemGetInfo": lambda: runtime.memGetInfo() and None,
        "cudaEventQuery": lambda: event.done and None,
        "cudaEventSynchronize": event.synchronize,
        "cudaEventDestroy": lambda: kept["events"].pop() and None if kept["events"] else None,
        "cudaStreamSynchronize": stream.synchronize,
        "cudaStreamDestroy": lambda: kept["streams"].pop() and None if kept["streams"] else None,
        "cudaGraphExecDestroy": lambda: kept["graphs"].pop() and None if kept["graphs"] else None,
        "cuModuleLoad": lambda: driver.moduleLoad(cubin) and None,
        "cuModuleUnload": lambda: driver.moduleUnload(loaded.pop()) if loaded else None,
        "cudaDeviceSynchronize": runtime.deviceSynchronize,
        "a memset on the null stream": lambda: runtime.memset(memory.data.ptr, 0, 8),
        "free_all_blocks": lambda: cupy.get_default_memory_pool().free_all_blocks(),
    }


def attempt(backend: Any, work: Callable[[], None], array: Any) -> str:
    """Capture and replay `work`; what is wrong, if anything."""
    backend.fill(array, 1.0)
    try:
        graph = backend.capture(work)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    graph.launch()
    found = float(backend.to_host(array)[0])
    return "" if found == LAUNCHES % 7 else f"replayed it gives {found:g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90, help="after which the program ends")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.seconds, exit=True)
    from caffepy.backend import create_backend

    backend = create_backend(0, autotune=False)
    ends = 0
    for name in calls(backend):
        for who in ("the capturing thread", "another thread"):
            with backend.activate():
                array = backend.zeros((1000,))
                call = calls(backend)[name]
                problems, others, stop = [], [], threading.Event()

                def other(call: Any = call, others: Any = others, stop: Any = stop) -> None:
                    while not stop.is_set():
                        try:
                            call()
                        except Exception as error:
                            others.append(f"{type(error).__name__}: {error}")

                def work(call: Any = call, own: bool = who == "the capturing thread", array: Any = array) -> None:
                    for i in range(LAUNCHES):
                        backend.fill(array, float((i + 1) % 7))
                        if own and i == LAUNCHES // 2:
                            call()

                work()
                thread = threading.Thread(target=other, daemon=True)
                if who == "another thread":
                    thread.start()
                problems = [p for p in (attempt(backend, work, array) for _ in range(TURNS)) if p]
                stop.set()
                if thread.ident is not None:
                    thread.join(20)
            ends += bool(problems)
            text = f"ends {len(problems)} of {TURNS} captures ({problems[0][:110]})" if problems else "is harmless"
            text += f"; fails itself {len(others)} times ({others[0][:90]})" if others else ""
            print(f"{name} in {who}: {text}", flush=True)
    print(f"SUMMARY capture hazards: {ends} kinds of calls end captures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
