"""Tests that the documentation site, which is built from docs/, contains every page, name and option."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import raydp_jobs
import raymq
import raymq.data
import raymq.serve

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("package", [raymq, raydp_jobs, raymq.data, raymq.serve], ids=lambda one: one.__name__)
def test_every_public_name_is_in_the_reference(package):
    page = (DOCS / "reference/api.md").read_text()
    told = set(re.findall(rf"^\.\. auto\w+:: {package.__name__}\.(\w+)$", page, re.MULTILINE))
    # The page need not list the error classes: the directive `automodule` documents all names of raymq.common.errors.
    errors = {name for name in package.__all__ if name.endswith("Error")}
    assert set(package.__all__) - errors - {"__version__"} <= told


class SiteModules(NamedTuple):
    """The modules of docs/site/ that make parts of the site."""

    llms: ModuleType
    options: ModuleType


@pytest.fixture
def site() -> Iterator[SiteModules]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS / "site"))
        import llms
        import options

        yield SiteModules(llms, options)
        for module in (llms, options):
            sys.modules.pop(module.__name__, None)


PAGES_IN_A_GROUP = 8


def test_the_groups_of_the_sidebar_list_every_page_once(site: SiteModules):
    groups = site.llms.groups_of(DOCS)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md", "index.md"}
    assert sorted(page for listed in groups.values() for page in listed) == sorted(pages)
    assert {title: len(listed) for title, listed in groups.items() if len(listed) > PAGES_IN_A_GROUP} == {}


def test_llms_txt_has_the_title_and_a_sentence_of_every_page(site: SiteModules):
    lines = site.llms.llms_text(DOCS).splitlines()
    assert lines[0] == "# raymq"
    rows = [re.fullmatch(r"- \[(.+)\]\((\S+)\.html\): (\S.{19,})", line) for line in lines if line.startswith("- ")]
    assert None not in rows
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")} - {"README", "index"}
    assert {row[2] for row in rows} == pages
    assert "- [Tutorials](tutorials.html): Each section is one task and one whole program" in "\n".join(lines)


def arguments_of(module: ModuleType, call: object) -> set[str]:
    """Return the names of a call's keyword arguments. If the call takes a TypedDict (`Unpack[…]`), the keys of the
    TypedDict are keyword arguments, too."""
    names: set[str] = set()
    for name, parameter in inspect.signature(call).parameters.items():
        unpacked = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
        names |= {name} if unpacked is None else set(module.GROUPS[unpacked[1]].options.__annotations__)
    return names - {"self"}


def test_the_page_of_options_has_every_argument_with_type_and_default(site: SiteModules):
    page = (DOCS / "reference/options.md").read_text()
    told = re.findall(r"^<!-- (?:own )?options of (\S+) -->$", page, re.MULTILINE)
    assert told == list(site.options.CALLS)
    filled = site.options.fill_in(page)
    assert "<!--" not in filled
    for name, call in site.options.CALLS.items():
        rows = re.findall(
            r"^\| `(\w+)` \| `(.+)` \| ([^|]*) \| ([^|]+) \| ([^|]*) \|$", site.options.table_of(name), re.M
        )
        assert {row[0] for row in rows} == arguments_of(site.options, call), name


def test_every_number_among_the_options_has_bounds_and_every_time_its_unit(site: SiteModules):
    options = [option for call in site.options.CALLS.values() for option in site.options.options_of(call)]
    numbers = [option for option in options if re.search(r"\b(int|float)\b", option.kind)]
    assert len(numbers) > 20
    assert [option for option in numbers if option.bounds in ("", "any")] == []
    timed = [option for option in numbers if re.search(r"_(s|ms|bytes|mib)$", option.name)]
    assert timed
    assert [option for option in timed if not option.unit] == []


def test_options_are_what_the_code_has(site: SiteModules):
    found = {option.name: option for option in site.options.options_of(raymq.Client.producer)}
    assert found["send_timeout_s"][1:] == ("float", "s", "`30.0`", "0.001 to 1e9")
    assert found["max_buffered_bytes"][1:] == ("int", "bytes", "64 MiB", "at least 1")
    assert found["when_full"][1:] == ("'block' | 'raise'", "", "`'block'`", "")


def test_the_meaning_of_every_option_is_below_its_table(site: SiteModules):
    """For each call and each settings class, a documentation page shows a table of the options, and below it the
    docstring. The docstring must name each option."""
    for call in site.options.CALLS.values():
        text = call.__doc__ or ""
        for parameter in inspect.signature(call).parameters.values():
            if unpacked := re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation)):
                group = site.options.GROUPS[unpacked[1]]
                text += (type(group.defaults).__doc__ or "") + (group.options.__doc__ or "")
        missing = {name for name in arguments_of(site.options, call) if not re.search(rf"`{name}\b", text)}
        assert missing - {"group", "topic", "queues"} == set(), call.__qualname__
