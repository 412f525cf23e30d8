"""Tests that the documentation pages name only existing links, files, commands, options and settings, and state the
settings' real defaults."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from enum import Enum
from functools import cache, wraps
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from pydantic import BaseModel

import raymq
from raymq.common.config.access import AccessOptions
from raymq.common.config.cluster import BrokerOptions, ClusterSettings, PlacementOptions, ReplicationOptions
from raymq.common.config.metrics import MetricsOptions
from raymq.common.config.store import StoreOptions
from raymq.tools.cli import cli
from tests.support.cases import check_all

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = {
    "Top level": ClusterSettings,
    "`broker`": BrokerOptions,
    "`replication`": ReplicationOptions,
    "`placement`": PlacementOptions,
    "`metrics`": MetricsOptions,
    "`access`": AccessOptions,
    "`store`": StoreOptions,
}
FLOORS = ("raymq", "storage", "actors", "placement", "raydp_jobs")


def each_page(check: Callable[[Path], None]) -> Callable[[], None]:
    """Turn `check` into one test over all documentation pages. The test reports all pages that fail the check."""

    @wraps(check)
    def of_all_pages() -> None:
        check_all(PAGES, check)

    # Delete `__wrapped__`: pytest would follow it to `check`, and take the argument `page` of `check` for a fixture.
    del of_all_pages.__wrapped__
    return of_all_pages


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text())
    for target, anchor in links:
        path = (page.parent / target).resolve() if target else page
        assert path.is_file(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {target}#{anchor}"


COLUMNS_OF_CODE = 88
"""Maximum width of a line of code in a page: the documentation site cuts longer lines off."""
LINES_OF_A_PAGE = 400


def lines_of_code(page: Path) -> list[str]:
    """Return the lines of a page's snippets and indented code. Output and drawings (`text`) are not code."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    text = page.read_text()
    snippets = [line for language, body in fence.findall(text) if language != "text" for line in body.splitlines()]
    return snippets + re.findall(r"^ {4}.*$", fence.sub("", text), re.MULTILINE)


@each_page
def test_code_fits_into_the_width_of_the_site(page):
    assert [line for line in lines_of_code(page) if len(line) > COLUMNS_OF_CODE] == []


@each_page
def test_no_page_is_long(page):
    assert len(page.read_text().splitlines()) <= LINES_OF_A_PAGE, "split the page by task"


def test_the_front_page_has_the_first_program_of_the_readme():
    programs = [
        re.search(r"^```python\n.*?^```\n\n```text\n.*?^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
        for page in ("README.md", "docs/index.md")
    ]
    assert None not in programs
    assert len({program[0] for program in programs}) == 1


def test_the_readme_shows_a_push_consumer():
    snippets = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert any("push_consumer(" in snippet and ".on_message(" in snippet for snippet in snippets)


def test_pages_with_snippets_are_run():
    """Every page with code snippets must be run by a test. tests/integration/programs/test_guide.py runs README.md,
    whose first program is on index.md, and guide.md. tests/integration/serve/test_tasks.py runs ray-serve.md. In
    tests/integration/servers/, test_hooks.py runs hooks.md, test_members.py runs members.md, and test_queue_kinds.py
    runs light-queues.md. tests/chaos/clients/test_gateway_page.py runs gateway.md. tests/integration/clients/ runs the
    other pages. Code that is not run is indented."""
    pages = {page.name for page in PAGES if re.search(r"^```(python|sh)$", page.read_text(), re.MULTILINE)}
    assert pages == {
        "README.md",
        "coming-from-celery.md",
        "coming-from-kafka.md",
        "coming-from-ray-queue.md",
        "filters.md",
        "gateway.md",
        "guide.md",
        "hooks.md",
        "http.md",
        "index.md",
        "light-queues.md",
        "logs.md",
        "members.md",
        "namespaces.md",
        "predicates.md",
        "priorities.md",
        "programs.md",
        "ray-data.md",
        "ray-serve.md",
        "recall-and-replay.md",
        "request-reply.md",
        "share-mode.md",
        "simple-consumer.md",
        "topics.md",
        "trace.md",
        "transactions.md",
        "tutorials.md",
    }


@each_page
def test_files_and_folders_that_are_named_exist(page):
    """Files and folders that a page names in backticks exist, for example `raymq/common/errors.py`, `tests/unit/` and
    `raymq.client.cluster.launcher`."""
    words = re.findall(r"`([\w./-]+)`", page.read_text())
    paths = [word for word in words if word.startswith((*(f"{floor}/" for floor in FLOORS), "tests/", "docs/"))]
    modules = [word for word in words if word.startswith(tuple(f"{floor}." for floor in FLOORS)) and word.islower()]
    at_install_only, loggers = {"raymq/_floors/"}, {"raymq.trace"}
    missing = [path for path in paths if not (ROOT / path).exists() and path not in at_install_only]
    missing += [
        name
        for name in modules
        if not name.endswith(".yaml")
        and name not in loggers
        and name.removeprefix("raymq.") not in raymq.__all__
        and not (ROOT / name.replace(".", "/")).is_dir()
        and not (ROOT / f"{name.replace('.', '/')}.py").is_file()
    ]
    assert missing == []


def modules_in_the_drawings() -> list[str]:
    """Return the paths of the modules that the drawings of docs/architecture.md and docs/data-paths.md name.

    A drawing may write a module's name without its package. The package is then named earlier on the same line, or on a
    line above.
    """
    text = "".join((ROOT / "docs" / page).read_text() for page in ("architecture.md", "data-paths.md"))
    paths, package = [], ""
    for drawing in re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in drawing.splitlines():
            begins = re.match(r" *(?:\d +|\()([a-z_]+(?:/[a-z_]+)*/)(?![a-z])", line)
            package = begins[1] if begins else package
            for name in re.findall(r"[a-z_/]+\.py\b", line):
                paths.append(name if "/" in name else package + name)
    return paths


def test_modules_in_the_drawings_exist():
    paths = modules_in_the_drawings()
    assert len(paths) > 25
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_names_in_the_table_of_changes_are_in_the_files_beside_them():
    """In the last table of docs/architecture.md, each name in backticks must occur in one of the files of its
    row."""
    _, _, table = (ROOT / "docs/architecture.md").read_text().partition("## Where does my change go?")
    rows = [re.findall(r"`([^`]+)`", line) for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    for words in rows:
        paths = [ROOT / word for word in words if "/" in word]
        files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
        source = "\n".join(file.read_text() for file in files)
        for word in words:
            if "/" not in word:
                assert word.rpartition(".")[2] in source, f"{word} is not in {paths}"


def commands_of(page: Path) -> list[list[str]]:
    """Return the `raymq …` commands of a page, each as a list of words. The commands are in indented lines, in shell
    snippets and in backticks."""
    text = re.sub(r" \\\n\s*", " ", page.read_text())  # join continued lines
    shell = "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    lines = [*re.findall(r"^ {4}(.*)$", text, re.MULTILINE), *shell.splitlines()]
    commands = [match[1] for line in lines if (match := re.fullmatch(r"(?:.* \| )?(raymq [a-z].*)", line))]
    commands += re.findall(r"`(raymq [a-z][^`]*)`", text)
    return [shlex.split(command, comments=True) for command in commands]


@cache
def command_at(*names: str) -> click.Command | None:
    """Return the command that the first words of `names` name; None if no such command exists."""
    command: click.Command | None = cli
    for name in names:
        command = command.commands.get(name) if isinstance(command, click.Group) else None
    return command


def options_of(command: click.Command) -> set[str]:
    """Return every spelling of every option of a command."""
    named = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return named | {"--help", "-h", "--version"}


@each_page
def test_commands_and_their_options_exist(page):
    for words in commands_of(page):
        names = words[1:2]
        first = command_at(*names)
        if isinstance(first, click.Group) and len(words) > 2 and not words[2].startswith("-"):
            names = words[1:3]
        command = command_at(*names)
        assert command is not None, f"{page.name}: {' '.join(words)}"
        unknown = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} - options_of(command)
        assert unknown == set(), f"{page.name}: {' '.join(words)}"


def test_the_page_of_the_command_line_names_every_command():
    text = (ROOT / "docs/cli.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `raymq ")]
    told = {tuple(match) for row in rows for match in re.findall(r"`raymq (\w[\w-]*) ?([\w-]*)`", row)}
    for row in rows:
        group = re.match(r"\| `raymq (\w+)", row)[1]
        told |= {(group, name) for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])}
    there = set()
    for name, command in cli.commands.items():
        there |= {(name, sub) for sub in command.commands} if isinstance(command, click.Group) else {(name, "")}
    assert told == there


@each_page
def test_options_in_the_tables_exist_somewhere(page):
    known = {
        "--numprocesses",
        "--labels",
        "--kustomize",
        "--no-deps",
        "--wheel-dir",
        "--system-config",
        "--generate",
        "--cluster",
    }
    for name, command in cli.commands.items():
        for sub in [command, *(command.commands.values() if isinstance(command, click.Group) else ())]:
            known |= options_of(sub)
            assert name
    told = {word.split()[0] for word in re.findall(r"`(--[a-z-]+[^`]*)`", page.read_text())}
    assert told - known == set()


def shown(value: Any) -> str:
    """Return a setting's default value as docs/settings.md writes it in YAML."""
    if isinstance(value, Enum):
        return str(value.value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "[]" if value == () else str(value)


@pytest.mark.parametrize("title", SECTIONS)
def test_the_page_of_settings_has_every_key_with_its_default(title):
    text = (ROOT / "docs/settings.md").read_text()
    _, _, rest = text.partition(f"\n## {title}\n")
    section = rest.partition("\n## ")[0]
    told = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| \S", section, re.MULTILINE)
    fields = SECTIONS[title].model_fields
    assert told == [
        (name, shown(field.default)) for name, field in fields.items() if not isinstance(field.default, BaseModel)
    ]


def test_the_example_of_settings_has_the_defaults():
    [example] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/settings.md").read_text(), re.DOTALL)
    assert ClusterSettings.model_validate(yaml.safe_load(example)) == ClusterSettings()


@each_page
def test_settings_that_are_named_exist(page):
    """Each setting that a page names exists. The test checks settings that the page writes in backticks with a value,
    such as `flush_disk_type: SYNC_FLUSH`."""
    keys = {name for model in SECTIONS.values() for name in model.model_fields}
    for block in re.findall(r"`([^`\n]+)`", page.read_text()):
        told = re.findall(r"\b([a-z]+_[a-z_]+): ", block)
        assert set(told) <= keys, f"{page.name}: {block}"
