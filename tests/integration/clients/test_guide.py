"""docs/guide.md, run as it stands: every snippet, in its order, by the commands and the interpreter a user has."""

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

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Snippet(NamedTuple):
    language: str
    text: str
    line: int
    expected: str | None


DOWN = Snippet("sh", "raymq down\n", 0, None)


def snippets() -> list[Snippet]:
    """The guide's snippets; what each prints is in the text block behind it, if there is one."""
    text = GUIDE.read_text()
    found = [(match[1], match[2], text.count("\n", 0, match.start()) + 1) for match in FENCE.finditer(text)]
    followed = [*found[1:], ("", "", 0)]
    return [
        Snippet(language, body, line, after[1] if after[0] == "text" else None)
        for (language, body, line), after in zip(found, followed, strict=True)
        if language != "text"
    ]


@pytest.fixture
def box() -> Iterator[Sandbox]:
    """A sandbox whose Ray listens on loopback only."""
    with pytest.MonkeyPatch.context() as patch, sandbox() as box:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        yield box


def run(snippet: Snippet) -> str:
    """What a snippet prints; it must end well."""
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
    where = f"{GUIDE.name}:{snippet.line}"
    assert done.returncode == 0, f"{where} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_snippet_of_the_guide_does_what_it_says(box):
    found = snippets()
    assert {snippet.language for snippet in found} == {"python", "sh"}
    assert found[-1].text == DOWN.text
    try:
        for snippet in found:
            printed = run(snippet)
            if snippet.expected is not None:
                assert printed == snippet.expected, f"{GUIDE.name}:{snippet.line}"
    except BaseException:
        run(DOWN)
        raise
