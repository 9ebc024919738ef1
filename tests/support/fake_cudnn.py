"""cuDNN's frontend without cuDNN: graphs that are described, built, executed on nothing, serialised and read.

Each graph has the plans of `Frontend.engines`; what is asked of the frontend is counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

WORKSPACE = 4096
"""Bytes of every plan."""


class NotSupportedError(Exception):
    """`cudnnGraphNotSupportedError`."""


class Tensor:
    """A tensor of a graph."""

    def __init__(self, dim: Any = (), stride: Any = (), data_type: Any = None, uid: int = -1) -> None:
        self.values = {"dim": list(dim), "stride": list(stride), "data_type": data_type, "uid": uid}

    def __getattr__(self, name: str) -> Any:
        verb, _, what = name.partition("_")
        if verb == "get":
            return lambda: self.values[what]
        if verb == "set":
            return lambda value: (self.values.__setitem__(what, value), self)[1]
        raise AttributeError(name)


class Graph:
    """`cudnn.pygraph`."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._tensors: list[Tensor] = []
        self._engines: list[str] = []
        self._built: dict[int, str] = {}
        self._candidate = -1

    def tensor(self, name: str = "", **given: Any) -> Tensor:
        """Make one."""
        self._tensors.append(Tensor(**given))
        return self._tensors[-1]

    def _operation(self, **_: Any) -> Tensor:
        return self.tensor()

    conv_fprop = conv_dgrad = conv_wgrad = add = relu = _operation

    def validate(self) -> None:
        """Check that cuDNN's libraries can be loaded."""
        if self._frontend.unloadable:
            raise RuntimeError(self._frontend.unloadable)

    build_operation_graph = validate

    def deselect_engines(self, _: Any) -> None:
        """Nothing."""

    deselect_numeric_notes = deselect_workspace_greater_than = deselect_engines

    def create_execution_plans(self, modes: Any) -> None:
        """Ask heuristics."""
        self._frontend.counts["heuristics"] += 1
        self._engines = [*self._frontend.engines, *(self._frontend.slower if "B" in modes else ())]

    def get_execution_plan_count(self) -> int:
        """How many plans there are."""
        return len(self._engines)

    def get_plan_name_at_index(self, index: int) -> str:
        """A plan's name."""
        return self._engines[index]

    def get_behavior_notes_for_plan_at_index(self, index: int) -> list[str]:
        """What the plan's engine does."""
        return []

    def build_plan_at_index(self, index: int) -> None:
        """Build one plan, which becomes the one that is serialised."""
        if self._engines[index:] and self._engines[index] in self._frontend.barred:
            raise self._frontend.refusal("plan is excluded")
        if index not in self._built:
            self._frontend.counts["builds"] += 1
            self._built[index] = self._engines[index]
        self._candidate = index

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        """Bytes."""
        assert index in self._built
        return self._frontend.workspace

    def query_tensor_attributes_of_uid(self, uid: int) -> Tensor:
        """A tensor."""
        for tensor in self._tensors:
            if tensor.values["uid"] == uid:
                return tensor
        raise RuntimeError("No matching tensor for this UID")

    def serialize(self) -> list[int]:
        """As the binding does: a list of bytes."""
        if not self._frontend.serialises:
            raise RuntimeError("unavailable when compiled with CUDNN_FRONTEND_SKIP_JSON_LIB")
        self._frontend.counts["serialised"] += 1
        plan = {"plan": self._built[self._candidate], "tensors": [tensor.values for tensor in self._tensors]}
        return list(json.dumps(plan).encode())

    def deserialize(self, handle: int, data: Any) -> None:
        """Read what `serialize` gave."""
        assert not isinstance(data, bytes), "the binding takes no bytes"
        self._frontend.counts["read"] += 1
        try:
            plan = json.loads(bytes(data))
        except ValueError as error:
            raise RuntimeError(f"[json.exception.parse_error] {error}") from error
        self._tensors = [self._tensor(values) for values in plan["tensors"]]
        self._built, self._candidate = {0: plan["plan"]}, 0

    @staticmethod
    def _tensor(values: dict[str, Any]) -> Tensor:
        return Tensor(**{name: values[name] for name in ("dim", "stride", "data_type", "uid")})

    def executed(self, index: int) -> str:
        """The name of the plan that `execute_plan_at_index` runs."""
        return self._built[index]


class Frontend:
    """The module `cudnn`.

    Args:
        engines: those that the faster heuristics propose.
        slower: those that the slower ones add.
        barred: those that are not built.
        refusal: what building one of them raises.
        serialises: whether plans can be written.
        unloadable: message of the failure of every graph; empty: none fails.
    """

    cudnnGraphNotSupportedError = NotSupportedError  # noqa: N815 (cuDNN's name)
    data_type = SimpleNamespace(FLOAT="FLOAT", HALF="HALF", BFLOAT16="BFLOAT16")
    heur_mode = SimpleNamespace(A="A", B="B", FALLBACK="FALLBACK")
    behavior_note = SimpleNamespace(RUNTIME_COMPILATION="RUNTIME_COMPILATION")

    class numerical_note:  # noqa: N801 (cuDNN's name)
        """Any note is its name."""

    def __init__(
        self,
        engines: Sequence[str] = tuple(f"eng{number}" for number in range(12)),
        slower: Sequence[str] = (),
        barred: Sequence[str] = (),
        refusal: type[Exception] = RuntimeError,
        serialises: bool = True,
        unloadable: str = "",
    ) -> None:
        self.engines, self.slower, self.barred = engines, slower, barred
        self.refusal = refusal
        self.serialises = serialises
        self.unloadable = unloadable
        self.workspace = WORKSPACE
        self.counts: Counter[str] = Counter()

    def backend_version(self) -> int:
        """cuDNN's release."""
        return 91900

    def pygraph(self, **_: Any) -> Graph:
        """A new graph."""
        return Graph(self)


for _name in (
    "TENSOR_CORE",
    "DOWN_CONVERT_INPUTS",
    "REDUCED_PRECISION_REDUCTION",
    "FFT",
    "WINOGRAD",
    "WINOGRAD_TILE_4x4",
    "WINOGRAD_TILE_6x6",
    "WINOGRAD_TILE_13x13",
    "NONDETERMINISTIC",
):
    setattr(Frontend.numerical_note, _name, _name)
