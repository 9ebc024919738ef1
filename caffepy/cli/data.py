"""Data set commands: `caffepy data` and Caffe's data tools."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import Command, overwrite_option
from caffepy.errors import ConfigError, DataError, RunError
from caffepy.utils.options import argument, natural, option, same_option, switch

if TYPE_CHECKING:
    from caffepy.data.conversion.annotation_sets import AnnotationOptions
    from caffepy.data.conversion.image_sets import ConversionResult

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class DataCommand(Command):
    """Make the LMDBs of a known data set.

    Make mnist_train_lmdb and mnist_test_lmdb, as Caffe's convert_mnist_data does.

    Without --subset and --from the whole set (60,000 and 10,000 digits, 11 MB) is downloaded from its public mirrors
    and checked by its SHA-256. An LMDB gets its name only when it is complete. An existing LMDB with the same digits is
    kept; any other is replaced only with --overwrite.
    """

    set: str = argument("which set", choices=("mnist",))
    subset: bool = switch("only the 10,000 digits included in caffepy")
    source: Path | None = option("read the idx files in DIR, gzipped or not", Path, "DIR", flags=("--from",))
    to: Path = option("where to put the LMDBs (default: here)", Path, "DIR", default=Path())
    overwrite: bool = overwrite_option("replace existing LMDBs")

    def run(self) -> int:
        """Make the LMDBs and print their paths.

        Raises:
            DataError: input files are missing or invalid, or LMDBs with other records exist.
            RunError: the download or a write failed.
        """
        from caffepy.data.conversion import mnist_cifar as mnist

        if self.subset and self.source is not None:
            raise ConfigError("--subset and --from exclude each other; give one of them")
        source = mnist.SUBSET if self.subset else self.source
        read = mnist.fetch_file if source is None else mnist.folder_reader(source)
        there = {path for path in mnist.lmdb_paths(self.to).values() if path.exists() and not self.overwrite}
        for path, count in mnist.build_lmdbs(self.to, read, self.overwrite).items():
            print(f"{path}: {count} digits{', there already' if path in there else ''}")
        return 0


@dataclass(kw_only=True)
class _ThreadsOption:
    threads: int = option("that decode images (0: all cores)", natural, default=0)


@dataclass(kw_only=True)
class _DatabaseOptions:
    """Of tools that write a database."""

    backend: str = option("kind of database", default="lmdb", choices=("lmdb", "leveldb"))
    overwrite: bool = overwrite_option("replace an existing database")


@dataclass(kw_only=True)
class _ImageSetCommand(_ThreadsOption, _DatabaseOptions, Command):
    """A tool that makes a database of the images in a list."""

    rootfolder: str = argument("prefix of each path in the list", str, "ROOTFOLDER")
    listfile: Path = argument("one image per line", Path, "LISTFILE")
    db_name: Path = argument("the database to make", Path, "DB_NAME")
    gray: bool = switch("read images in greyscale, with one channel", gflags=True)
    shuffle: bool = switch("write in a random order, see --seed", gflags=True)
    seed: int = option("seed of the random order (0)", natural, default=0)
    resize_height: int = option("resize to this height (0: keep)", natural, default=0)
    resize_width: int = option("resize to this width (0: keep)", natural, default=0)
    check_size: bool = switch("fail if two images differ in size", gflags=True)
    encoded: bool = switch("store image files instead of pixels", gflags=True)
    encode_type: str = option("store them as jpg, png, ... (default: as the file is)", default="", metavar="TYPE")

    def _convert(self, convert: Callable[..., ConversionResult], *annotations: AnnotationOptions, **others: int) -> int:
        """Make the database and print its record count."""
        from caffepy.cli.output import showing
        from caffepy.data.conversion.image_sets import Database, ImageOptions

        target = Database(self.db_name, self.backend, self.overwrite)
        options = ImageOptions(
            gray=self.gray,
            resize_height=self.resize_height,
            resize_width=self.resize_width,
            encoded=self.encoded,
            encode_type=self.encode_type,
            check_size=self.check_size,
            threads=self.threads or None,
            **others,
        )
        seed = self.seed if self.shuffle else None
        with showing("files") as progress:
            done = convert(self.rootfolder, self.listfile, target, options, *annotations, seed, progress)
        _print_done(self.db_name, done)
        return 0


def _print_done(path: Path, done: ConversionResult) -> None:
    print(f"{path}: {done.records} images{f', {done.skipped} left out' if done.skipped else ''}")


@dataclass(kw_only=True)
class ConvertImagesetCommand(_ImageSetCommand):
    """Make a database of images and labels.

    Make a database from a list of images, as Caffe's convert_imageset does.

    Each line of LISTFILE is a path relative to ROOTFOLDER, a space and a label:

        cats/1.jpg 0

    Unreadable images are logged and skipped. The database gets its name only when it is complete.
    """

    def run(self) -> int:
        """Make the database and print its record count.

        Raises:
            DataError: the list or all of its images cannot be read, or the database exists.
            RunError: writing failed.
        """
        from caffepy.data.conversion.image_sets import convert_image_set

        return self._convert(convert_image_set)


@dataclass(kw_only=True)
class ConvertAnnosetCommand(_ImageSetCommand):
    """Make a database of images with boxes.

    Make a database of images with labels or boxes, as the convert_annoset of SSD's Caffe does.

    Each line of LISTFILE is a path and a label, or with --anno_type detection the paths of an image and its annotation
    file, relative to ROOTFOLDER. Annotation files are VOC's XML, one JSON file per image with COCO's fields, or text
    with a numeric label, xmin, ymin, xmax and ymax on each line.
    """

    anno_type: str = option(
        "whether the list has labels or annotation files",
        default="classification",
        choices=("classification", "detection"),
    )
    label_type: str = option("annotation format", default="xml", choices=("xml", "json", "txt"))
    label_map_file: Path | None = option("a LabelMap from names to labels", Path)
    check_label: bool = switch("fail if a name appears twice in the LabelMap", gflags=True)
    min_dim: int = option("enlarge the shorter side to at least N", natural, default=0)
    max_dim: int = option("shrink the longer side to at most N", natural, default=0)

    def run(self) -> int:
        """Make the database and print its record count.

        Raises:
            ConfigError: a required label map is missing.
            DataError: the list, all of its images or an annotation file cannot be read, or the database exists.
            RunError: writing failed.
        """
        from caffepy.data.conversion.annotation_sets import AnnotationOptions, convert_annotation_set

        annotations = AnnotationOptions(self.anno_type, self.label_type, self.label_map_file, self.check_label)
        return self._convert(convert_annotation_set, annotations, min_dim=self.min_dim, max_dim=self.max_dim)


@dataclass(kw_only=True)
class CreateAnnosetCommand(ConvertAnnosetCommand):
    """Make a database of images with boxes and a link to it.

    Make a database of images with labels or boxes and a link to it, as the scripts/create_annoset.py of SSD's Caffe
    does.

    The folder of DB_NAME and EXAMPLEDIR are made if they are absent. The link has the database's name.
    """

    rootfolder: str = same_option(_ImageSetCommand, "rootfolder")
    listfile: Path = same_option(_ImageSetCommand, "listfile")
    db_name: Path = same_option(_ImageSetCommand, "db_name")
    exampledir: Path = argument("the folder of the link", Path, "EXAMPLEDIR")
    redo: bool = switch("replace an existing database, like --overwrite", gflags=True)

    def run(self) -> int:
        """Make the database and the link, and print the record count.

        Raises:
            ConfigError: a required label map is missing.
            DataError: as of `ConvertAnnosetCommand.run`; or EXAMPLEDIR has a file of the link's name.
            RunError: writing failed.
        """
        link = self.exampledir / self.db_name.name
        if link.exists() and not link.is_symlink():
            raise DataError(f"'{link}' exists and is no symbolic link; remove it, or name another EXAMPLEDIR")
        self.overwrite = self.overwrite or self.redo
        try:
            self.db_name.parent.mkdir(parents=True, exist_ok=True)
            status = super().run()
            self.exampledir.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(self.db_name.absolute())
        except OSError as error:
            raise RunError(f"'{error.filename}' cannot be written: {error.strerror}") from error
        return status


@dataclass(kw_only=True)
class ComputeImageMeanCommand(_ThreadsOption, Command):
    """Compute the mean image of a database.

    Compute the mean image of a database and the mean of each channel, as Caffe's compute_image_mean does.

    OUTPUT_FILE is for transform_param { mean_file: ... }; the channel means are for mean_value.
    """

    input_db: Path = argument("the database", Path, "INPUT_DB")
    output_file: Path | None = argument("the mean to write", Path, "OUTPUT_FILE", default=None)
    backend: str = same_option(_DatabaseOptions, "backend")

    def run(self) -> int:
        """Compute the mean, write it and log the channels' means.

        Raises:
            DataError: the database cannot be read, or its images differ in size.
            RunError: the mean cannot be written.
        """
        from caffepy.cli.output import showing
        from caffepy.data.mean import channel_means, compute_mean, write_mean
        from caffepy.utils.files import check_not_input, check_writable

        if self.output_file is not None:
            check_not_input(self.output_file, self.input_db.glob("*"))
            check_writable(self.output_file)
        with showing("files") as progress:
            mean = compute_mean(self.input_db, self.backend, self.threads or None, progress)
        if self.output_file is not None:
            write_mean(self.output_file, mean)
            logger.info("Write to %s", self.output_file)
        logger.info("Number of channels: %d", len(mean))
        for channel, value in enumerate(channel_means(mean)):
            logger.info("mean_value channel [%d]: %.6g", channel, value)
        return 0


@dataclass(kw_only=True)
class _DigitsCommand(_DatabaseOptions, Command):
    """A tool that makes a database of MNIST's files."""

    image_file: Path = argument("idx3 file of images", Path, "IMAGE_FILE")
    label_file: Path = argument("idx1 file of labels", Path, "LABEL_FILE")
    db_name: Path = argument("the database to make", Path, "DB_NAME")


@dataclass(kw_only=True)
class ConvertMnistDataCommand(_DigitsCommand):
    """Make a database from MNIST files.

    Make a database from MNIST files, or other files in idx format, as Caffe's convert_mnist_data does.

    Files ending in .gz are unpacked. `caffepy data mnist` downloads MNIST and makes both databases.
    """

    def run(self) -> int:
        """Make the database and print its record count.

        Raises:
            DataError: the files are not a valid pair, or the database exists.
            RunError: writing failed.
        """
        from caffepy.data.conversion.image_sets import Database
        from caffepy.data.conversion.mnist_cifar import convert_digits

        target = Database(self.db_name, self.backend, self.overwrite)
        print(f"{self.db_name}: {convert_digits(self.image_file, self.label_file, target)} images")
        return 0


@dataclass(kw_only=True)
class ConvertMnistSiameseDataCommand(_DigitsCommand):
    """Make a database of pairs of MNIST's digits.

    Make a database of random pairs of digits for a siamese net, as Caffe's convert_mnist_siamese_data does.

    A record has two images as channels, and the label 1 if they show the same digit, else 0. There are as many pairs as
    images.
    """

    seed: int = option("seed of the pairs (0)", natural, default=0)
    backend: str = same_option(_DatabaseOptions, "backend", default="leveldb")

    def run(self) -> int:
        """Make the database and print its record count.

        Raises:
            DataError: the files are not a valid pair, or the database exists.
            RunError: writing failed.
        """
        from caffepy.data.conversion.image_sets import Database
        from caffepy.data.conversion.mnist_cifar import convert_digits

        target = Database(self.db_name, self.backend, self.overwrite)
        print(f"{self.db_name}: {convert_digits(self.image_file, self.label_file, target, self.seed)} pairs")
        return 0


@dataclass(kw_only=True)
class ConvertCifarDataCommand(Command):
    """Make the databases of CIFAR-10.

    Make cifar10_train_lmdb and cifar10_test_lmdb from CIFAR-10's binary version, as Caffe's convert_cifar_data does,
    and mean.binaryproto, the mean of the training images.
    """

    input_folder: Path = argument("folder of data_batch_1.bin to _5.bin and test_batch.bin", Path, "INPUT_FOLDER")
    output_folder: Path = argument("folder for the databases", Path, "OUTPUT_FOLDER")
    backend: str = argument("kind of database", default="lmdb", choices=("lmdb", "leveldb"))
    overwrite: bool = overwrite_option("replace an existing database")

    def run(self) -> int:
        """Make the databases and print their record counts.

        Raises:
            DataError: files are missing or not CIFAR-10's, or a database exists.
            RunError: writing failed.
        """
        from caffepy.data.conversion.mnist_cifar import convert_cifar

        for path, count in convert_cifar(self.input_folder, self.output_folder, self.backend, self.overwrite).items():
            print(f"{path}: {count} images")
        print(f"{self.output_folder / 'mean.binaryproto'}: the mean of the training images")
        return 0


@dataclass(kw_only=True)
class CreateLabelMapCommand(Command):
    """Write the LabelMap of a list of classes.

    Write the LabelMap of a list of classes, as the create_label_map of SSD's Caffe does.
    Each line of MAPFILE is a name, a name and a label, or a name, a label and a display name.
    """

    mapfile: Path = argument("the list of classes", Path, "MAPFILE")
    outfile: Path = argument("the LabelMap to write", Path, "OUTFILE")
    include_background: bool = switch("add the class none_of_the_above as label 0", gflags=True)
    delimiter: str = option(
        "field separators, any of these characters (default: a space)", default=" ", metavar="CHARS"
    )

    def run(self) -> int:
        """Write the LabelMap and print its number of classes.

        Raises:
            DataError: the list cannot be read or is invalid.
            RunError: writing failed.
        """
        from caffepy.data.conversion.annotation_sets import create_label_map
        from caffepy.utils.files import check_not_input

        check_not_input(self.outfile, [self.mapfile])
        count = create_label_map(self.mapfile, self.outfile, self.delimiter, self.include_background)
        print(f"{self.outfile}: {count} classes")
        return 0


@dataclass(kw_only=True)
class GetImageSizeCommand(_ThreadsOption, Command):
    """Write the sizes of images.

    Write name, height and width of each image of a list, as the get_image_size of SSD's Caffe does.

    detection_output_param { save_output_param { name_size_file: ... } } reads such files.
    """

    rootfolder: str = same_option(_ImageSetCommand, "rootfolder")
    listfile: Path = same_option(_ImageSetCommand, "listfile")
    outfile: Path = argument("the file to write", Path, "OUTFILE")
    name_id_file: Path | None = option("lines of a name and an id: write ids instead of names", Path)

    def run(self) -> int:
        """Write the sizes and print their number.

        Raises:
            DataError: the list or all of its images cannot be read, or an image has no id.
            RunError: writing failed.
        """
        from caffepy.cli.output import showing
        from caffepy.data.conversion.annotation_sets import write_image_sizes
        from caffepy.utils.files import check_not_input

        check_not_input(self.outfile, filter(None, (self.listfile, self.name_id_file)))
        with showing("files") as progress:
            done = write_image_sizes(
                self.rootfolder, self.listfile, self.outfile, self.name_id_file, self.threads or None, progress
            )
        _print_done(self.outfile, done)
        return 0
