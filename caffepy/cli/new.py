"""Commands that begin with a model: `caffepy new` and `caffepy models`.

`new` makes a folder to train a model in for the user's own classes. `models` lists and copies the nets and solvers that
come with caffepy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import Parser, add_overwrite_flag
from caffepy.errors import ConfigError
from caffepy.utils.options import natural, positive
from caffepy.utils.registry import suggest

if TYPE_CHECKING:
    from caffepy.scaffold.create import Created, Project


# -- `caffepy new` -------------------------------------------------------------------------------------

_NEW = """\
Write databases, train net, deploy net and solver that train a model for your own classes.

  caffepy new squeezenet --data photos --to birds --weights squeezenet_v1.1.caffemodel
  caffepy new ssd300 --data VOC2007 --classes labels.txt --to cars --weights VGG_ILSVRC_16_layers_fc_reduced.caffemodel

A classifier's data set has a folder of images for each class, or these folders in train/ and val/. A detector's has
Annotations and JPEGImages, as Pascal VOC, or annotations/*.json, as COCO. If the data set is not divided, --val of the
images become the validation set. The numbers of classes, the batch sizes, the lengths of training and tests, and the
names of the new layers are set; the rest, anchors included, is the model's. The commands to go on with are printed."""


def add_parser_new(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("new", help="prepare training of your own classes", description=_NEW)
    parser.add_argument(
        "model", metavar="MODEL", help="the model, such as squeezenet or ssd300; an unknown name lists them"
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the data set")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where to write (default: the model's name)")
    parser.add_argument(
        "--classes",
        type=Path,
        metavar="FILE",
        help="names of the classes in the order of their labels, one per line (default: those of the data set)",
    )
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="begin from these weights; a classifier's rates are then smaller"
    )
    parser.add_argument(
        "--val", type=_share, default=0.2, metavar="X", help="part of the images for validation (default: 0.2)"
    )
    parser.add_argument("--seed", type=natural, default=1, metavar="N", help="seed of division and order (default: 1)")
    parser.add_argument("--batch", type=positive, metavar="N", help="images of an iteration (default: the model's)")
    parser.add_argument(
        "--epochs", type=positive, default=30, metavar="N", help="passes through the training images (default: 30)"
    )
    parser.add_argument(
        "--encoded", action="store_true", help="store a classifier's images as JPEG: less space, more work per image"
    )
    add_overwrite_flag(parser, "replace existing files")


def run_new(args: argparse.Namespace) -> int:
    """Write the project, and print its files and the next commands.

    Raises:
        ConfigError: the model is not for images with labels or boxes, or the data set does not fit it.
        DataError: the data set is incomplete, or images cannot be read.
        RunError: a file cannot be written.
    """
    from caffepy.scaffold.create import CLASSIFIERS, DETECTORS, Project, create_project

    known = (*CLASSIFIERS, *DETECTORS)
    if args.model not in known:
        raise ConfigError(f"MODEL is '{args.model}'; {suggest(args.model, known)}")
    if args.weights is not None and not args.weights.is_file():
        raise ConfigError(f"--weights {args.weights}: there is no such file")
    project = Project(
        args.model,
        args.data,
        args.to or Path(args.model),
        args.classes,
        args.weights is not None,
        args.val,
        args.seed,
        args.batch,
        args.epochs,
        args.encoded,
        args.overwrite,
    )
    created = create_project(project)
    for line in _summary(project, created):
        print(line)
    for line in _next_steps(project, created, args.weights):
        print(line)
    return 0


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a part between 0 and 1, such as 0.2")
    return share


def _summary(project: Project, created: Created) -> list[str]:
    unread = f" ({created.skipped} images could not be read)" if created.skipped else ""
    return [
        f"{project.to}: {project.model} for {len(created.classes)} classes, {created.train} training and {created.val} "
        f"validation images{unread}, {created.max_iter} iterations",
    ]


def _next_steps(project: Project, created: Created, weights: Path | None) -> list[str]:
    """Return the commands that train, test by hand and predict."""
    from caffepy.scaffold.create import known_weights

    to, lines = project.to, ["Next:"]
    known = known_weights(project.model)
    if weights is None and known is not None:
        file, address = known
        lines += [
            f"  # Training from weights needs fewer images: {file}, {address}",
            f"  # (models/{project.model}/README.md); begin again with 'caffepy new ... --weights {file}'.",
        ]
    begin = f" --weights {weights}" if weights is not None else ""
    trained = f"{project.snapshot_prefix}_iter_{created.max_iter}.caffemodel"
    command, labels = ("detect", "--label-map") if project.detects else ("classify", "--labels")
    names = to / ("labelmap.prototxt" if project.detects else "labels.txt")
    return [
        *lines,
        f"  caffepy train --solver {to / 'solver.prototxt'}{begin} --gpus all    # or --cpu",
        f"  caffepy {command} IMAGE --model {to / 'deploy.prototxt'} --weights {trained} {labels} {names}",
    ]


# -- `caffepy models` ----------------------------------------------------------------------------------

_MODELS = """\
List the models that come with caffepy, or copy their nets, solvers and READMEs.

  caffepy models list
  caffepy models copy lenet
  caffepy models copy alexnet caffenet --to nets

The README of a model says what its solver trains on and where weights are."""


def add_parser_models(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("models", help="list or copy the models of caffepy", description=_MODELS)
    parser.add_argument("action", choices=["list", "copy"], help="the action")
    parser.add_argument("names", nargs="*", metavar="NAME", help="for copy: the models")
    parser.add_argument(
        "--to", type=Path, default=Path("models"), metavar="DIR", help="copy to DIR/NAME (default: models/NAME)"
    )
    add_overwrite_flag(parser, "replace files with other contents")


def run_models(args: argparse.Namespace) -> int:
    """Print a table of the models, or copy some and print the files.

    Raises:
        ConfigError: a model is unknown or missing, or files with other contents exist.
        RunError: a file cannot be written.
    """
    from caffepy.scaffold.model_files import copy_model, list_models

    if args.action == "list":
        if args.names:
            raise ConfigError(f"models list takes no name; 'caffepy models copy {args.names[0]}' copies a model")
        models = list_models()
        width = max(len(model.name) for model in models)
        for model in models:
            print(f"{model.name:{width}}  {model.net}; {model.data}")
        return 0
    if not args.names:
        raise ConfigError("models copy: name a model; 'caffepy models list' lists them")
    for name in args.names:
        for path in copy_model(name, args.to, args.overwrite):
            print(path)
    return 0
