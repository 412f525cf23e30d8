"""Tests of the package layers ("floors", docs/design.md §2): imports lead only to lower layers, and `import raymq` is
quick and works in any directory."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import raymq

ROOT = Path(__file__).parents[2]
FLOORS = ["raymq", "storage", "actors", "placement", "raydp_jobs"]
RAY_FREE = ["storage", "actors/core"]

PROBE = """
import sys
import raymq
early = sorted({name.partition(".")[0] for name in sys.modules} & {"ray", "pyarrow", "numpy", "pydantic"})
import raymq.tools.cli, raymq.client.client, raymq.client.admin.admin
import raymq.client.consumer.push.consumer, raymq.client.consumer.pull.consumer
slow = sorted({"pandas", "pyarrow.compute"} & sys.modules.keys())
unresolved = [name for name in raymq.__all__ if getattr(raymq, name, None) is None]
import raymq.client.scan.range_reader
server = sorted({name.partition(".")[0] for name in sys.modules} & {"storage", "actors", "placement", "raydp_jobs"})
print(early, unresolved, server, slow)
"""


def imported_packages(source: Path, *, inside_functions: bool) -> set[str]:
    """Return the packages that a module imports. Imports in functions and under TYPE_CHECKING are included only if
    `inside_functions` is set."""
    found = set()
    todo: list[ast.AST] = [ast.parse(source.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.FunctionDef) and not inside_functions:
            continue
        todo += ast.iter_child_nodes(node)
    return found


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_point_down_only(floor):
    above = set(FLOORS[FLOORS.index(floor) + 1 :])
    found = {path.name: imported_packages(path, inside_functions=False) & above for path in modules(floor)}
    assert {name: packages for name, packages in found.items() if packages} == {}


@pytest.mark.parametrize("floor", RAY_FREE)
def test_the_store_and_the_cores_never_import_ray(floor):
    assert [path.name for path in modules(floor) if "ray" in imported_packages(path, inside_functions=True)] == []


def test_raymq_works_beside_a_users_own_storage_and_actors_and_loads_nothing_of_the_servers(tmp_path):
    for name in ("storage", "actors", "placement", "raydp_jobs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('this folder is the user\\'s')")
    # Run the probe program as a user's script, so that the script's directory is first on the import path.
    (tmp_path / "program.py").write_text(PROBE)
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[] [] [] []", "")


def test_every_name_in_all_resolves():
    assert sorted(raymq.__all__) == raymq.__all__ == dir(raymq)
    assert len(set(raymq.__all__)) == len(raymq.__all__)
    for name in raymq.__all__:
        assert getattr(raymq, name) is not None


def test_every_error_of_the_tree_is_public():
    from raymq.common import errors

    classes = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    tree = {name for name, value in classes.items() if issubclass(value, errors.RaymqError)}
    assert tree == {name for name in raymq.__all__ if name.endswith("Error")}


def test_type_checkers_see_the_names_that_are_resolved_lazily():
    source = ast.parse((ROOT / "raymq/__init__.py").read_text())
    block = next(node for node in source.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(seen) | {"__version__"} == set(raymq.__all__)
    for name, module in seen.items():
        assert getattr(raymq, name) is getattr(import_module(module), name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Mesage'"):
        _ = raymq.Mesage
