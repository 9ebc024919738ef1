"""The order of the folders of `caffepy.parallel`: imports go downwards only."""

from __future__ import annotations

from import_graph import imports

ORDER = ("hardware", "store", "communicators", "processes", "control", "gradients", "root", "launch")
"""From low to high; `launch` stands beside the root."""


def folder(module: str) -> int:
    """The level of a module of caffepy.parallel."""
    parts = module.split(".")
    return ORDER.index(parts[2]) if len(parts) > 2 and parts[2] in ORDER else ORDER.index("root")


def test_folders_import_lower_ones_only() -> None:
    within = [
        each
        for each in imports()
        if all(name.startswith("caffepy.parallel.") for name in (each.importer, each.imported))
    ]
    assert len(within) > 50
    upwards = [each for each in within if folder(each.imported) > folder(each.importer)]
    assert not upwards, "\n".join(f"{each.importer}:{each.line} imports {each.imported}" for each in upwards)
    assert not [each for each in within if ".launch." in each.importer and folder(each.imported) == ORDER.index("root")]
