"""Commands that begin with a model: `caffepy new` and `caffepy models`.

`new` makes a folder to train a model in for the user's own classes. `models` lists and copies the nets and solvers that
come with caffepy.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import Command, overwrite_option
from caffepy.errors import ConfigError
from caffepy.utils.options import NEEDED, argument, natural, option, positive, switch
from caffepy.utils.registry import suggest

if TYPE_CHECKING:
    from caffepy.scaffold.create import Created, Project


# -- `caffepy new` -------------------------------------------------------------------------------------


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a part between 0 and 1, such as 0.2")
    return share


@dataclass(kw_only=True)
class NewCommand(Command):
    """Prepare training of your own classes.

    Write databases, train net, deploy net and solver that train a model for your own classes.

      caffepy new squeezenet --data photos --to birds --weights squeezenet_v1.1.caffemodel
      caffepy new ssd300 --data VOC2007 --classes labels.txt --weights VGG_ILSVRC_16_layers_fc_reduced.caffemodel

    A classifier's data set has a folder of images for each class, or these folders in train/ and val/. A detector's has
    Annotations and JPEGImages, as Pascal VOC, or annotations/*.json, as COCO. If the data set is not divided, --val of
    the images become the validation set. The numbers of classes, the batch sizes, the lengths of training and tests,
    and the names of the new layers are set; the rest, anchors included, is the model's. The commands to go on with are
    printed.
    """

    model: str = argument("the model, such as squeezenet or ssd300; an unknown name lists them", metavar="MODEL")
    data: Path = option("the data set", Path, "DIR", default=NEEDED)
    to: Path | None = option("where to write (default: the model's name)", Path, "DIR")
    classes: Path | None = option(
        "names of the classes in the order of their labels, one per line (default: those of the data set)", Path
    )
    weights: Path | None = option("begin from these weights; a classifier's rates are then smaller", Path)
    val: float = option("part of the images for validation", _share, "X", default=0.2)
    seed: int = option("seed of division and order", natural, default=1)
    batch: int | None = option("images of an iteration (default: the model's)", positive)
    epochs: int = option("passes through the training images", positive, default=30)
    encoded: bool = switch("store a classifier's images as JPEG: less space, more work per image")
    overwrite: bool = overwrite_option("replace existing files")

    def run(self) -> int:
        """Write the project, and print its files and the next commands.

        Raises:
            ConfigError: the model is not for images with labels or boxes, or the data set does not fit it.
            DataError: the data set is incomplete, or images cannot be read.
            RunError: a file cannot be written.
        """
        from caffepy.scaffold.create import CLASSIFIERS, DETECTORS, Project, create_project

        known = (*CLASSIFIERS, *DETECTORS)
        if self.model not in known:
            raise ConfigError(f"MODEL is '{self.model}'; {suggest(self.model, known)}")
        if self.weights is not None and not self.weights.is_file():
            raise ConfigError(f"--weights {self.weights}: there is no such file")
        project = Project(
            self.model,
            self.data,
            self.to or Path(self.model),
            self.classes,
            self.weights is not None,
            self.val,
            self.seed,
            self.batch,
            self.epochs,
            self.encoded,
            self.overwrite,
        )
        created = create_project(project)
        for line in _summary(project, created):
            print(line)
        for line in _next_steps(project, created, self.weights):
            print(line)
        return 0


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


@dataclass(kw_only=True)
class ModelsCommand(Command):
    """List or copy the models of caffepy.

    List the models that come with caffepy, or copy their nets, solvers and READMEs.

      caffepy models list
      caffepy models copy lenet
      caffepy models copy alexnet caffenet --to nets

    The README of a model says what its solver trains on and where weights are.
    """

    action: str = argument("the action", choices=("list", "copy"))
    names: list[str] = argument("for copy: the models", metavar="NAME", nargs="*")
    to: Path = option("copy to DIR/NAME (default: models/NAME)", Path, "DIR", default=Path("models"))
    overwrite: bool = overwrite_option("replace files with other contents")

    def run(self) -> int:
        """Print a table of the models, or copy some and print the files.

        Raises:
            ConfigError: a model is unknown or missing, or files with other contents exist.
            RunError: a file cannot be written.
        """
        from caffepy.scaffold.model_files import copy_model, list_models

        if self.action == "list":
            if self.names:
                raise ConfigError(f"models list takes no name; 'caffepy models copy {self.names[0]}' copies a model")
            models = list_models()
            width = max(len(model.name) for model in models)
            for model in models:
                print(f"{model.name:{width}}  {model.net}; {model.data}")
            return 0
        if not self.names:
            raise ConfigError("models copy: name a model; 'caffepy models list' lists them")
        for name in self.names:
            for path in copy_model(name, self.to, self.overwrite):
                print(path)
        return 0
