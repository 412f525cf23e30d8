"""Tests of the documentation pages with snippets: every snippet of a page runs unchanged and in order, with the
commands and the interpreter of a user."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.clusters.cluster import Sandbox, sandbox, user_environment

ROOT = Path(__file__).resolve().parents[3]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = ("python", "sh")


class Snippet(NamedTuple):
    language: str
    text: str
    where: str
    expected: str | None


DOWN = Snippet("sh", "raymq down\n", "", None)


def snippets(page: Path) -> list[Snippet]:
    """Return the runnable snippets of a documentation page. If a text block follows a snippet, this block is the
    snippet's expected output."""
    text = page.read_text()
    found = [(match[1], match[2], text.count("\n", 0, match.start()) + 1) for match in FENCE.finditer(text)]
    followed = [*found, ("", "", 0)][1:]
    return [
        Snippet(language, body, f"{page.name}:{line}", after[1] if after[0] == "text" else None)
        for (language, body, line), after in zip(found, followed, strict=True)
        if language in RUN
    ]


@pytest.fixture
def box() -> Iterator[Sandbox]:
    """Yield a sandbox in which Ray listens only on loopback."""
    with pytest.MonkeyPatch.context() as patch, sandbox() as box:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        yield box


def run(snippet: Snippet) -> str:
    """Run a snippet and return its output. Fails if the snippet fails."""
    command = [sys.executable, "-"] if snippet.language == "python" else ["bash", "-e", "-"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        input=snippet.text,
        env={**user_environment(), "PATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{snippet.where} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/guide.md", marks=pytest.mark.long)])
def test_every_snippet_of_a_page_prints_the_documented_output(box, page):
    found = snippets(ROOT / page)
    assert any(snippet.expected for snippet in found)
    starts_servers = any("raymq up" in snippet.text for snippet in found)
    if starts_servers:
        assert found[-1].text == DOWN.text
    try:
        for snippet in found:
            printed = run(snippet)
            if snippet.expected is not None:
                assert printed == snippet.expected, snippet.where
    except BaseException:
        if starts_servers:
            run(DOWN)
        raise
