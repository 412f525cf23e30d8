"""Tests of the code's structure: few modules per folder, no circular imports, and one name per constant.

import-linter's contracts (pyproject.toml) check the order of the top-level packages, and the order inside raymq,
storage and actors.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from raymq.common.former_names import present_name

ROOT = Path(__file__).parents[2]
FLOORS = ["raymq", "storage", "actors", "placement", "raydp_jobs"]
WINGS = ["tools", "client", "remoting", "telemetry", "records", "common"]
"""Folders of raymq, one for each layer ("wing"). A folder contains only packages of its own layer. The seventh layer,
the adapters, has no folder: its packages are directly in raymq."""
MODULES_MAX = 15
RELATIVE_WORDS = ("What", "Where", "Whether", "Who", "Whom", "Whose", "Which")
NOT_A_MODULE = {"__init__.py", "conftest.py"}


def name_of(path: Path) -> str:
    """Return the dotted name of a module of the repository."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@lru_cache
def trees() -> dict[str, ast.Module]:
    """Return the parsed source of every module in the checked packages, by dotted name."""
    paths = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
    return {name_of(path): ast.parse(path.read_text()) for path in paths}


def imported(name: str) -> Iterator[str]:
    """Yield the modules that the module `name` imports, including imports in functions and for type checkers. Only
    modules of the checked packages count."""
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in trees() else node.module


def circle_from(start: str, graph: dict[str, set[str]]) -> list[str]:
    """Return a circular path of imports from module `start` back to `start`. Returns an empty list if no such path
    exists."""
    came_from: dict[str, str] = {}
    todo = [start]
    while todo:
        module = todo.pop()
        for target in graph[module]:
            if target == start:
                path = [start, module]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if target not in came_from:
                came_from[target] = module
                todo.append(target)
    return []


@pytest.mark.parametrize("folder", [*FLOORS, "tests"])
def test_no_folder_has_more_than_fifteen_modules(folder):
    counts: dict[str, int] = defaultdict(int)
    for path in (ROOT / folder).rglob("*.py"):
        if path.name not in NOT_A_MODULE:
            counts[str(path.parent.relative_to(ROOT))] += 1
    assert counts
    assert {name: count for name, count in counts.items() if count > MODULES_MAX} == {}


def test_no_module_imports_itself_over_others():
    """No module imports itself through other modules. Imports for type checkers count as imports, but names that raymq
    and raydp_jobs load lazily do not count."""
    graph = {name: {target for target in imported(name) if target in trees() and target != name} for name in trees()}
    graph["raymq"] = graph["raydp_jobs"] = set()
    circles = {frozenset(path): " → ".join(path) for name in graph if (path := circle_from(name, graph))}
    assert list(circles.values()) == []


def constants_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module's constants that consist of at least two words in capitals."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", target.id):
                yield target.id


def test_a_constant_has_one_name_and_one_module():
    homes: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees().items():
        for constant in constants_of(tree):
            homes[constant].append(name)
    assert len(homes) > 100
    assert {constant: names for constant, names in homes.items() if len(names) > 1} == {}


PUBLIC_TWICE = {"WriteSummary"}
"""Class names that may occur twice: raymq.data and raydp_jobs each have a documented class of this name."""


def test_a_class_name_has_one_meaning():
    """No two classes have the same name. A module may define a class twice, if one definition is for type
    checkers."""
    homes: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(name)
    assert len(homes) > 500
    twice = {name for name, modules in homes.items() if len(modules) > 1}
    assert {name: homes[name] for name in twice - PUBLIC_TWICE} == {}
    assert twice >= PUBLIC_TWICE


LINES_OF_A_SLIVER = 60
SLIVERS = {
    "actors.core.nameserver.kv_config": "a decision without Ray; its user is an actor",
    "actors.core.replica.read_routing": "a decision without Ray; its user is a thin shell",
    "actors.transactions.methods": "its user, the Broker, joins the methods of all its parts",
    "placement.controller_metrics": "its user, the Controller, is large enough",
    "raydp_jobs.source.losses": "the name of its logger is documented",
    "raymq.client.consumer.pull_from_which_node": "its user, the fetcher, is large enough",
    "raymq.records.logfiles.span_bytes": "its user is the store's list of operations",
    "storage.dispatch.visibility": "one of the parts of a store, which storage.parts joins",
    "storage.recovery.cut_bytes": "its user, the recovery, is large enough",
}
"""Modules of less than 60 lines that stay separate although only one module in their folder imports them, each with the
reason."""


def test_a_small_module_has_several_importers():
    """A small module is imported by several modules. If only one module uses it, its code belongs in that module's
    file."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name in trees():
        for target in set(imported(name)) - {name}:
            importers[target].add(name)
    paths = [path for floor in FLOORS for path in (ROOT / floor).rglob("*.py") if path.name not in NOT_A_MODULE]
    small = {name_of(path) for path in paths if len(path.read_text().splitlines()) < LINES_OF_A_SLIVER}
    assert {name for name in small if len(importers[name]) == 1} - set(SLIVERS) == set()
    assert set(SLIVERS) <= set(trees())


def test_loggers_have_one_name():
    others = [
        f"{name}: {ast.unparse(node)}"
        for name, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.Assign)
        and "getLogger" in ast.unparse(node.value)
        and ast.unparse(node) != "logger = logging.getLogger(__name__)"
    ]
    assert others == []


def test_a_records_header_is_unpacked_in_one_module():
    """Only `raymq.records.format.layout` contains the positions of the fields in a record's header. Other modules use
    its class RecordHeader."""
    named = [
        (name, node.id if isinstance(node, ast.Name) else node.attr)
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    ]
    assert {name for name, word in named if word == "HEADERS"} == {"raymq.records.format.layout"}


def rooms_on_disk() -> set[str]:
    """Return every folder below the checked packages that contains modules."""
    paths = [path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")]
    return {str(path.parent.relative_to(ROOT)) for path in paths if path.name not in NOT_A_MODULE}


def test_the_drawing_lists_every_room_and_no_other():
    """docs/architecture.md lists every folder that contains modules, and no other folder. It has a table for each
    top-level package and each layer of raymq, whose first column names the folders: `raymq/records/format/`."""
    text = (ROOT / "docs/architecture.md").read_text()
    listed = re.findall(rf"^\| `((?:{'|'.join(FLOORS)})/[\w/]*)` \|", text, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {name.rstrip("/") for name in listed} == rooms_on_disk()


def tables_of_rooms() -> dict[str, set[str]]:
    """Return the folders that docs/architecture.md lists, grouped by heading."""
    text = (ROOT / "docs/architecture.md").read_text()
    sections = re.split(r"^#{2,3} (.+)\n", text, flags=re.MULTILINE)[1:]
    found = {
        heading: set(re.findall(r"^\| `(raymq/[\w/]*)` \|", section, re.MULTILINE))
        for heading, section in zip(sections[::2], sections[1::2], strict=True)
    }
    return {heading: rooms for heading, rooms in found.items() if rooms}


def test_each_wing_has_one_table_with_all_of_its_rooms():
    rooms = {f"{room}/" for room in rooms_on_disk() if room.split("/")[0] == "raymq"}
    wings = {f"`raymq/{wing}/`": {room for room in rooms if room.startswith(f"raymq/{wing}/")} for wing in WINGS}
    tables = tables_of_rooms()
    [adapters] = set(tables) - set(wings)
    assert adapters.startswith("Adapters: ")
    assert tables == {**wings, adapters: rooms - set().union(*wings.values())}
    assert all(wings.values())


def test_every_folder_of_raymq_is_in_a_wing():
    folders = {path.parent.name for path in (ROOT / "raymq").glob("*/__init__.py")}
    assert folders == {*WINGS, "data", "gateway", "queue", "serve"}


def module_names_in(tree: ast.Module) -> Iterator[str]:
    """Yield the names of modules that a module imports, and the module names in its strings for tools such as `python
    -m`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


MAY_NAME_THEM = {"raymq/common/former_names.py", "tests/unit/raymq/common/test_former_names.py"}
LOGGER = "raymq.trace"
"""Name of a logger that users configure. The name looks like a module's name, but is not one."""


@pytest.mark.parametrize("folder", [*FLOORS, "tests", "examples", "docs"])
def test_no_module_is_named_by_its_former_name(folder):
    """No module is imported by its former name. raymq/common/former_names.py redirects former names, so such an import
    would otherwise go unnoticed."""
    paths = [path for path in sorted((ROOT / folder).rglob("*.py")) if str(path.relative_to(ROOT)) not in MAY_NAME_THEM]
    names = {(str(path), name) for path in paths for name in module_names_in(ast.parse(path.read_text()))}
    assert names
    former = {(path, name) for path, name in names if re.fullmatch(r"raymq(\.\w+)+", name) and present_name(name)}
    assert {(path, name) for path, name in former if name != LOGGER} == set()


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield the docstrings in a module, including the docstrings of constants and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield text.strip()


def test_no_docstring_begins_with_a_relative_word():
    """No docstring begins with a word that refers to another text. A docstring must be clear when it is read
    alone."""
    texts = [(name, text) for name, tree in trees().items() for text in docstrings(tree)]
    assert len(texts) > 1000
    assert [f"{name}: {text}" for name, text in texts if text.split(" ")[0] in RELATIVE_WORDS] == []


HARD_PHRASES = (
    *("that is there", "is none", "goes by", "is told", "are told", "comes again", "come again", "has its end"),
    *("the same, with", "meanwhile", "is to be", "are to be", "of which", "those that", "those of", "the one that"),
    *("hears", "obeys", "come to terms"),
)
"""Phrases that make a sentence hard to read: pronouns without a noun, machines described as people, and
outdated words."""
HARD_PHRASE = re.compile(
    rf"(?<![`\w])(?:{'|'.join(f'[{phrase[0].upper()}{phrase[0]}]{phrase[1:]}' for phrase in HARD_PHRASES)})\b"
    r"|\b[Tt]hat one(?=[.,;:)])"
)
HARD_PHRASES_LEFT = {
    "raymq/remoting": 2,
    "raymq/tools": 2,
}
"""Number of hard phrases in each folder whose texts are not all rewritten. The number may only fall. A folder without a
number has no hard phrases. Adapters of raymq count as `raymq`."""


def prose(path: Path) -> Iterator[str]:
    """Yield the texts in a file that people read: the whole page, or the comments and docstrings of a module."""
    text = path.read_text()
    if path.suffix == ".md":
        yield text
        return
    if not HARD_PHRASE.search(re.sub(r"\s*\n\s*(# )?", " ", text)):
        return  # a file without hard phrases is skipped early, because reading the tokens of all files takes seconds
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    yield from docstrings(ast.parse(text))


def folder_of(path: Path) -> str:
    """Return the key of HARD_PHRASES_LEFT to which a file belongs, or else the file's top folder."""
    top, second, *_ = path.relative_to(ROOT).parts
    return f"{top}/{second}" if f"{top}/{second}" in HARD_PHRASES_LEFT or second in WINGS else top


def test_hard_phrases_become_fewer():
    """The number of hard phrases in each folder does not grow. Each sentence must be readable alone, and must use
    common words for common things."""
    paths = [path for folder in [*FLOORS, "tests", "examples", "docs"] for path in (ROOT / folder).rglob("*.[pm][yd]")]
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(paths):
        for text in prose(path):
            places = HARD_PHRASE.findall(re.sub(r"\s+", " ", text))
            found[folder_of(path)] += [f"{path.relative_to(ROOT)}: {phrase}" for phrase in places]
    assert len(paths) > 1000
    grown = {name: texts for name, texts in found.items() if len(texts) > HARD_PHRASES_LEFT.get(name, 0)}
    assert grown == {}, "write the new texts without these phrases"


DICE = {"random", "secrets", "uuid", "uuid4"}


def evaluated_at_import(tree: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    """Yield the nodes that Python evaluates when a test module is imported: module constants and decorators."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from node.decorator_list
    yield from (statement for statement in tree.body if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr)))


def test_no_test_module_draws_random_numbers_at_import():
    """Importing a test module uses no random numbers. pytest-xdist refuses to run tests if its workers collect
    different cases, and a test must print its own seed."""
    drawn = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        if not re.search(r"^(import|from) (random|secrets|uuid)\b", text, re.MULTILINE):
            # skip modules that import none of random, secrets and uuid, because parsing every test module takes seconds
            continue
        for node in evaluated_at_import(ast.parse(text)):
            calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
            names = {name.id for call in calls for name in ast.walk(call) if isinstance(name, ast.Name)}
            drawn += [f"{path.relative_to(ROOT)}:{node.lineno}"] if names & DICE else []
    assert drawn == []
