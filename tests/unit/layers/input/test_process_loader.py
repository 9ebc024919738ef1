"""Data layers whose batches other processes fill: the same numbers, errors, and the end of the processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from image_files import jpeg, smooth_image

from caffepy.backend import create_backend
from caffepy.data.sources.databases import record_key, write_datums
from caffepy.errors import AbortedError, DataError, RunError
from caffepy.formats.proto.caffe_pb2 import TRAIN, AnnotatedDatum, Datum, LayerParameter
from caffepy.layers.blob import Blob
from caffepy.layers.layer import LayerContext, layer_class

RECORDS = 7
RESIZE = "img_rand_resize_lower: 40 img_rand_resize_upper: 60 crop_size: 32 mirror: true mean_value: 100"
BOXES = "mirror: true distort_param { brightness_prob: 0.5 brightness_delta: 32 } resize_param { height: 30 width: 40 }"


def encoded(number: int) -> bytes:
    return jpeg(smooth_image(number, 50 + number, 70))


def annotated(number: int) -> AnnotatedDatum:
    made = AnnotatedDatum(datum=Datum(data=encoded(number), encoded=True), type=AnnotatedDatum.BBOX)
    for label in range(number + 1):
        box = made.annotation_group.add(group_label=label + 1).annotation.add(instance_id=0).bbox
        box.xmin, box.ymin, box.xmax, box.ymax = 0.1, 0.2, 0.6, 0.9
    return made


def write_records(folder: Path, kind: str) -> Path:
    path = folder / kind
    make = annotated if kind == "AnnotatedData" else lambda n: Datum(data=encoded(n), encoded=True, label=n)
    write_datums(path, ((record_key(n), make(n)) for n in range(RECORDS)))
    return path


def layer_over(path: Path, kind: str, text: str, threads: int, batch: int = 4) -> Any:
    data = f"data_param {{ source: '{path}' backend: LMDB batch_size: {batch} threads: {threads} shuffle: true }}"
    param = text_format.Parse(
        f"name: 'd' type: '{kind}' top: 'x' top: 'y' {data} transform_param {{ {text} }}", LayerParameter()
    )
    layer = layer_class(kind)(param, LayerContext(create_backend(threads=1), TRAIN, seed=5))
    layer.setup([], [Blob(layer.backend), Blob(layer.backend)])
    return layer


def batches(layer: Any, count: int) -> Iterator[list[np.ndarray]]:
    number = 0
    while number < count:
        prefetcher, batch = layer.next_batch(number)
        if batch.slot is None:
            yield [array.copy() for array in batch.arrays]
        else:
            for at in range(0, batch.passes * batch.slot.size, batch.slot.size):
                yield [part.copy() for part in batch.slot.parts(batch.bytes[at : at + batch.slot.size])]
        number += batch.passes
        prefetcher.release(batch)


def processes(layer: Any) -> list[int]:
    return [loader._process.pid for loader in layer._processes if loader._process is not None]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(numbers: list[int]) -> None:
    end = time.monotonic() + 60
    while any(map(is_running, numbers)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(is_running, numbers))


@pytest.mark.parametrize(("kind", "text"), [("Data", RESIZE), ("AnnotatedData", BOXES)])
def test_processes_fill_the_batches_that_one_thread_fills(tmp_path: Path, kind: str, text: str) -> None:
    path = write_records(tmp_path, kind)
    one, several = layer_over(path, kind, text, 1), layer_over(path, kind, text, 3)
    for expected, batch in zip(batches(one, 12), batches(several, 12), strict=False):
        for array, wanted in zip(batch, expected, strict=True):
            np.testing.assert_array_equal(array, wanted)
    numbers = processes(several)
    assert len(numbers) == 3
    assert all(map(is_running, numbers))
    assert several.stage_totals()["transforming"] > 0
    assert several.processor_seconds() > 0
    assert one.processor_seconds() == 0
    one.close()
    several.close()
    wait_for_end(numbers)


def test_processes_read_what_the_layer_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_records(tmp_path, "AnnotatedData")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "random.py").write_text("raise SystemExit('this is a file of the user')")
    monkeypatch.chdir(tmp_path)
    layer = layer_over(Path("AnnotatedData"), "AnnotatedData", BOXES, 2)
    monkeypatch.chdir("elsewhere")
    assert next(batches(layer, 1))[0].shape == (4, 3, 30, 40)
    layer.close()


def test_data_that_changed_since_the_layer_opened_them_are_refused(tmp_path: Path) -> None:
    path = write_records(tmp_path, "Data")
    changed, gone = layer_over(path, "Data", RESIZE, 2), layer_over(path, "Data", RESIZE, 2)
    path.rename(tmp_path / "before")
    with pytest.raises(DataError, match=f"layer 'd' .*{path}.* when the net was made"):
        gone.next_batch(0)
    write_datums(path, ((record_key(n), Datum(data=encoded(n + 1), encoded=True)) for n in range(RECORDS)))
    with pytest.raises(DataError, match=r"layer 'd' .*the hash of the first record was \w+ .* is \w+ now"):
        changed.next_batch(0)
    gone.close()
    changed.close()


@pytest.mark.parametrize(
    ("kind", "text", "threads", "wanted"),
    [
        ("AnnotatedData", BOXES, 2, 2),
        ("Data", RESIZE, 2, 2),
        ("Data", RESIZE, 1, 0),
        ("Data", "crop_size: 32", 8, 0),
        ("Data", "crop_size: 32", 9, 9),
    ],
)
def test_processes_read_where_threads_would_wait_for_the_gil(
    tmp_path: Path, kind: str, text: str, threads: int, wanted: int
) -> None:
    layer = layer_over(write_records(tmp_path, kind), kind, text, threads)
    own = layer.make_loader()
    loaders = layer.loaders(own)
    assert [loader for loader in loaders if loader is not own] == layer._processes
    assert len(layer._processes) == wanted
    layer.close()


def test_image_lists_are_read_in_processes_unless_decoded_images_are_kept(tmp_path: Path) -> None:
    for number in range(RECORDS):
        (tmp_path / f"{number}.jpg").write_bytes(encoded(number))
    (tmp_path / "list").write_text("".join(f"{number}.jpg {number}\n" for number in range(RECORDS)))
    found = []
    for settings in ("threads: 1", "threads: 2", "threads: 2 cache: true"):
        data = f"source: '{tmp_path}/list' root_folder: '{tmp_path}/' batch_size: 4 {settings}"
        param = text_format.Parse(
            f"name: 'd' type: 'ImageData' top: 'x' top: 'y' image_data_param {{ {data} new_height: 40 new_width: 50 }}",
            LayerParameter(),
        )
        layer = layer_class("ImageData")(param, LayerContext(create_backend(threads=1), TRAIN, seed=5))
        layer.setup([], [Blob(layer.backend), Blob(layer.backend)])
        found.append((list(batches(layer, 4)), len(processes(layer))))
        layer.close()
    assert [count for _, count in found] == [0, 2, 0]
    expected, *others = (taken for taken, _ in found)
    for taken in others:
        for batch, wanted in zip(taken[:4], expected, strict=False):
            for array, same in zip(batch, wanted, strict=True):
                np.testing.assert_array_equal(array, same)


def test_a_record_that_cannot_be_read_is_named_after_the_batches_before_it(tmp_path: Path) -> None:
    path = tmp_path / "db"
    datums = [Datum(data=encoded(n)[: 30 if n == 5 else None], encoded=True) for n in range(8)]
    write_datums(path, ((record_key(n), datum) for n, datum in enumerate(datums)))
    layer = layer_over(path, "Data", RESIZE, 2, batch=2)
    layer.param.data_param.shuffle = False
    taken = batches(layer, 4)
    next(taken)
    next(taken)
    with pytest.raises(DataError, match=f"layer 'd' .*: LMDB '{path}': record 5 .*30 bytes"):
        next(taken)
    layer.close()


def test_a_layer_is_closed_while_processes_fill_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layer = layer_over(write_records(tmp_path, "AnnotatedData"), "AnnotatedData", BOXES, 2, batch=100_000)
    errors = []

    def wait() -> None:
        try:
            layer.next_batch(0)
        except AbortedError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    end = time.monotonic() + 60
    while len(processes(layer)) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    numbers = processes(layer)
    layer.close()
    waiter.join(60)
    wait_for_end(numbers)
    assert len(errors) == 1
    assert "did not stop" not in caplog.text


def test_a_process_that_was_killed_is_reported(tmp_path: Path) -> None:
    layer = layer_over(write_records(tmp_path, "AnnotatedData"), "AnnotatedData", BOXES, 2)
    taken = batches(layer, 1000)
    next(taken)
    os.kill(processes(layer)[0], signal.SIGKILL)
    with pytest.raises(RunError, match=r"layer 'd' .*record \d .* exit status -9"):
        for _ in taken:
            time.sleep(0.01)
    layer.close()


def test_warnings_of_several_processes_are_shown_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "db"
    plain = smooth_image(0, 50, 70).transpose(2, 0, 1)
    records = [annotated(n) for n in range(RECORDS)]
    for record in records[1:]:
        record.datum.CopyFrom(Datum(channels=3, height=50, width=70, data=np.ascontiguousarray(plain).tobytes()))
    write_datums(path, ((record_key(n), record) for n, record in enumerate(records)))
    layer = layer_over(path, "AnnotatedData", BOXES, 2)
    with caplog.at_level(logging.WARNING):
        list(batches(layer, 6))
    layer.close()
    assert [record.getMessage() for record in caplog.records] == [
        "layer 'd' (AnnotatedData): distort_param affects encoded records only, as in Caffe"
    ]


def test_processes_end_with_the_trainer(tmp_path: Path) -> None:
    path = write_records(tmp_path, "AnnotatedData")
    code = f"""
import sys, time
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
from pathlib import Path
from test_process_loader import BOXES, batches, layer_over, processes
layer = layer_over(Path({str(path)!r}), "AnnotatedData", BOXES, 2)
next(batches(layer, 1))
while len(processes(layer)) < 2: time.sleep(0.01)
print(*processes(layer), flush=True)
time.sleep(300)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    numbers = list(map(int, trainer.stdout.readline().split()))
    assert len(numbers) == 2
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    wait_for_end(numbers)


@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_starts_processes_of_its_own(tmp_path: Path) -> None:
    path = write_records(tmp_path, "AnnotatedData")
    layer = layer_over(path, "AnnotatedData", BOXES, 2)
    expected = next(batches(layer, 1))
    parents = processes(layer)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            batch = next(batches(layer, 1))
            same = all(map(np.array_equal, batch, expected))
            status = 0 if same and not set(processes(layer)) & set(parents) else 2
            layer.close()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert all(map(is_running, parents))
    layer.close()
