"""Make `llms.txt` of the documentation site: each page's title, address and first sentence, for language models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

INDEX: Final = "README.md"
"""The page of docs/ that lists every page, below one heading for each group."""


class Page(NamedTuple):
    """A page of the site: its path in docs/, its title, and its first sentence as plain text."""

    path: str
    title: str
    sentence: str


def groups_of(docs: Path) -> dict[str, list[str]]:
    """Return the paths of all pages that docs/README.md lists, by the heading above them."""
    sections = re.split(r"^## (.+)\n", (docs / INDEX).read_text(), flags=re.MULTILINE)[1:]
    return {
        title: re.findall(r"^- \[[^]]+\]\((?!\.\.)([\w/-]+\.md)\)", text, re.MULTILINE)
        for title, text in zip(sections[::2], sections[1::2], strict=True)
    }


def page_at(docs: Path, path: str) -> Page:
    """Read a page's title and first sentence. A page that only includes another file gets the other file's.

    Raises ValueError if the page has no title, or no paragraph of text.
    """
    text = (docs / path).read_text()
    if included := re.match(r"```\{include\} (\S+)\n", text):
        text = ((docs / path).parent / included[1]).read_text()
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    blocks = (block.strip("\n") for block in text.split("\n\n"))
    prose = next((block for block in blocks if block and not block.startswith(("#", " ", "|", "-", "!", "<"))), None)
    if title is None or prose is None:
        raise ValueError(f"docs/{path} needs a title and a first sentence")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
    sentence = re.match(r".{20,}?[.?](?= |$)", plain)
    return Page(path, title[1], plain if sentence is None else sentence[0])


def llms_text(docs: Path) -> str:
    """Return the text of `llms.txt` (https://llmstxt.org): the front page, then every page in its group."""
    front = page_at(docs, "index.md")
    lines = [f"# {front.title}", "", f"> {front.sentence}"]
    for title, paths in groups_of(docs).items():
        pages = [page_at(docs, path) for path in paths]
        lines += ["", f"## {title}", ""]
        lines += [f"- [{page.title}]({page.path.removesuffix('.md')}.html): {page.sentence}" for page in pages]
    return "\n".join(lines) + "\n"
