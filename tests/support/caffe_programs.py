"""Random programs on `caffe.Net`, run on one that takes the fast passes and on one that runs layer by layer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from compare_nets import Differences, differences, give_parameters
from wide_nets import Values, WideNet

from caffepy import pycaffe as caffe
from caffepy.errors import UserError


class Programs:
    """The same random program on two `caffe.Net`, one of which runs layer by layer."""

    def __init__(self, wide: WideNet, folder: Path, attempt: int = 0) -> None:
        self._wide = wide
        self._random = Random(wide.seed)  # other inputs, the same program: a fault must show in each attempt
        self._attempt = attempt
        path = folder / "net.prototxt"
        path.write_text(wide.text)
        self._folder = folder
        self.nets = []
        for plain in (False, True):
            caffe.set_random_seed(3)
            caffe.set_layer_by_layer(plain)
            self.nets.append(caffe.Net(str(path), caffe.TEST))
        caffe.set_layer_by_layer(False)
        caffe.set_random_seed(4)
        self._other = caffe.Net(str(path), caffe.TEST)
        self._other.save(str(folder / "other.caffemodel"))
        for net in self.nets:
            give_parameters(net._core)
        self._held: list[tuple[Any, Any]] = []
        self._number = 0
        self.batch = 1
        self.folded = 0
        self.done: list[str] = []

    def run(self, steps: int) -> Differences:
        """Do some steps; the first differences."""
        names = list(self._steps())
        for _ in range(steps):
            what = self._random.choices(names, [self._steps()[name][0] for name in names])[0]
            self.done.append(what)
            found = self._steps()[what][1]()
            found.update(self._outputs(what))
            self.folded += self.nets[0]._inference._last is not None
            if found:
                return found
        return self._compare_all("the end")

    def _steps(self) -> dict[str, tuple[float, Callable[[], Differences]]]:
        return {
            "pass": (12, self._pass),
            "pass on written inputs": (3, self._pass_on_written),
            "look": (0.4, self._look),
            "hold": (0.3, self._hold),
            "write parameter": (1, self._write_parameter),
            "save": (0.5, self._save),
            "read parameter": (0.5, self._read_parameter),
            "reshape": (1, self._reshape),
            "copy": (0.5, self._copy),
            "share": (0.2, self._share),
            "part": (0.2, self._part),
            "shapes": (0.5, self._shapes),
            "back": (0.1, self._backward),
            "pass again": (1, self._again),
            "release": (0.5, self._release),
            "write held": (0.5, self._write_held),
            "hold parameter": (0.4, self._hold_parameter),
            "hdf5": (0.4, self._hdf5),
            "names": (1, self._names),
            "reshape one": (0.5, self._reshape_alone),
            "write output": (0.5, self._write_output),
        }

    def _pass(self) -> Differences:
        values = self._values()
        pair = [{n: a.copy() for n, a in net.forward(**values).items()} for net in self.nets]
        return differences(*pair, where=f"step {len(self.done)}, pass")

    def _values(self) -> Values:
        self._number += 1
        return self._wide.values(1000 * self._attempt + self._number, self.batch)

    def _pass_on_written(self) -> Differences:
        values = self._values()
        for net in self.nets:
            for name, array in values.items():
                net.blobs[name].data[...] = array
            net.forward()
        return {}

    def _again(self) -> Differences:
        for net in self.nets:
            net.forward()
        return {}

    def _look(self) -> Differences:
        name = self._random.choice(list(self.nets[0].blobs))
        pair = [{name: net.blobs[name].data.copy()} for net in self.nets]
        return differences(*pair, where=f"step {len(self.done)}, look")

    def _hold(self) -> Differences:
        name = self._random.choice(list(self.nets[0].blobs))
        first, second = (net.blobs[name].data for net in self.nets)
        self._held.append((first, second))
        return {}

    def _parameter(self) -> tuple[str, int] | None:
        names = [(name, i) for name, blobs in self.nets[0].params.items() for i in range(len(blobs))]
        return self._random.choice(names) if names else None

    def _write_parameter(self) -> Differences:
        if chosen := self._parameter():
            for net in self.nets:
                net.params[chosen[0]][chosen[1]].data[...] *= 1.5
            if self._random.random() < 0.7:
                self._pass()
        return {}

    def _read_parameter(self) -> Differences:
        if not (chosen := self._parameter()):
            return {}
        pair = [{"p": net.params[chosen[0]][chosen[1]].data.copy()} for net in self.nets]
        return differences(*pair, where=f"step {len(self.done)}, parameter {chosen}", limit=0)

    def _save(self) -> Differences:
        files = []
        for index, net in enumerate(self.nets):
            net.save(str(self._folder / f"{index}.caffemodel"))
            files.append((self._folder / f"{index}.caffemodel").read_bytes())
        return {} if files[0] == files[1] else {"saved files": np.inf}

    def _copy(self) -> Differences:
        for net in self.nets:
            net.copy_from(str(self._folder / "other.caffemodel"))
        return {}

    def _share(self) -> Differences:
        for net in self.nets:
            net.share_with(self._other)
        return {}

    def _reshape(self) -> Differences:
        before, self.batch = self.batch, self._random.choice([1, 2])
        shapes = {name: array.shape for name, array in self._values().items()}
        errors = [self._reshape_one(net, shapes) for net in self.nets]
        if any(errors):
            self.batch = before
            shapes = {name: array.shape for name, array in self._values().items()}
            errors += [self._reshape_one(net, shapes) for net in self.nets]
            self._pass()  # what was refused leaves hidden blobs of the one net without numbers
        return {} if errors[0] == errors[1] else {f"reshape: {errors}": np.inf}

    def _reshape_one(self, net: caffe.Net, shapes: dict[str, tuple[int, ...]]) -> str:
        try:
            for name, shape in shapes.items():
                net.blobs[name].reshape(*shape)
            net.reshape()
        except UserError as error:
            return str(error)
        return ""

    def _release(self) -> Differences:
        self._held.clear()
        return {}

    def _write_held(self) -> Differences:
        for pair in self._held[-1:]:
            for array in pair:
                array[...] *= 0.5
        return {}

    def _hold_parameter(self) -> Differences:
        if chosen := self._parameter():
            first, second = (net.params[chosen[0]][chosen[1]].data for net in self.nets)
            self._held.append((first, second))
        return {}

    def _hdf5(self) -> Differences:
        for net in self.nets:
            net.save_hdf5(str(self._folder / "net.h5"))
            net.load_hdf5(str(self._folder / "net.h5"))
        return {}

    def _reshape_alone(self) -> Differences:
        """The program reshapes an input and lets `forward` reshape the rest."""
        if self.batch != 1:
            return {}
        for net in self.nets:
            net.blobs["data"].reshape(*self._wide.inputs["data"][0])
        return {}

    def _names(self) -> Differences:
        """A pass that returns a hidden blob as well."""
        name, values = self._random.choice(list(self.nets[0].blobs)), self._values()
        pair = [{n: a.copy() for n, a in net.forward(blobs=[name], **values).items()} for net in self.nets]
        return differences(*pair, where=f"step {len(self.done)}, pass with {name}")

    def _write_output(self) -> Differences:
        name = self._random.choice(list(self.nets[0].outputs))
        for net in self.nets:
            net.blobs[name].data[...] = 0.25
        return {}

    def _shapes(self) -> Differences:
        shapes = [{name: np.array(blob.shape) for name, blob in net.blobs.items()} for net in self.nets]
        return differences(*shapes, where=f"step {len(self.done)}, shapes", limit=0)

    def _part(self) -> Differences:
        layers = list(self.nets[0]._layer_names)
        start = self._random.choice(layers)
        for net in self.nets:
            net.forward(start=start)
        return {}

    def _backward(self) -> Differences:
        for net in self.nets:
            net.forward()
            net.backward()
        found: Differences = {}
        for name, blobs in self.nets[0].params.items():
            pairs = zip(blobs, self.nets[1].params[name], strict=True)
            for index, (mine, theirs) in enumerate(pairs):
                pair = {"d": mine.diff}, {"d": theirs.diff}
                found.update(differences(*pair, where=f"step {len(self.done)}, {name}[{index}]"))
        return found

    def _outputs(self, what: str) -> Differences:
        where = f"step {len(self.done)} ({what})"
        pair = [{name: net.blobs[name].data.copy() for name in net.outputs} for net in self.nets]
        found = differences(*pair, where=where)
        for index, (mine, theirs) in enumerate(self._held):
            found.update(differences({"held": mine.copy()}, {"held": theirs.copy()}, f"{where}, array {index}"))
        return found

    def _compare_all(self, where: str) -> Differences:
        pair = [{name: blob.data.copy() for name, blob in net.blobs.items()} for net in self.nets]
        return differences(*pair, where=where)


def compare_programs(wide: WideNet, attempt: int = 0) -> Differences:
    """`caffe.Net` as it runs by itself, and layer by layer."""
    with tempfile.TemporaryDirectory() as folder:
        programs = Programs(wide, Path(folder), attempt)
        found = programs.run(20)
        return {f"{name} after {', '.join(programs.done)}": error for name, error in found.items()}
