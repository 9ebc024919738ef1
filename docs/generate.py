"""Writes the pages that are generated: fields, layers, options and the tables of ONNX operators."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from google.protobuf.descriptor import Descriptor

from caffepy.cli.main import build_parser
from caffepy.export.onnx import rules as onnx_rules
from caffepy.export.onnx_import import rules as import_rules
from caffepy.export.onnx_import.graph import IMPORTED_AS
from caffepy.export.torch import rules as torch_rules
from caffepy.formats.fields import NO_MEANING, REFUSED
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import Layer, layer_class
from caffepy.layers.export_rules import ONNX, TORCH, import_families
from caffepy.layers.known_types import OF_BOTH, OF_BVLC, OF_NVIDIA
from caffepy.layers.layer import LAYERS, import_layer_types
from caffepy.training.options import TrainOptions
from caffepy.utils.options import Option, options_of

_ = (onnx_rules, import_rules, torch_rules)  # their functions register themselves

DOCS = Path(__file__).parent
WIDTH = 120
OWN = {"DepthwiseConvolution": "convolution_param", "ConvolutionDepthwise": "convolution_param"}
_READS = re.compile(r"\b(\w+_param)\b")
_HEAD_OF_FIELDS = """\
# Fields

Every field of `proto/caffe.proto`, which is the union of the schemas of BVLC Caffe and NVIDIA Caffe. Each field

- *acts*: it has the effect that the schema's comment describes;
- is *refused*: giving it is an error with the sentence below; or
- has *no meaning*: it is accepted and changes no result, for the reason below.

`python docs/generate.py` writes this page from the schema and `caffepy/formats/fields.py`.

Five fields act here although NVIDIA Caffe ignores them in part:

| field | in caffepy |
|---|---|
| `threads` of ImageData | several threads keep the order of the list |
| `loss_param` of SigmoidCrossEntropyLoss | normalizes the loss |
| `use_global_stats` of BatchNorm | acts in training too; gradients of all `iter_size` passes are added |
| `label_smoothing` | acts on every device |
| `conf_loss_type: LOGISTIC` of MultiBoxLoss | reads the right scores for every image of the batch |
"""
_HEAD_OF_LAYERS = """\
# Layers

Each layer type with its formula, its settings and its blobs.

| entry | meaning |
|---|---|
| dtypes | of bottoms and tops; layers that list only float32 are given float32 in a half-precision net |
| compared with | the numbers that tests compare the layer with |

Tests also compare each layer with formulas in double precision and with central differences. `python docs/generate.py`
writes this page from the docstrings.
"""
_HEAD_OF_OPTIONS = """\
# Options of training

The options of `caffepy train`. The second column is the keyword of `caffepy.train`. Flags may be spelled as in Caffe:
`-max_skipped 10`, `-max_skipped=10`, `--max-skipped 10`. If several ranks train, they compare the options before the
first iteration; only those marked *own* may differ. Without `devices` `caffepy.train` uses the CPU.

`python docs/generate.py` writes this page from `caffepy/training/options.py` and `caffepy/utils/options.py`.
"""
_HEAD_OF_LEAVE_CAFFE = """\
# Leave Caffe

| to use a Caffe net with | write | with |
|---|---|---|
| PyTorch | `net.py` and `net.safetensors` | `caffepy export deploy.prototxt net.caffemodel net.py` |
| onnxruntime, OpenCV 5, TensorRT | `net.onnx` | `caffepy export deploy.prototxt net.caffemodel net.onnx` |
| onnxruntime with int8 | `int8.onnx` | `caffepy quantize deploy.prototxt net.caffemodel int8.onnx --images photos/` |
| readers of safetensors | `net.safetensors` | `caffepy export deploy.prototxt net.caffemodel net.safetensors` |

[ONNX](onnx.md) and [quantize](onnx.md#quantize) describe the second and the third; [serve a
model](serve-a-model.md) puts an ONNX model behind HTTP. `--to onnx`, `--to torch` and `--to weights` say the format
where the suffix of the file does not. The net must be a deploy net; `caffepy deploy` makes one of a train net.

## PyTorch

    pip install '.[torch]'
    caffepy export deploy.prototxt net.caffemodel net.py

The command runs the net and the module on the same random input, as for [ONNX](onnx.md#export), and prints the largest
difference of each output. Above 1e-5 of the output's largest value it writes nothing. `--no-check` skips the
comparison; PyTorch need not be installed then. `python benchmarks/torch_round_trip.py` prints the differences of all
nets of `models/`.

The file needs PyTorch and safetensors, not caffepy:

    import torch
    from net import load

    # reads net.safetensors beside net.py
    net = load()
    # several outputs are a dict by name
    scores = net(torch.zeros(1, 3, 224, 224))

- The module has one submodule for each layer, with the layer's name. Characters that Python does not allow in a name
  become `_`. A comment gives the layer's own name then.
- Inputs are values as the net reads them: `caffepy.load(...).prepare` shows how an image becomes one.
- A Scale directly behind a BatchNorm becomes the weight and bias of `nn.BatchNorm2d`. `--fold` merges both into the
  convolution before them.
- Pooling rounds up as in Caffe (`ceil_mode=True`); PyTorch's divisors of averages are Caffe's. Padding of more than
  half of the window becomes a class in the file.
- A layer that PyTorch has no module for becomes a class in the file: Scale, SSD's PriorBox, DetectionOutput and
  Normalize, LSTM with Caffe's markers, and others.
- The batch may have any size where the net allows it. Other sizes are those of the prototxt.
- Dropout stays. `net.train()` makes the module trainable. Parameters that layers share in Caffe are copies.
- If layers have no PyTorch form, one error names all of them. Export such a net to ONNX, or up to these layers.

## Half precision

`--half` stores weights as float16, which halves the files. The values are rounded before the comparison, so the
exported net is compared with the rounded net at the same limit. The effect of rounding on the outputs is printed too;
above 0.01 of an output's largest value nothing is written. Boxes of detectors are only printed, because rounding may
change their number and order. BatchNorm's statistics stay float32, because a variance may exceed the range of float16.

Computation stays float32: `load()` of a PyTorch module copies the weights into float32 parameters, and the ONNX model
has a Cast for each of them. `load().half().cuda()` computes in float16.

## Weights as safetensors

A parameter is called LAYER.INDEX, as in `net.params`: `conv1.0` is the weight of `conv1`, `conv1.1` its bias. Each
place that takes a `.caffemodel` takes such a file too (`--weights`, `caffepy.load`, `net.copy_from`); float64, float16
and bfloat16 are read as float32. `net.save("net.safetensors")` and `caffepy export` write float32. The command also
converts back:

    caffepy export deploy.prototxt net.safetensors net.caffemodel

The `.safetensors` file beside an exported PyTorch module is another one: it has the names of the module's parameters.

## OpenCV 5

OpenCV 5 has no importer for Caffe: `cv2.dnn.readNetFromCaffe` is gone, and `cv2.dnn.readNet` says "Caffe importer has
been removed" ([opencv/opencv#28678](https://github.com/opencv/opencv/pull/28678)). Export the net to ONNX, and change
one line of the program:

    caffepy export deploy.prototxt net.caffemodel net.onnx

    # in place of: readNetFromCaffe("deploy.prototxt", "net.caffemodel")
    net = cv2.dnn.readNetFromONNX("net.onnx")

Images are prepared as before (`cv2.dnn.blobFromImage`). OpenCV 5.0 reads neither the int8 models nor
DetectionOutput's ONNX form. Run detectors with onnxruntime or PyTorch. Or delete the DetectionOutput layer from the
prototxt: the exported net then has the location predictions, scores and priors as outputs, which OpenCV 5.0 computes
(tried with MobileNet-SSD). The class DetectionOutput of an exported PyTorch module shows how boxes are made of them.

## Layers
"""
_HEAD_OF_ONNX = """\
# Export to ONNX, import from ONNX

Install the extra first: `pip install '.[onnx]'`.

    caffepy export deploy.prototxt net.caffemodel net.onnx
    caffepy export deploy.prototxt net.caffemodel net.onnx --batch dynamic --fold --opset 13
    caffepy quantize deploy.prototxt net.caffemodel int8.onnx --like train_val.prototxt
    caffepy import resnet18.onnx
    caffepy import detector.onnx --output models/detector --shape 1,3,320,320 --fold

Both commands run the net and, with onnxruntime, the ONNX file on the same random input, and print the largest
difference of each output. `import` runs the net that the written files load as. If the difference is above 1e-4 of the
output's largest value, the command fails and writes nothing. `--no-check` skips the comparison. Without onnxruntime
`export` fails, and `import` says that nothing was compared. Rounding can reorder the boxes of a detector; then `export`
compares the scores and locations that they are found from, and DetectionOutput by itself.

`benchmarks/onnx_round_trip.py` prints the differences of all nets of `models/`.

## Export

| option | meaning |
|---|---|
| `--batch N` | the first axis of all inputs |
| `--batch dynamic` | any batch; the comparison also uses one more image. LSTM, which is unrolled, needs a fixed batch |
| `--fold` | make each BatchNorm a Scale, and merge Scale and Bias into the layers before them |
| `--half` | store weights as float16, each with a Cast to float32 ([half precision](leave-caffe.md#half-precision)) |
| `--opset` | 13 to 21; 17 by default |

- The net must be a deploy net: Input layers give the shapes. Losses, Accuracy, and inputs that no other layer reads
  are left out.
- Outputs have the names of the net's blobs, nodes the names of its layers.
- Pooling has explicit padding, because ONNX's `ceil_mode` and divisors differ from Caffe's.
- LSTM and RNN begin with a state of 0 in each run.
- DetectionOutput becomes NonMaxSuppression and the operators around it. `eta` is refused. Of equal scores `keep_top_k`
  takes the first, also in PyTorch; Caffe leaves their order to `std::sort`.
- The comparison runs ArgMax, DetectionOutput and ROIPooling behind other layers also alone, with inputs that these
  seldom meet: inverted and empty boxes, regions outside of the image, equal scores.
- Operators that `import` would not recognise as their layer are described in the metadata (`caffepy.layer.<name>`), so
  that `import` restores the layer.
- If layers have no ONNX form (Python, PSROIPooling, data layers), one error names all of them.
"""
_IMPORT = """
## Quantize

`caffepy quantize` writes a model that computes with int8, by onnxruntime's static quantization: the QDQ format, weights
as int8 with a scale for each channel, activations as uint8. BatchNorm is folded first. Layers behind the last
convolution or product, such as Softmax and DetectionOutput, stay float32.

| option | meaning |
|---|---|
| `--like FILE` | the train net: calibrate with images of its TRAIN data layer, score those of its TEST data layer |
| `--images PATH` | a folder, a list or an image to calibrate with, prepared as the deploy net's Input layer says |
| `--samples N` | images to calibrate with; 256 by default |
| `--iterations N` | batches to score; 50 by default |

Images of `--images` that cannot be read are left out with a line each, and the exit status is 1.

Calibration finds the range of each activation. For a classifier with `--like` the command prints the accuracy before
and after. LeNet of `make demo`, 1500 digits: 0.9787 before, 0.9780 after; the file has 446 KB in place of 1725 KB.

## Import

The command writes NAME.prototxt and NAME.caffemodel.

| option | meaning |
|---|---|
| `--output NAME` | the name; default: the name of the file without its extension |
| `--batch N` | the first axis of an input, if the file leaves it open; 1 by default |
| `--shape 1,3,224,224` | other open axes; for one of several inputs `--shape name=1,3,224,224` |
| `--fold` | merge BatchNorm and Scale into the convolution before them |

- Constant parts of the graph (Shape, Gather, Concat and others) are computed first.
- Uneven padding becomes zeros in the kernel. Rounding down becomes `round_mode: FLOOR` where it matters.
- If nodes have no form in Caffe's layers, one error names all of them.
- External tensors are read only from the folder of the model.
- Of equal elements ArgMax gives the last, where ONNX gives the first.
- HardSwish, Interp, ShuffleChannel and Swish are not in every Caffe ([layers](../reference/layers.md)).
- Fields that only NVIDIA Caffe has are not written, because they would choose NVIDIA's dialect
  ([differences](../reference/differences.md)).

"""


def fields_page() -> str:
    """The text of docs/reference/fields.md."""
    lines, before = [_HEAD_OF_FIELDS], ""
    for name in fields_of(caffe_pb2.DESCRIPTOR.message_types_by_name.values()):
        message, _, field = name.rpartition(".")
        if message != before:
            lines.append(f"\n## {message}\n")
            before = message
        text = f"`{field}`: "
        if name in REFUSED:
            text += f"refused: {REFUSED[name]}"
        else:
            text += f"no meaning: {NO_MEANING[name]}" if name in NO_MEANING else "acts"
        lines.append(textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines) + "\n"


def fields_of(messages: Iterable[Descriptor], within: str = "") -> Iterator[str]:
    """The fields of messages and of those nested in them, as Message.field, in the schema's order."""
    for message in messages:
        path = within + message.name
        yield from (f"{path}.{field.name}" for field in message.fields)
        yield from fields_of(message.nested_types, f"{path}.")


def layers_page() -> str:
    """The text of docs/reference/layers.md."""
    import_layer_types()
    by_name = sorted(LAYERS, key=lambda name: (name.lower(), name))
    return "\n".join([_HEAD_OF_LAYERS, *map(section, by_name)])


def section(name: str) -> str:
    """The part of docs/reference/layers.md on one type."""
    cls = layer_class(name)
    text, _, errors = inspect.cleandoc(own_docstring(cls)).partition("\n\nRaises:\n")
    facts = [f"- bottoms {count(cls.bottoms)}, tops {count(cls.tops)}; dtypes {dtypes(cls)}"]
    facts += [f"- settings: {settings}" for settings in [", ".join(settings_of(cls, name))] if settings]
    facts.append(f"- compared with: {reference(name)}; defined by {module_source(cls)}")
    facts += [f"- raises {error}" for error in re.split(r"\n(?! )", textwrap.dedent(errors)) if error]
    filled = [textwrap.fill(fact, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for fact in facts]
    return "\n".join([f"## {name}\n", text, "", *filled, ""])


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


@cache
def class_texts(module: str) -> dict[str, str]:
    """The texts of a module's classes; `inspect.getsource` would parse the module again for each of them."""
    text = inspect.getsource(sys.modules[module])
    lines = text.splitlines(keepends=True)
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return {node.name: "".join(lines[node.lineno - 1 : node.end_lineno]) for node in classes}


def settings_of(cls: type[Layer], name: str) -> Iterator[str]:
    """The messages that a layer's classes read, with their fields."""
    source = "".join(class_texts(base.__module__)[base.__name__] for base in cls.__mro__ if base not in (Layer, object))
    fields = caffe_pb2.LayerParameter.DESCRIPTOR.fields_by_name
    for holder in dict.fromkeys([*_READS.findall(source), *OWN.get(name, "").split()]):
        if holder in fields and fields[holder].message_type is not None:
            inner = fields[holder].message_type
            names = [f.name for f in inner.fields if f"{inner.name}.{f.name}" not in {**REFUSED, **NO_MEANING}]
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


def onnx_page() -> str:
    """The text of docs/how-to/onnx.md."""
    import_families()
    rows = [f"| {name} | {ONNX.forms[name]} |" for name in sorted(ONNX.forms, key=lambda name: (name.lower(), name))]
    back = [f"| {name} | {IMPORTED_AS[name]} |" for name in sorted(IMPORTED_AS, key=str.lower)]
    return "\n".join(
        [
            _HEAD_OF_ONNX,
            "| layer type | operators |",
            "|---|---|",
            *rows,
            _IMPORT,
            "| operator | layers |",
            "|---|---|",
            *back,
            "",
        ]
    )


def leave_caffe_page() -> str:
    """The text of docs/how-to/leave-caffe.md."""
    import_families()
    names = sorted(TORCH.forms, key=lambda name: (name.lower(), name))
    rows = [f"| {name} | {TORCH.forms[name]} |" for name in names]
    return "\n".join([_HEAD_OF_LEAVE_CAFFE, "| layer type | PyTorch |", "|---|---|", *rows, ""])


def options_page() -> str:
    """The text of docs/reference/options.md."""
    declared = {flag: one for one in options_of(TrainOptions) for flag in one.flags}
    lines = [_HEAD_OF_OPTIONS]
    for group in sorted(train_parser()._action_groups, key=lambda group: group.title == "options"):
        actions = [action for action in group._group_actions if action.dest != "help"]
        if actions:
            title = "Further options" if group.title == "options" else f"{group.title[:1].upper()}{group.title[1:]}"
            lines += [f"## {title}\n", "| option | keyword | default | ranks | meaning |", "|---|---|---|---|---|"]
            lines += [*(option_row(action, declared.get(action.option_strings[0])) for action in actions), ""]
    return "\n".join(lines)


def train_parser() -> argparse.ArgumentParser:
    """The parser of `caffepy train`."""
    commands = next(a for a in build_parser(["train"])._actions if isinstance(a, argparse._SubParsersAction))
    parser: argparse.ArgumentParser = commands.choices["train"]
    return parser


def option_row(action: argparse.Action, declared: Option | None) -> str:
    """One row of docs/reference/options.md; `declared` is the action's declaration if it has one."""
    value = "" if action.nargs == 0 else f" {action.metavar or '|'.join(action.choices or ())}"
    flags = ", ".join(f"`{flag}{value}`".replace("|", "\\|") for flag in action.option_strings)
    if declared is None:
        return f"| {flags} | | | | {action.help} |"
    ranks = "own" if declared.per_rank else ""
    return f"| {flags} | `{declared.name}` | {declared.default_text} | {ranks} | {declared.help} |"


PAGES = {
    "reference/fields.md": fields_page,
    "reference/layers.md": layers_page,
    "reference/options.md": options_page,
    "how-to/onnx.md": onnx_page,
    "how-to/leave-caffe.md": leave_caffe_page,
}

if __name__ == "__main__":
    for page, make in PAGES.items():
        (DOCS / page).write_text(make(), encoding="utf-8")
