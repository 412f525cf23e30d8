"""Tests that the documentation site, which is built from docs/, contains every page and every public name."""

from __future__ import annotations

import re
from pathlib import Path

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
    # The directive `automodule` documents all names of raymq.common.errors.
    errors = {name for name in package.__all__ if name.endswith("Error")}
    assert set(package.__all__) - errors - {"__version__"} <= told


def test_the_first_page_lists_every_page():
    listed = re.findall(r"\]\((?!\.\.)([\w/-]+\.md)\)", (DOCS / "README.md").read_text())
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(pages)
