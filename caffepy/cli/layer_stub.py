"""`caffepy layer-stub`: files for a layer type that the user writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from caffepy.cli.options import ReadsNets, overwrite_option
from caffepy.errors import ConfigError
from caffepy.utils.options import argument, file_name, option


@dataclass(kw_only=True)
class LayerStubCommand(ReadsNets):
    """Begin a layer type of your own.

    Write a class for a layer type of a fork, with the type's settings and the methods to fill in, and a test that
    checks its gradient.

      caffepy layer-stub ScaledTanH --proto fork/src/caffe/proto/caffe.proto
      pytest test_scaled_tanh.py

    docs/tutorials/unknown-fork.md shows how to fill it in and how commands use it.
    """

    type: str = argument("the layer type, as prototxts write it", metavar="TYPE")
    param: str = option(
        "LayerParameter's field with the type's settings (default: the one named after the type)",
        metavar="FIELD",
        default="",
    )
    output: Path | None = option("the file of the class (default: named after the type)", file_name)
    overwrite: bool = overwrite_option("replace existing files")

    def run(self) -> int:
        """Write both files, and print their names and the next command.

        Raises:
            ConfigError: caffepy has the type, its name is no Python name, or a file exists.
            RunError: a file cannot be written.
        """
        from caffepy.formats.alias import find_alias
        from caffepy.layers.layer import is_known
        from caffepy.scaffold.layer_stub import list_fields, make_stub
        from caffepy.utils.files import atomic_write, check_output

        stub = make_stub(self.type, self.param)
        if is_known(self.type) or find_alias(self.type) is not None:
            raise ConfigError(f"TYPE is '{self.type}', which caffepy or a --plugin has; docs/reference/layers.md tells")
        layer = self.output or Path(stub.file_name)
        if layer.suffix != ".py" or not layer.stem.isidentifier():
            raise ConfigError(f"--output {layer}: give a Python file's name of letters, digits and _, such as layer.py")
        test = layer.with_name(f"test_{layer.name}")
        for path in (layer, test):
            check_output(path, self.overwrite)
        for path, text in ((layer, stub.layer_text()), (test, stub.test_text(layer))):
            with atomic_write(path) as file:
                file.write(text.encode())
        if stub.field is None:
            print(f"{self.type} has no settings of its own, or --param FIELD names them: {list_fields()}")
        print(f"{layer}: fill in forward and backward\n{test}: then run pytest {test}")
        return 0
