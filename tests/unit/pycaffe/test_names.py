"""The names of `caffepy.pycaffe`: all of them are there, and a type checker sees the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from caffepy import pycaffe


@pytest.mark.parametrize("name", pycaffe.__all__)
def test_a_name_resolves(name: str) -> None:
    assert getattr(pycaffe, name) is not None


def test_a_type_checker_sees_every_name() -> None:
    tree = ast.parse(Path(pycaffe.__file__).read_text())
    found = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert set(pycaffe.__all__) <= found


def test_another_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nte'"):
        pycaffe.Nte  # noqa: B018
