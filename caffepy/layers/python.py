"""Layers of users' classes: the layer type Python, and registered types.

The layer type Python (`python_param { module layer param_str share_in_parallel }`) and a registered class with `setup`
or `reshape` have the methods of pycaffe's `caffe.Layer`: setup, reshape, forward and backward. They receive blobs whose
data and diff are NumPy arrays on the host. Any other registered class has methods on shapes and arrays
(`ArrayLayer`).

Loading of a user's class for a Python layer, and errors that name the user's file and line.

The rank of a solver and the number of solvers, which a user's Python layer asks for to divide its own data.

pycaffe's `solver_rank()` and `solver_count()` read them. Each solver thread has its own.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from caffepy.errors import CaffepyError, ConfigError, RunError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob, FourAxes
from caffepy.layers.layer import Blobs, Layer, LayerContext, register_layer

log = logging.getLogger(__name__)


REQUIRED_METHODS = ("setup", "reshape", "forward")
_OF_SETUP = ("setup", "reshape", "shape", "parameters")
"""Methods whose errors are of the net, not of a pass."""

_lock = threading.RLock()
"""Guards imports and `_shared`: the devices of a process build their nets at the same time."""


class UserCodeError(CaffepyError):
    """An exception in a user's Python code. The original exception is the cause."""


class _SetupError(UserCodeError, ConfigError):
    """A method of `_OF_SETUP` raised."""


class _PassError(UserCodeError, RunError):
    """Another method raised."""


class PythonObject:
    """A user's object, and the lock that serialises the devices that share it."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance
        self.lock = threading.RLock()


_shared: WeakValueDictionary[tuple[Any, ...], PythonObject] = WeakValueDictionary()


def find_class(module_name: str, class_name: str, resolve: Callable[[str], Path], where: str) -> Any:
    """Import the module from sys.path or from the prototxt's folder, and return the class.

    Raises:
        ConfigError: the module or the class does not exist, the import fails, or the class lacks methods.
    """
    with _lock:
        module = _import(module_name, resolve, where)
    cls, file = getattr(module, class_name, None), getattr(module, "__file__", "without a file")
    if cls is None:
        raise ConfigError(f"{where}: module '{module_name}' ({file}) has no class '{class_name}'")
    check_methods(cls, f"{where}: class {describe_class(cls)}")
    return cls


def describe_class(cls: Any) -> str:
    """Return a user's class and the file of its module, for messages."""
    return f"'{cls.__name__}' of {getattr(sys.modules.get(cls.__module__), '__file__', 'without a file')}"


def check_methods(cls: Any, what: str, needed: Sequence[str] = REQUIRED_METHODS) -> None:
    """Check that a class has the methods of a Python layer; `what` it is called in the message.

    Raises:
        ConfigError: a method is missing.
    """
    missing = [name for name in needed if not callable(getattr(cls, name, None))]
    if missing:
        raise ConfigError(f"{what} lacks {', '.join(missing)}")


def _import(name: str, resolve: Callable[[str], Path], where: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        beside = resolve(name.replace(".", "/") + ".py")
        if error.name not in (name, name.split(".")[0]):
            raise _import_error(name, error, where) from error
        if not beside.is_file():
            raise ConfigError(
                f"{where}: no module '{name}' on PYTHONPATH, in the working directory or beside the prototxt; add its "
                "folder to PYTHONPATH"
            ) from None
    except Exception as error:
        raise _import_error(name, error, where) from error
    sys.path.append(str(beside.resolve().parents[name.count(".")]))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _import_error(name, error, where) from error


def _import_error(name: str, error: Exception, where: str) -> ConfigError:
    if isinstance(error, ModuleNotFoundError) and error.name == "caffe":
        return ConfigError(
            f"{where}: module '{name}' imports caffe, which is not installed; import caffepy.as_caffe before it: it "
            "registers caffepy.pycaffe as 'caffe'"
        )
    return ConfigError(f"{where}: cannot import module '{name}': {describe(error)}")


def describe(error: BaseException, file: str = "") -> str:
    """Return an exception as one line: file, line, type and message. Prefer the last frame in `file`."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if frame.filename == file] or frames
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno}: {type(error).__name__}: {error}"


@contextmanager
def user_errors(method: str, instance: Any, where: str) -> Iterator[None]:
    """Turn an exception in a user's method into one line with the layer, the file and the line.

    Raises:
        ConfigError: a method that the net calls when it is built raised an exception.
        RunError: another method raised an exception.
    """
    try:
        yield
    except CaffepyError:
        raise
    except Exception as error:
        module = sys.modules.get(type(instance).__module__)
        message = f"{where}: {method}: {describe(error, getattr(module, '__file__', '') or '')}"
        raise (_SetupError if method in _OF_SETUP else _PassError)(message) from error


def make_object(cls: Any, key: tuple[Any, ...] | None, where: str) -> PythonObject:
    """Return a new object of a user's class, or with a `key` the object that all layers of that key share.

    Raises:
        ConfigError: the constructor raised an exception.
    """

    def make() -> PythonObject:
        with user_errors("setup", cls, where):
            return PythonObject(cls())

    if key is None:
        return make()
    with _lock:
        shared = _shared.get(key)
        if shared is None:
            shared = _shared[key] = make()
        return shared


Place = tuple[int, int]
"""Rank and number of solvers."""


class _Solver(threading.local):
    """What the calling thread is."""

    place: Place | None = None
    asked = False


_thread = _Solver()
_process: list[Place] = []
"""The place of a process with one solver, for threads that a user's code starts."""


@contextmanager
def acting_as(place: Place, whole_process: bool = False) -> Iterator[None]:
    """Let the calling thread be a solver within a `with` block.

    Args:
        place: its rank, and the number of solvers.
        whole_process: whether the process has no other solver; then its other threads have the place too.
    """
    before, _thread.place = _thread.place, place
    if whole_process:
        _process[:] = [place]
    try:
        yield
    finally:
        _thread.place = before
        if whole_process:
            _process.clear()


def ask_place() -> Place | None:
    """Return the calling thread's place, else the process's; None: neither has one. Notes the question."""
    _thread.asked = True
    return _thread.place or (_process[0] if _process else None)


def take_question() -> bool:
    """Return whether the calling thread has asked since the last call."""
    asked, _thread.asked = _thread.asked, False
    return asked


_DECLARED = (
    "bottoms",
    "tops",
    "equal_bottoms_and_tops",
    "is_loss",
    "auto_tops",
    "no_gradient_bottoms",
    "exact_bottoms",
    "no_gradient_tops",
    "has_backward",
)
"""Class variables of `Layer` that a registered class may declare."""


class Phase(IntEnum):
    """The phase of a user's layer: pycaffe's number, which prints as its name, as in Fast R-CNN's pycaffe."""

    TRAIN = caffe_pb2.TRAIN
    TEST = caffe_pb2.TEST

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return format(int(self), spec) if spec else self.name


class PythonLayerBase:
    """Optional base class of a user's class. Any class with these methods is accepted.

    The layer sets `param`, the layer's prototxt, before `setup`, and these attributes before each call: `param_str`,
    also as `param_str_`, `phase` (0: TRAIN, 1: TEST; str(phase) is the name), `blobs` (the parameters;
    `add_blob(*shape)` makes one), `rank` and `world_size` (of this device among the devices that divide the data,
    as `caffe.solver_rank()` and `caffe.solver_count()`). bottom and top are lists of blobs with `shape`, `num`,
    `channels`, `height`, `width`, `count`, `reshape(*shape)`, and the NumPy arrays `data` and `diff`, which are written
    in place (`top[0].data[...] = …`).
    """

    depends_on_earlier_passes: bool
    """Whether passes must run one after the other on one device: by default in TEST, not in TRAIN. A class without
    state that says False lets devices divide the batches of a test."""
    type: str = "Python"
    param: caffe_pb2.LayerParameter
    param_str: str
    param_str_: str
    phase: Phase
    blobs: ParameterBlobs
    rank: int
    world_size: int

    def setup(self, bottom: Sequence[HostBlob], top: Sequence[HostBlob]) -> None:
        """Read `param_str`, check the blobs and make parameters. Called once."""

    def reshape(self, bottom: Sequence[HostBlob], top: Sequence[HostBlob]) -> None:
        """Set the tops' shapes. Called before every forward pass."""
        raise NotImplementedError

    def forward(self, bottom: Sequence[HostBlob], top: Sequence[HostBlob]) -> None:
        """Write the tops' data."""
        raise NotImplementedError

    def backward(self, top: Sequence[HostBlob], propagate_down: list[bool], bottom: Sequence[HostBlob]) -> None:
        """Write the diffs of the bottoms that `propagate_down` marks, and add to those of the parameters."""
        raise NotImplementedError


_TO_BE_WRITTEN = (PythonLayerBase.reshape, PythonLayerBase.forward, PythonLayerBase.backward)


@register_layer("Python")
class PythonLayer(Layer):
    """Calls the methods of a user's object (Caffe's `python_layer.hpp`).

    Data of bottoms and parameters are copied to the host when the object reads them. Data of tops are copied to the
    device after `forward`, diffs of bottoms and parameters after `backward`. A bottom's diff that the object writes in
    `forward` keeps its values until `backward`. Each device has its own object. With `share_in_parallel` the training
    devices of a process share one object: they call it in turns, and each of them calls its `setup`.

    Raises:
        ConfigError: module or class cannot be loaded, or `setup` or `reshape` raised an exception.
        RunError: `forward` or `backward` raised an exception.
    """

    bottoms = (0, None)
    tops = (0, None)
    learns = True
    changes_shapes: ClassVar[bool] = True
    """`reshape` may read the bottoms' data."""
    may_keep_shapes = True

    _object: PythonObject
    user_class: ClassVar[Any] = None
    """The class of a registered type; None: `python_param` names it."""
    blobs_between_calls: Any = None
    """The value of the object's attribute `blobs` between calls of its methods (pycaffe); None: as in its methods."""

    @property
    def instance(self) -> Any:
        """The user's object."""
        return self._object.instance

    @classmethod
    def calling(cls, type_name: str, user_class: Any) -> type[Layer]:
        """Return the layer class of a registered type, which calls objects of `user_class`.

        A class with neither `setup` nor `reshape` has the methods of `ArrayLayer`.

        Raises:
            ConfigError: the class lacks methods.
        """
        takes_blobs = hasattr(user_class, "setup") or hasattr(user_class, "reshape")
        needed = REQUIRED_METHODS if takes_blobs else ("forward",)
        check_methods(user_class, f"layer type '{type_name}': class '{user_class.__name__}'", needed)
        names = {"__doc__": user_class.__doc__, "__module__": user_class.__module__, "user_class": user_class}
        names |= {name: getattr(user_class, name) for name in _DECLARED if hasattr(user_class, name)}
        if takes_blobs:
            return type(user_class.__name__, (cls,), names)
        # A layer with parameters refuses its first backward pass, as no later layer asks for its bottom's gradient.
        differentiable = hasattr(user_class, "backward") or hasattr(user_class, "parameters")
        return type(user_class.__name__, (ArrayLayer,), {"has_backward": differentiable} | names)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        cls = self._find_class()
        shared = self.param.python_param.share_in_parallel and self.context.shard.training
        self._object = make_object(cls, self._key(cls) if shared else None, self.where)
        instance = self._object.instance
        if not hasattr(instance, "param"):  # an attribute of the user's own stays
            instance.param = self.param
        if isinstance(instance, PythonLayerBase):
            instance.type = self.type
        self._blobs: dict[Blob, HostBlob] = {}
        self._parameters = ParameterBlobs(self._make_parameter)
        self._asked = _reads_rank(cls)
        self._call("setup", self._hosts(bottom), self._hosts(top))
        for blob in self._parameters:
            blob.upload("data")

    def _find_class(self) -> Any:
        return self._class_of(self.param, self.context)

    @classmethod
    def _class_of(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> Any:
        if cls.user_class is not None:
            return cls.user_class
        names, where = param.python_param, f"layer '{param.name}' ({param.type})"
        if not names.module or not names.layer:
            raise ConfigError(f"{where}: python_param needs module and layer")
        return find_class(names.module, names.layer, context.resolve, where)

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """What the class says; else in TEST, as a user's code may keep anything. A training gives each device its own
        object, as Caffe does."""
        declared = getattr(cls._class_of(param, context), "depends_on_earlier_passes", None)
        return context.phase == caffe_pb2.TEST if declared is None else bool(declared)

    def _key(self, cls: Any) -> tuple[Any, ...]:
        """Return the key that the replicas of this layer on the training devices of this process have in common."""
        training, number = self.context.shard.training, self.context.net_number
        return (cls, training, number, self.random_name, self.param.python_param.param_str, self.backend.holds_values)

    def _make_parameter(self, shape: tuple[int, ...]) -> Blob:
        return self.add_parameter(shape, caffe_pb2.FillerParameter(value=0))

    def _hosts(self, blobs: Blobs) -> list[HostBlob]:
        for blob in blobs:
            if blob not in self._blobs:
                self._blobs[blob] = HostBlob(blob)
        return [self._blobs[blob] for blob in blobs]

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of the user's object under its lock."""
        shard = self.context.shard
        place = shard.part, shard.parts
        solver = acting_as(place) if shard.world_size > 1 else nullcontext()
        take_question()
        with self._object.lock, user_errors(method, self._object.instance, self.where), solver:
            instance = self._object.instance
            function = getattr(instance, method, None)
            if function is None or getattr(function, "__func__", None) in _TO_BE_WRITTEN:
                raise self.error(f"class {describe_class(type(instance))} lacks {method}")
            instance.param_str = instance.param_str_ = self.param.python_param.param_str
            instance.phase = Phase(self.context.phase)
            for host, blob in zip(self._parameters, self.blobs, strict=True):
                host.blob = blob  # after `setup` the net may replace it by a parameter shared by name
            instance.blobs = self._parameters
            instance.rank, instance.world_size = place
            try:
                function(*arguments)
            finally:
                self._asked |= take_question()
                if self.blobs_between_calls is not None:
                    instance.blobs = self.blobs_between_calls

    def _warn_if_never_asked(self) -> None:
        """Name a data layer of a training that gives each device the same samples, as far as can be told."""
        shard = self.context.shard
        if not self._asked and not self.param.bottom and self.context.phase == caffe_pb2.TRAIN and shard.parts > 1:
            self._asked = True
            if shard.rank == 0:
                log.warning(
                    "%s makes data and has never asked for caffe.solver_rank() and caffe.solver_count(): unless it "
                    "divides its data by other means, all %d devices train on the same samples",
                    self.where,
                    shard.parts,
                )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for host in self._hosts(bottom):
            host.invalidate("data")
        self._call("reshape", self._hosts(bottom), self._hosts(top))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self.backend.holds_values:
            self._trace([blob.data for blob in bottom], [blob.data for blob in top])
            return
        bottoms, tops = self._hosts(bottom), self._hosts(top)
        for host in tops:
            host.mark_current("data")
        for host in (*bottoms, *self._parameters):
            host.invalidate("data")
            host.mark_current("diff")
        self._call("reshape", bottoms, tops)
        self._call("forward", bottoms, tops)
        self._warn_if_never_asked()
        for host in tops:
            host.upload("data")

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        wanted = [blob for blob, down in zip(bottom, propagate_down, strict=True) if down]
        if not self.backend.holds_values:
            read = [array for blob in top for array in (blob.data, blob.diff)] + [blob.data for blob in bottom]
            self._trace(read, [blob.diff for blob in wanted])
            return
        tops, bottoms = self._hosts(top), self._hosts(bottom)
        for host in tops:
            host.invalidate("diff")
        for index, host in enumerate(self._parameters):
            if self.accumulate(index):
                host.invalidate("diff")
            else:
                host.clear_diff()
        self._call("backward", tops, list(propagate_down), bottoms)
        for host in self._hosts(wanted):
            host.upload("diff")
        for host, learned in zip(self._parameters, self.propagate_to_params, strict=True):
            if learned:
                host.upload("diff")

    def _trace(self, read: list[Any], written: list[Any]) -> None:
        """Report the reads and writes of the object to a backend without values (memory planning)."""
        for array in read:
            self.backend.to_host(array)
        for array in written:
            self.backend.from_host(None, array)

    def has_side_effects(self) -> bool:
        return True

    def capture_blocker(self) -> str | None:
        return "it runs the user's Python code on the host"


_RANKS = frozenset({"rank", "world_size", "Get_rank"})
"""Attributes by which an object learns its rank without a call of this package: its own, and those of mpi4py."""


def _reads_rank(cls: Any) -> bool:
    """Whether a method of a user's class reads one of `_RANKS`."""
    methods = (value for base in cls.__mro__ if base is not PythonLayerBase for value in vars(base).values())
    return any(_RANKS.intersection(getattr(getattr(each, "__code__", None), "co_names", ())) for each in methods)


# -- registered classes with methods on shapes and arrays ----------------------------------------------

Floats: TypeAlias = Any
"""A NumPy array of float32."""


class ArrayLayer(Layer):
    """A layer whose class, registered by a program, has methods on shapes and arrays instead of blobs.

    ::

        shape(*bottoms)                     the top's shape, or a list of the tops'; if absent: the first bottom's
        parameters(*bottoms)                a list of (shape, filler), a filler being a number or a FillerParameter
        forward(*bottoms, *parameters)      the top, or a tuple of the tops
        backward(*bottoms, *parameters, *tops, *gradients)
                                            the gradients of bottoms and parameters; None: 0

    `shape` and `parameters` take the bottoms' shapes as tuples. `forward` and `backward` take NumPy arrays of float32
    on the host, which they must not write to, and return arrays of the declared shapes in any type of number.
    `gradients` are those of the tops. The object's `param` is the layer's prototxt and `phase` 0 in TRAIN, 1 in
    TEST. The results depend on the arguments only, or on numbers that `forward` draws. Without `backward` a net does
    not train through the layer; other nets run.

    Raises:
        ConfigError: `shape` or `parameters` raised an exception or returned something else, or methods do not take
            this number of arrays.
        RunError: `forward` or `backward` raised an exception, or returned arrays of other numbers or shapes.
    """

    bottoms = (1, None)
    tops = (1, None)
    user_class: ClassVar[Any]

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._instance = make_object(self.user_class, None, self.where).instance
        self._instance.param, self._instance.phase = self.param, Phase(self.context.phase)
        if hasattr(self.user_class, "parameters"):
            found = self._call("parameters", [blob.shape for blob in bottom])
            if not isinstance(found, (tuple, list)):
                raise self.error(f"parameters returned {found!r} in place of a list of (shape, filler)")
            for entry in found:
                self._add_parameter(entry)
        self._check_arguments("forward", len(bottom) + len(self.blobs))
        if hasattr(self.user_class, "backward"):
            self._check_arguments("backward", len(bottom) + len(self.blobs) + 2 * len(top))
        self._arrays: list[Floats] = []
        """The arguments and results of the last `forward`; later layers may write over the blobs."""

    def _call(self, method: str, arguments: Sequence[Any]) -> Any:
        with user_errors(method, self._instance, self.where):
            return getattr(self._instance, method)(*arguments)

    def _add_parameter(self, entry: Any) -> None:
        try:
            shape, filler = entry
            shape = _as_shape(shape)
            if not isinstance(filler, caffe_pb2.FillerParameter):
                filler = caffe_pb2.FillerParameter(value=float(filler))
        except (TypeError, ValueError):
            raise self.error(
                f"parameters returned {entry!r} in place of (shape, filler), a filler being a number or a "
                "FillerParameter"
            ) from None
        self.add_parameter(shape, filler)

    def _check_arguments(self, method: str, count: int) -> None:
        try:
            signature = inspect.signature(getattr(self._instance, method))
        except ValueError:  # some compiled functions have none
            return
        try:
            signature.bind(*range(count))
        except TypeError:
            parts = f"{len(self.param.bottom)} bottoms, {len(self.blobs)} parameters"
            tops = f", {len(self.param.top)} tops and their gradients" if method == "backward" else ""
            raise self.error(
                f"class {describe_class(self.user_class)}: {method}{signature} does not take the {count} arrays of "
                f"the layer ({parts}{tops})"
            ) from None

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shapes = [blob.shape for blob in bottom]
        if hasattr(self.user_class, "shape"):
            found = self._call("shape", shapes)
            try:
                shapes = _as_shapes(found)
            except (TypeError, ValueError):
                raise self.error(f"shape returned {found!r} in place of a shape or a list of shapes") from None
        elif shapes:
            shapes = shapes[:1] * len(top)
        if len(shapes) != len(top):
            raise self.error(f"the layer has {len(top)} tops, and shape returned {len(shapes)} shapes: {shapes}")
        for blob, shape in zip(top, shapes, strict=True):
            blob.reshape(shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        arrays = [self.backend.to_host(blob.data) for blob in (*bottom, *self.blobs)]
        results: list[Floats] = [None] * len(top)
        if self.backend.holds_values:
            for array in arrays:
                array.flags.writeable = False  # `backward` gets them too
            wanted = [(f"top '{blob.name}'", blob.shape) for blob in top]
            results = self._compute("forward", arrays, wanted, none_is_zero=False)
        for blob, result in zip(top, results, strict=True):
            self.backend.from_host(result, blob.data)
        self._arrays = [] if self.context.forward_only else [*arrays, *results]

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        gradients = [self.backend.to_host(blob.diff) for blob in top]
        results: list[Floats] = [None] * (len(bottom) + len(self.blobs))
        if self.backend.holds_values:
            wanted = [(f"bottom {index}'s gradient", blob.shape) for index, blob in enumerate(bottom)]
            wanted += [(f"parameter {index}'s gradient", blob.shape) for index, blob in enumerate(self.blobs)]
            results = self._compute("backward", [*self._arrays, *gradients], wanted, none_is_zero=True)
        for blob, down, result in zip(bottom, propagate_down, results, strict=False):
            if down:
                self.backend.from_host(result, blob.diff)
        for index, (blob, learned) in enumerate(zip(self.blobs, self.propagate_to_params, strict=True)):
            if learned:
                result = results[len(bottom) + index]
                if self.accumulate(index) and self.backend.holds_values:
                    result = result + self.backend.to_host(blob.diff)
                self.backend.from_host(result, blob.diff)

    def _compute(
        self, method: str, arguments: list[Floats], wanted: list[tuple[str, tuple[int, ...]]], none_is_zero: bool
    ) -> list[Floats]:
        """Return the results of a method; `wanted` are names and shapes."""
        if not hasattr(self._instance, method):
            raise RunError(
                f"{self.where}: cannot train: class {describe_class(self.user_class)} has no method {method}; write "
                "it, or give the layer's parameters and those before it lr_mult: 0"
            )
        value = self._call(method, arguments)
        values = value if isinstance(value, (tuple, list)) else (value,)
        if value is None or len(values) != len(wanted):
            found = "None" if value is None else f"{len(values)} arrays"
            raise RunError(f"{self.where}: {method} returned {found} in place of {len(wanted)} arrays")
        results = []
        for (name, shape), each in zip(wanted, values, strict=True):
            if each is None and none_is_zero:
                results.append(np.zeros(shape, np.float32))
                continue
            array: Floats = np.asarray(each)
            if array.shape != shape or array.dtype.kind not in "fiub":
                found = f"{array.dtype} of shape {array.shape}"
                raise RunError(f"{self.where}: {method} returned {found} for {name}, not numbers of shape {shape}")
            results.append(np.asarray(array, np.float32, order="C"))
        return results

    def capture_blocker(self) -> str | None:
        return "it runs the user's Python code on the host"


def _as_shape(value: Any) -> tuple[int, ...]:
    """Return a shape as a tuple; TypeError, ValueError: it is none."""
    shape = tuple(operator.index(size) for size in value)
    if any(size < 0 for size in shape):
        raise ValueError
    return shape


def _as_shapes(value: Any) -> list[tuple[int, ...]]:
    """Return the shapes that a user's method returned: one, or several in a list or tuple."""
    several = len(value) > 0 and all(isinstance(each, (tuple, list)) for each in value)
    return [_as_shape(each) for each in (value if several else [value])]


# -- blobs ---------------------------------------------------------------------------------------------


class HostBlob(FourAxes):
    """A blob's data and diff as C-contiguous float32 arrays on the host.

    They are copied from the device at the first access in a pass. The layer copies the arrays that the user's method
    writes back to the device.

    Args:
        blob: of the net.
    """

    def __init__(self, blob: Blob) -> None:
        self.blob = blob
        self._arrays: dict[str, Any] = {}
        self._current: set[str] = set()
        """Names of the arrays that are up to date on the host."""

    @property
    def data(self) -> Any:
        return self._array("data")

    @property
    def diff(self) -> Any:
        return self._array("diff")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.blob.shape

    @property
    def count(self) -> int:
        return self.blob.count

    def reshape(self, *shape: int) -> None:
        """Set the blob's shape; without arguments the blob is a scalar."""
        self.blob.reshape(tuple(shape))

    def _array(self, name: str) -> Any:
        array = self._arrays.get(name)
        if array is None or array.shape != self.blob.shape:
            array = self._arrays[name] = np.zeros(self.blob.shape, np.float32)
        if name not in self._current:
            self._current.add(name)
            blob = self.blob
            array[...] = blob.backend.to_host(blob.data if name == "data" else blob.diff)
        return array

    # -- used by the layer ---------------------------------------------------------------------------

    def invalidate(self, name: str) -> None:
        """Copy the array `name` from the device at its next access."""
        self._current.discard(name)

    def mark_current(self, name: str) -> None:
        """Use the host's array `name` at the next access, without a copy from the device."""
        self._current.add(name)

    def clear_diff(self) -> None:
        """Fill the host's diff with zeros."""
        self._current.add("diff")
        self._array("diff")[...] = 0

    def upload(self, name: str) -> None:
        """Copy the array `name` to the device."""
        self._current.add(name)
        blob = self.blob
        blob.backend.from_host(self._array(name), blob.data if name == "data" else blob.diff)


class ParameterBlobs(Sequence[HostBlob]):
    """The parameters of a user's layer. `add_blob` appends one, as in pycaffe.

    Args:
        make: makes a parameter of a shape, filled with zeros.
    """

    def __init__(self, make: Callable[[tuple[int, ...]], Blob]) -> None:
        self._make = make
        self._blobs: list[HostBlob] = []

    def add_blob(self, *shape: int) -> HostBlob:
        """Make the next parameter, filled with zeros. Call it in `setup` only."""
        assert math.prod(shape) >= 0
        self._blobs.append(HostBlob(self._make(tuple(int(size) for size in shape))))
        return self._blobs[-1]

    def __getitem__(self, index: Any) -> Any:
        return self._blobs[index]

    def __len__(self) -> int:
        return len(self._blobs)

    def __iter__(self) -> Iterator[HostBlob]:
        return iter(self._blobs)
