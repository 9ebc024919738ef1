"""Which module of the package imports which, read from the sources; run it to print the figures of the structure.

python tests/support/import_graph.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "caffepy"
GENERATED = ("caffe_pb2.py",)


@dataclass(frozen=True)
class Import:
    """One import of one module of the package, wherever it stands: at the top, in a function, for type checking.

    Args:
        importer: the importing module's full name.
        imported: the full name of what is imported: a module, or something in one; with leading dots if relative.
        line: where.
        typing_only: it stands under ``if TYPE_CHECKING``.
    """

    importer: str
    imported: str
    line: int
    typing_only: bool


@cache
def module_paths() -> dict[str, Path]:
    """Every module of the package by its full name; a folder's `__init__` has the folder's name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        if path.name not in GENERATED:
            parts = (ROOT.name, *path.relative_to(ROOT).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def _trees() -> dict[str, ast.Module]:
    return {module: ast.parse(path.read_text()) for module, path in module_paths().items()}


@cache
def all_imports() -> tuple[Import, ...]:
    """All imports of the package's modules, other libraries' and relative ones included."""
    return tuple(
        Import(importer, *found) for importer, tree in _trees().items() for found in _imported_names(tree, False)
    )


def imports() -> list[Import]:
    """All imports between modules of the package; `imported` is always a module."""
    modules = module_paths()
    found = []
    for one in all_imports():
        imported = one.imported if one.imported in modules else one.imported.rpartition(".")[0]
        if imported in modules and imported != one.importer:
            found.append(Import(one.importer, imported, one.line, one.typing_only))
    return found


def _imported_names(tree: ast.AST, typing_only: bool) -> Iterator[tuple[str, int, bool]]:
    """Dotted names: of a module, or of something in a module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _imported_names(ast.Module(node.body, []), True)
            yield from _imported_names(ast.Module(node.orelse, []), typing_only)
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            yield from ((f"{source}.{alias.name}", node.lineno, typing_only) for alias in node.names)
        yield from _imported_names(node, typing_only)


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
        if not _is_folder(path):
            folder = str(path.parent.relative_to(ROOT.parent))
            counts[folder] = counts.get(folder, 0) + 1
    return counts


def lines_of_modules() -> dict[str, int]:
    """How many lines each module has."""
    return {name: len(path.read_text().splitlines()) for name, path in module_paths().items()}


def without_docstring() -> list[str]:
    """Folders whose `__init__` does not say what they own."""
    modules = module_paths()
    return [name for name, tree in _trees().items() if _is_folder(modules[name]) and not ast.get_docstring(tree)]


def _is_folder(path: Path) -> bool:
    return path.name == "__init__.py"


def lengths_of_functions() -> list[int]:
    """How many lines each function and method has, in ascending order."""
    lengths = []
    for tree in _trees().values():
        for node in ast.walk(tree):
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
