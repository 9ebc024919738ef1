"""Data set commands: `caffepy data` and Caffe's data tools."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import Parser, add_overwrite_flag, add_positionals, add_switch
from caffepy.errors import ConfigError, DataError, RunError
from caffepy.utils.options import natural

if TYPE_CHECKING:
    from caffepy.data.conversion.image_sets import ImageOptions

logger = logging.getLogger(__name__)


ROOT_AND_LIST: tuple[tuple[str, type, str], ...] = (
    ("ROOTFOLDER", str, "prefix of each path in the list"),
    ("LISTFILE", Path, "one image per line"),
)
"""The first arguments of tools that read image lists."""
_DESCRIPTION = """\
Make mnist_train_lmdb and mnist_test_lmdb, as Caffe's convert_mnist_data does.

Without --subset and --from the whole set (60,000 and 10,000 digits, 11 MB) is downloaded from its public mirrors
and checked by its SHA-256. An LMDB gets its name only when it is complete. An existing LMDB with the same digits is
kept; any other is replaced only with --overwrite."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("data", help="make the LMDBs of a known data set", description=_DESCRIPTION)
    parser.add_argument("set", choices=["mnist"], help="which set")
    parser.add_argument("--subset", action="store_true", help="only the 10,000 digits included in caffepy")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="DIR", help="read the idx files in DIR, gzipped or not"
    )
    parser.add_argument("--to", type=Path, default=Path(), metavar="DIR", help="where to put the LMDBs (default: here)")
    add_overwrite_flag(parser, "replace existing LMDBs")


def run(args: argparse.Namespace) -> int:
    """Make the LMDBs and print their paths.

    Raises:
        DataError: input files are missing or invalid, or LMDBs with other records exist.
        RunError: the download or a write failed.
    """
    from caffepy.data.conversion import mnist_cifar as mnist

    if args.subset and args.source is not None:
        raise ConfigError("--subset and --from exclude each other; give one of them")
    source = mnist.SUBSET if args.subset else args.source
    read = mnist.fetch_file if source is None else mnist.folder_reader(source)
    there = {path for path in mnist.lmdb_paths(args.to).values() if path.exists() and not args.overwrite}
    for path, count in mnist.build_lmdbs(args.to, read, args.overwrite).items():
        print(f"{path}: {count} digits{', there already' if path in there else ''}")
    return 0


_CONVERT_IMAGESET = """\
Make a database from a list of images, as Caffe's convert_imageset does.

Each line of LISTFILE is a path relative to ROOTFOLDER, a space and a label:

    cats/1.jpg 0

Unreadable images are logged and skipped. The database gets its name only when it is complete."""


def add_parser_convert_imageset(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "convert_imageset", help="make a database of images and labels", description=_CONVERT_IMAGESET
    )
    add_positionals(parser, (*ROOT_AND_LIST, ("DB_NAME", Path, "the database to make")))
    add_image_flags(parser)
    add_backend_flags(parser)


def run_convert_imageset(args: argparse.Namespace) -> int:
    """Make the database and print its record count.

    Raises:
        DataError: the list or all of its images cannot be read, or the database exists.
        RunError: writing failed.
    """
    from caffepy.cli.output import showing
    from caffepy.data.conversion.image_sets import Database, convert_image_set

    target = Database(args.db_name, args.backend, args.overwrite)
    with showing("files") as progress:
        done = convert_image_set(args.rootfolder, args.listfile, target, image_options(args), seed_of(args), progress)
    print(f"{args.db_name}: {done.records} images{f', {done.skipped} left out' if done.skipped else ''}")
    return 0


def image_options(args: argparse.Namespace, **others: int) -> ImageOptions:
    """Return the ImageOptions of the flags."""
    from caffepy.data.conversion.image_sets import ImageOptions

    return ImageOptions(
        gray=args.gray,
        resize_height=args.resize_height,
        resize_width=args.resize_width,
        encoded=args.encoded,
        encode_type=args.encode_type,
        check_size=args.check_size,
        threads=args.threads or None,
        **others,
    )


def seed_of(args: argparse.Namespace) -> int | None:
    """Return the seed of the random order, or None without --shuffle."""
    seed: int | None = args.seed if args.shuffle else None
    return seed


_CONVERT_ANNOSET = """\
Make a database of images with labels or boxes, as the convert_annoset of SSD's Caffe does.

Each line of LISTFILE is a path and a label, or with --anno_type detection the paths of an image and its annotation
file, relative to ROOTFOLDER. Annotation files are VOC's XML, one JSON file per image with COCO's fields, or text with
a numeric label, xmin, ymin, xmax and ymax on each line."""


def add_parser_convert_annoset(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "convert_annoset", help="make a database of images with boxes", description=_CONVERT_ANNOSET
    )
    add_positionals(parser, (*ROOT_AND_LIST, ("DB_NAME", Path, "the database to make")))
    _add_annotation_flags(parser)


def _add_annotation_flags(parser: Parser) -> None:
    """Add the flags of convert_annoset and create_annoset."""
    parser.add_argument(
        "--anno-type",
        choices=("classification", "detection"),
        default="classification",
        help="whether the list has labels or annotation files (classification)",
    )
    parser.add_argument("--label-type", choices=("xml", "json", "txt"), default="xml", help="annotation format (xml)")
    parser.add_argument("--label-map-file", type=Path, metavar="FILE", help="a LabelMap from names to labels")
    add_switch(parser, "check-label", "fail if a name appears twice in the LabelMap")
    parser.add_argument(
        "--min-dim", type=natural, default=0, metavar="N", help="enlarge the shorter side to at least N"
    )
    parser.add_argument("--max-dim", type=natural, default=0, metavar="N", help="shrink the longer side to at most N")
    add_image_flags(parser)
    add_backend_flags(parser)


def run_convert_annoset(args: argparse.Namespace) -> int:
    """Make the database and print its record count.

    Raises:
        ConfigError: a required label map is missing.
        DataError: the list, all of its images or an annotation file cannot be read, or the database exists.
        RunError: writing failed.
    """
    from caffepy.cli.output import showing
    from caffepy.data.conversion.annotation_sets import AnnotationOptions, convert_annotation_set
    from caffepy.data.conversion.image_sets import Database

    target = Database(args.db_name, args.backend, args.overwrite)
    annotations = AnnotationOptions(args.anno_type, args.label_type, args.label_map_file, args.check_label)
    images = image_options(args, min_dim=args.min_dim, max_dim=args.max_dim)
    with showing("files") as progress:
        done = convert_annotation_set(
            args.rootfolder, args.listfile, target, images, annotations, seed_of(args), progress
        )
    print(f"{args.db_name}: {done.records} images{f', {done.skipped} left out' if done.skipped else ''}")
    return 0


_CREATE_ANNOSET = """\
Make a database of images with labels or boxes and a link to it, as the scripts/create_annoset.py of SSD's Caffe does.

The folder of DB_NAME and EXAMPLEDIR are made if they are absent. The link has the database's name."""


def add_parser_create_annoset(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "create_annoset", help="make a database of images with boxes and a link to it", description=_CREATE_ANNOSET
    )
    example = ("EXAMPLEDIR", Path, "the folder of the link")
    add_positionals(parser, (*ROOT_AND_LIST, ("DB_NAME", Path, "the database to make"), example))
    add_switch(parser, "redo", "replace an existing database, like --overwrite")
    _add_annotation_flags(parser)


def run_create_annoset(args: argparse.Namespace) -> int:
    """Make the database and the link, and print the record count.

    Raises:
        ConfigError: a required label map is missing.
        DataError: as `run_convert_annoset`; or EXAMPLEDIR has a file of the link's name.
        RunError: writing failed.
    """
    link = args.exampledir / args.db_name.name
    if link.exists() and not link.is_symlink():
        raise DataError(f"'{link}' exists and is no symbolic link; remove it, or name another EXAMPLEDIR")
    args.overwrite = args.overwrite or args.redo
    try:
        args.db_name.parent.mkdir(parents=True, exist_ok=True)
        status = run_convert_annoset(args)
        args.exampledir.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(args.db_name.absolute())
    except OSError as error:
        raise RunError(f"'{error.filename}' cannot be written: {error.strerror}") from error
    return status


_COMPUTE_IMAGE_MEAN = """\
Compute the mean image of a database and the mean of each channel, as Caffe's compute_image_mean does.

OUTPUT_FILE is for transform_param { mean_file: ... }; the channel means are for mean_value."""


def add_parser_compute_image_mean(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "compute_image_mean", help="compute the mean image of a database", description=_COMPUTE_IMAGE_MEAN
    )
    parser.add_argument("input_db", type=Path, metavar="INPUT_DB", help="the database")
    parser.add_argument("output_file", type=Path, nargs="?", metavar="OUTPUT_FILE", help="the mean to write")
    parser.add_argument("--backend", choices=("lmdb", "leveldb"), default="lmdb", help="kind of database (lmdb)")
    add_threads_flag(parser)


def run_compute_image_mean(args: argparse.Namespace) -> int:
    """Compute the mean, write it and log the channels' means.

    Raises:
        DataError: the database cannot be read, or its images differ in size.
        RunError: the mean cannot be written.
    """
    from caffepy.cli.output import showing
    from caffepy.data.mean import channel_means, compute_mean, write_mean
    from caffepy.utils.files import check_not_input, check_writable

    if args.output_file is not None:
        check_not_input(args.output_file, args.input_db.glob("*"))
        check_writable(args.output_file)
    with showing("files") as progress:
        mean = compute_mean(args.input_db, args.backend, args.threads or None, progress)
    if args.output_file is not None:
        write_mean(args.output_file, mean)
        logger.info("Write to %s", args.output_file)
    logger.info("Number of channels: %d", len(mean))
    for channel, value in enumerate(channel_means(mean)):
        logger.info("mean_value channel [%d]: %.6g", channel, value)
    return 0


_MNIST_FILES: tuple[tuple[str, type, str], ...] = (
    ("IMAGE_FILE", Path, "idx3 file of images"),
    ("LABEL_FILE", Path, "idx1 file of labels"),
    ("DB_NAME", Path, "the database to make"),
)
_CONVERT_MNIST_DATA = """\
Make a database from MNIST files, or other files in idx format, as Caffe's convert_mnist_data does.

Files ending in .gz are unpacked. `caffepy data mnist` downloads MNIST and makes both databases."""


def add_parser_convert_mnist_data(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "convert_mnist_data", help="make a database from MNIST files", description=_CONVERT_MNIST_DATA
    )
    add_positionals(parser, _MNIST_FILES)
    add_backend_flags(parser)


def run_convert_mnist_data(args: argparse.Namespace) -> int:
    """Make the database and print its record count.

    Raises:
        DataError: the files are not a valid pair, or the database exists.
        RunError: writing failed.
    """
    from caffepy.data.conversion.image_sets import Database
    from caffepy.data.conversion.mnist_cifar import convert_digits

    target = Database(args.db_name, args.backend, args.overwrite)
    print(f"{args.db_name}: {convert_digits(args.image_file, args.label_file, target)} images")
    return 0


_CONVERT_MNIST_SIAMESE_DATA = """\
Make a database of random pairs of digits for a siamese net, as Caffe's convert_mnist_siamese_data does.

A record has two images as channels, and the label 1 if they show the same digit, else 0. There are as many pairs as
images."""


def add_parser_convert_mnist_siamese_data(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "convert_mnist_siamese_data",
        help="make a database of pairs of MNIST's digits",
        description=_CONVERT_MNIST_SIAMESE_DATA,
    )
    add_positionals(parser, _MNIST_FILES)
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="seed of the pairs (0)")
    add_backend_flags(parser, "leveldb")


def run_convert_mnist_siamese_data(args: argparse.Namespace) -> int:
    """Make the database and print its record count.

    Raises:
        DataError: the files are not a valid pair, or the database exists.
        RunError: writing failed.
    """
    from caffepy.data.conversion.image_sets import Database
    from caffepy.data.conversion.mnist_cifar import convert_digits

    target = Database(args.db_name, args.backend, args.overwrite)
    print(f"{args.db_name}: {convert_digits(args.image_file, args.label_file, target, args.seed)} pairs")
    return 0


_CONVERT_CIFAR_DATA = """\
Make cifar10_train_lmdb and cifar10_test_lmdb from CIFAR-10's binary version, as Caffe's convert_cifar_data does,
and mean.binaryproto, the mean of the training images."""


def add_parser_convert_cifar_data(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "convert_cifar_data", help="make the databases of CIFAR-10", description=_CONVERT_CIFAR_DATA
    )
    names = (
        ("INPUT_FOLDER", Path, "folder of data_batch_1.bin to _5.bin and test_batch.bin"),
        ("OUTPUT_FOLDER", Path, "folder for the databases"),
    )
    add_positionals(parser, names)
    parser.add_argument(
        "backend", choices=("lmdb", "leveldb"), nargs="?", default="lmdb", help="kind of database (lmdb)"
    )
    add_overwrite_flag(parser, "replace an existing database")


def run_convert_cifar_data(args: argparse.Namespace) -> int:
    """Make the databases and print their record counts.

    Raises:
        DataError: files are missing or not CIFAR-10's, or a database exists.
        RunError: writing failed.
    """
    from caffepy.data.conversion.mnist_cifar import convert_cifar

    for path, count in convert_cifar(args.input_folder, args.output_folder, args.backend, args.overwrite).items():
        print(f"{path}: {count} images")
    print(f"{args.output_folder / 'mean.binaryproto'}: the mean of the training images")
    return 0


_CREATE_LABEL_MAP = """\
Write the LabelMap of a list of classes, as the create_label_map of SSD's Caffe does.
Each line of MAPFILE is a name, a name and a label, or a name, a label and a display name."""


def add_parser_create_label_map(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "create_label_map", help="write the LabelMap of a list of classes", description=_CREATE_LABEL_MAP
    )
    add_positionals(parser, (("MAPFILE", Path, "the list of classes"), ("OUTFILE", Path, "the LabelMap to write")))
    add_switch(parser, "include-background", "add the class none_of_the_above as label 0")
    parser.add_argument(
        "--delimiter", default=" ", metavar="CHARS", help="field separators, any of these characters (default: a space)"
    )


def run_create_label_map(args: argparse.Namespace) -> int:
    """Write the LabelMap and print its number of classes.

    Raises:
        DataError: the list cannot be read or is invalid.
        RunError: writing failed.
    """
    from caffepy.data.conversion.annotation_sets import create_label_map
    from caffepy.utils.files import check_not_input

    check_not_input(args.outfile, [args.mapfile])
    count = create_label_map(args.mapfile, args.outfile, args.delimiter, args.include_background)
    print(f"{args.outfile}: {count} classes")
    return 0


_GET_IMAGE_SIZE = """\
Write name, height and width of each image of a list, as the get_image_size of SSD's Caffe does.

detection_output_param { save_output_param { name_size_file: ... } } reads such files."""


def add_parser_get_image_size(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("get_image_size", help="write the sizes of images", description=_GET_IMAGE_SIZE)
    add_positionals(parser, (*ROOT_AND_LIST, ("OUTFILE", Path, "the file to write")))
    parser.add_argument(
        "--name-id-file", type=Path, metavar="FILE", help="lines of a name and an id: write ids instead of names"
    )
    add_threads_flag(parser)


def run_get_image_size(args: argparse.Namespace) -> int:
    """Write the sizes and print their number.

    Raises:
        DataError: the list or all of its images cannot be read, or an image has no id.
        RunError: writing failed.
    """
    from caffepy.cli.output import showing
    from caffepy.data.conversion.annotation_sets import write_image_sizes
    from caffepy.utils.files import check_not_input

    check_not_input(args.outfile, filter(None, (args.listfile, args.name_id_file)))
    with showing("files") as progress:
        done = write_image_sizes(
            args.rootfolder, args.listfile, args.outfile, args.name_id_file, args.threads or None, progress
        )
    print(f"{args.outfile}: {done.records} images{f', {done.skipped} left out' if done.skipped else ''}")
    return 0


# -- flags of several tools --------------------------------------------------------------------------------


def add_backend_flags(parser: argparse._ActionsContainer, default: str = "lmdb") -> None:
    """Add --backend and --overwrite, for tools that write a database."""
    kinds = ("lmdb", "leveldb")
    parser.add_argument("--backend", choices=kinds, default=default, help=f"kind of database ({default})")
    add_overwrite_flag(parser, "replace an existing database")


def add_image_flags(parser: argparse._ActionsContainer) -> None:
    """Add the image and order flags of convert_imageset and convert_annoset."""
    add_switch(parser, "gray", "read images in greyscale, with one channel")
    add_switch(parser, "shuffle", "write in a random order, see --seed")
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="seed of the random order (0)")
    for side in ("height", "width"):
        parser.add_argument(
            f"--resize-{side}", type=natural, default=0, metavar="N", help=f"resize to this {side} (0: keep)"
        )
    add_switch(parser, "check-size", "fail if two images differ in size")
    add_switch(parser, "encoded", "store image files instead of pixels")
    parser.add_argument(
        "--encode-type", default="", metavar="TYPE", help="store them as jpg, png, ... (default: as the file is)"
    )
    add_threads_flag(parser)


def add_threads_flag(parser: argparse._ActionsContainer) -> None:
    """--threads."""
    parser.add_argument("--threads", type=natural, default=0, metavar="N", help="that decode images (0: all cores)")
