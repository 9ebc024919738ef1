"""Which module of the package imports which, read from the sources; run it to print the figures of the structure.

    python tests/support/import_graph.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "caffepy"
GENERATED = ("caffe_pb2.py",)


@dataclass(frozen=True)
class Import:
    """One import of one module of the package, wherever it stands: at the top, in a function, for type checking.

    Args:
        importer: the importing module's full name.
        imported: the imported module's full name.
        line: where.
        typing_only: it stands under ``if TYPE_CHECKING``.
    """

    importer: str
    imported: str
    line: int
    typing_only: bool


def module_paths() -> dict[str, Path]:
    """Every module of the package by its full name; a folder's `__init__` has the folder's name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        if path.name not in GENERATED:
            parts = (ROOT.name, *path.relative_to(ROOT).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports() -> list[Import]:
    """All imports between modules of the package."""
    modules = module_paths()
    found = []
    for importer, path in modules.items():
        for name, line, typing_only in _imported_names(ast.parse(path.read_text()), False):
            imported = name if name in modules else name.rpartition(".")[0]
            if imported in modules and imported != importer:
                found.append(Import(importer, imported, line, typing_only))
    return found


def _imported_names(tree: ast.AST, typing_only: bool) -> Iterator[tuple[str, int, bool]]:
    """Dotted names: of a module, or of something in a module."""
    for node in ast.iter_child_nodes(tree):
        inside = typing_only or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.lineno, inside) for alias in node.names)
        yield from _imported_names(node, inside)


def circles() -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan's strongly connected components)."""
    graph: dict[str, set[str]] = {name: set() for name in module_paths()}
    for found in imports():
        graph[found.importer].add(found.imported)
    return [sorted(group) for group in _components(graph) if len(group) > 1]


def _components(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[list[str]]:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                yield from visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            index = stack.index(name)
            group = stack[index:]
            del stack[index:]
            yield group

    for name in graph:
        if name not in order:
            yield from visit(name)


def modules_in_folders() -> dict[str, int]:
    """How many modules each folder holds, its `__init__` not counted."""
    counts: dict[str, int] = {}
    for path in module_paths().values():
        if path.name != "__init__.py":
            folder = str(path.parent.relative_to(ROOT.parent))
            counts[folder] = counts.get(folder, 0) + 1
    return counts


def lines_of_modules() -> dict[str, int]:
    """How many lines each module has."""
    return {name: len(path.read_text().splitlines()) for name, path in module_paths().items()}


def lengths_of_functions() -> list[int]:
    """How many lines each function and method has, in ascending order."""
    lengths = []
    for path in module_paths().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
    return sorted(lengths)


def percentile(values: list[int], share: float) -> int:
    """The smallest value that at least `share` of the sorted values do not exceed."""
    return values[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Print the figures, the largest ones by name."""
    folders, lines, functions = modules_in_folders(), lines_of_modules(), lengths_of_functions()
    largest_folder, longest = max(folders, key=folders.__getitem__), max(lines, key=lines.__getitem__)
    print(f"{len(lines)} modules, {len(imports())} imports between them")
    for group in circles():
        print(f"circle of {len(group)}: {', '.join(group)}")
    print(f"circles: {len(circles())}")
    print(f"largest folder: {largest_folder} with {folders[largest_folder]} modules")
    print(f"longest module: {longest} with {lines[longest]} lines")
    print(f"functions: {len(functions)}, 90th percentile {percentile(functions, 0.9)} lines, longest {functions[-1]}")


if __name__ == "__main__":
    main()
