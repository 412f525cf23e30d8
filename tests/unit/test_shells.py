"""Tests that the consumers' thread and I/O code ("shells") changes the state of the decision classes ("cores") only
through methods of the decision classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHELLS = [
    *sorted((ROOT / "actors/pull").glob("*.py")),
    ROOT / "raymq/client/consumer/pull/engine.py",
    *sorted((ROOT / "raymq/client/consumer/assignment").glob("*.py")),
]
STATE = ("core", "_core", "process_queue", "assigned")


def written(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Yield the attributes to which a module assigns values, including attributes in tuples."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def owner_of(attribute: ast.Attribute) -> str:
    """Return the name that stands directly before an attribute in the code, for example "core" for the attribute in
    `self.core.position`."""
    return ast.unparse(attribute.value).rpartition(".")[2]


@pytest.mark.parametrize("path", SHELLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_shell_assigns_no_field_of_its_core(path):
    assert [ast.unparse(node) for node in written(ast.parse(path.read_text())) if owner_of(node) in STATE] == []


def test_an_assignment_to_a_core_would_be_found():
    tree = ast.parse("self._instance.core.suspended, paused = kept\nheld = process_queue.trouble")
    assert [owner_of(node) for node in written(tree)] == ["core"]
