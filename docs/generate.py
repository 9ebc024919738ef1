"""Writes docs/fields.md, from the ledger of fields, and docs/layers.md, from the layers' docstrings."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from caffepy.config.fields import Status, ledger
from caffepy.layers import Layer, layer_class
from caffepy.layers.core.base import LAYERS
from caffepy.layers.core.known_types import OF_BOTH, OF_BVLC, OF_NVIDIA
from caffepy.proto import caffe_pb2

DOCS = Path(__file__).parent
WIDTH = 120
OWN = {"DepthwiseConvolution": "convolution_param", "ConvolutionDepthwise": "convolution_param"}
_READS = re.compile(r"\b(\w+_param)\b")
_HEAD_OF_FIELDS = """\
# Fields

What caffepy makes of each field of `proto/caffe.proto`, which is the union of both Caffes' schemas. A field *acts*, is
*refused* by name when it is given, or has *no meaning* here, for the reason that is given. `python docs/generate.py`
writes this file from `caffepy/config/fields.txt`; `tests/unit/config/test_fields.py` proves it.

Where NVIDIA Caffe drops what the user asked for, the documented meaning holds here: ImageData keeps the order of its
lines with several threads, SigmoidCrossEntropyLoss heeds loss_param, BatchNorm heeds use_global_stats in training and
adds the gradients of all `iter_size` passes, label_smoothing acts on every device, and MultiBoxLoss's LOGISTIC reads
the right scores from the second image on.
"""
_HEAD_OF_LAYERS = """\
# Layers

Every layer type with its formula, its settings and its blobs. *dtypes* are those of bottoms and tops: float32, or also
float16 and bfloat16; other layers of a half-precision net are given float32. *Compared with* is what the tests compare
the layer with: reference numbers drawn from that Caffe, and for all layers formulas in double precision and central
differences. `python docs/generate.py` writes this file from the docstrings.
"""


def fields_page() -> str:
    """The text of docs/fields.md."""
    lines, before = [_HEAD_OF_FIELDS], ""
    for name, entry in ledger().items():
        message, _, field = name.rpartition(".")
        if message != before:
            lines.append(f"\n## {message}\n")
            before = message
        text = f"`{field}`: {entry.status.value}"
        if entry.text and entry.status is not Status.ACTS:
            text += f": {entry.text}"
        lines.append(textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines) + "\n"


def layers_page() -> str:
    """The text of docs/layers.md."""
    layer_class("Split")  # imports all types
    return "\n".join([_HEAD_OF_LAYERS, *(section(name) for name in sorted(LAYERS, key=str.lower))])


def section(name: str) -> str:
    """The part of docs/layers.md on one type."""
    cls = layer_class(name)
    facts = [f"- bottoms {count(cls.bottoms)}, tops {count(cls.tops)}; dtypes {dtypes(cls)}"]
    facts += [f"- settings: {settings}" for settings in [", ".join(settings_of(cls, name))] if settings]
    facts.append(f"- compared with: {reference(name)}; defined by {module_source(cls)}")
    filled = [textwrap.fill(fact, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for fact in facts]
    return "\n".join([f"## {name}\n", inspect.cleandoc(own_docstring(cls)), "", *filled, ""])


def own_docstring(cls: type[Layer]) -> str:
    """The docstring of a class or of the nearest class that it inherits from and that is not Layer."""
    return next((base.__doc__ for base in cls.__mro__ if base is not Layer and base.__doc__), "")


def count(limits: tuple[int, int | None]) -> str:
    """A number of blobs: ``1``, ``2 to 3`` or ``1 or more``."""
    least, most = limits
    if most is None:
        return f"{least} or more"
    return str(least) if least == most else f"{least} to {most}"


def dtypes(cls: type[Layer]) -> str:
    """What a layer computes in."""
    return "float32, float16, bfloat16" if cls.supports_half else "float32"


def settings_of(cls: type[Layer], name: str) -> Iterator[str]:
    """The messages that a layer's classes read, with their fields."""
    source = "".join(inspect.getsource(base) for base in cls.__mro__ if base not in (Layer, object))
    fields = caffe_pb2.LayerParameter.DESCRIPTOR.fields_by_name
    for holder in dict.fromkeys([*_READS.findall(source), *OWN.get(name, "").split()]):
        if holder in fields and fields[holder].message_type is not None:
            inner = fields[holder].message_type
            names = [f.name for f in inner.fields if ledger()[f"{inner.name}.{f.name}"].status is Status.ACTS]
            yield f"`{holder}` ({', '.join(names)})"


def reference(name: str) -> str:
    """Whose numbers the golden tests compare a type with."""
    owners = {"BVLC Caffe and NVIDIA Caffe": OF_BOTH, "BVLC Caffe": OF_BVLC, "NVIDIA Caffe": OF_NVIDIA}
    for owner, names in owners.items():
        if name in names:
            return f"the numbers of {owner}"
    return "formulas alone, since neither Caffe has it"


def module_source(cls: type[Layer]) -> str:
    """What the first line of a layer's module gives as its definition in brackets; else the module."""
    head = (inspect.getmodule(cls).__doc__ or "").partition("\n\n")[0].replace("\n", " ")  # type: ignore[union-attr]
    found = re.search(r"\(([^()]*(?:cpp|cu|hpp|Caffe|20\d\d)[^()]*)\)", head)
    return found[1] if found else f"`{cls.__module__}`"


PAGES = {"fields.md": fields_page, "layers.md": layers_page}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (DOCS / page).write_text(make(), encoding="utf-8")
