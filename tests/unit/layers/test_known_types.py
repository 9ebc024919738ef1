"""Layer types are found in their modules without importing the others."""

from __future__ import annotations

import subprocess
import sys

from caffepy.layers.known_types import layer_modules
from caffepy.layers.layer import LAYERS, import_layer_types

ONE = """
import sys
from caffepy.layers.layer import LAYERS, layer_class
assert layer_class("ReLU").__module__ == "caffepy.layers.activation"
assert "caffepy.layers.detection.prior_box" not in sys.modules and "numba" not in sys.modules
assert "PriorBox" not in LAYERS
try:
    layer_class("ReLUU", "layer 'a'")
except Exception as error:
    print(error)
"""


def test_the_sources_say_where_each_type_is() -> None:
    import_layer_types()
    found = {name: LAYERS.get(name).__module__ for name in LAYERS}
    assert layer_modules() == {name: module for name, module in found.items() if module.startswith("caffepy.")}


def test_a_types_module_is_imported_alone_and_all_are_for_an_unknown_one() -> None:
    result = subprocess.run([sys.executable, "-c", ONE], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "layer 'a': unknown layer type 'ReLUU'; did you mean 'ReLU'?"
