"""How Sphinx makes a site of the pages in docs/: `make docs`.

The pages are written for a reader of the repository, so nothing in them is Sphinx's own. The first page is
docs/index.md. The sidebar has the groups and the order of docs/README.md. Only the pages in docs/reference/ are filled
in when the site is built: the command line from click, the Python names from docstrings, the options from the code.
The site also has `llms.txt`.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Final

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

from llms import INDEX, groups_of, llms_text
from options import fill_in

DOCS: Final = Path(__file__).parents[1]

project = "raymq"
author = "the developers of raymq"
release = version = version_of("raymq")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click", "sphinx_copybutton"]
root_doc = "index"
source_suffix = {".md": "markdown"}
exclude_patterns = ["site"]
myst_heading_anchors = 4
default_role = "code"

autodoc_typehints = "signature"
autodoc_class_signature = "separated"  # most objects are made by a method of another, not by their class
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Names that modules import for type checkers only, so that Sphinx cannot look them up.
autodoc_type_aliases = {
    "Check": "raymq.client.transactions.checks.Check",
    "ProducerOptions": "raymq.client.producer.settings.ProducerOptions",
    "PullOptions": "raymq.client.consumer.pull.settings.PullOptions",
    "PushConsumer": "raymq.client.consumer.push.consumer.PushConsumer",
    "PushOptions": "raymq.client.consumer.push.consumer.PushOptions",
    "RepeatableWriter": "raymq.client.producer.repeatable.writer.RepeatableWriter",
    "SimpleOptions": "raymq.client.consumer.simple.settings.SimpleOptions",
    "TopicProgress": "raydp_jobs.stream.progress.TopicProgress",
    "SparkSession": "pyspark.sql.SparkSession",
    "StreamingQuery": "pyspark.sql.streaming.StreamingQuery",
    "Block": "ray.data.block.Block",
    "TaskContext": "ray.data.TaskContext",
}

# Types of other libraries; their pages are not at hand when the site is built.
ALIASES: Final = ("TypeAliasForwardRef", "BodyType", "Unreadable", "Expression", "Expressions")
nitpick_ignore = [("py:class", alias) for alias in ALIASES]
nitpick_ignore_regex = [
    ("py:.*", rf"{one}\..*")
    for one in (
        "collections", "concurrent", "datetime", "enum", "pathlib", "types", "typing",
        "annotated_types", "msgspec", "pa", "pyarrow", "pyspark", "ray",
    )
]  # fmt: skip

html_theme = "furo"
html_title = f"raymq {release}"
html_copy_source = False
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"


def setup(app: Sphinx) -> None:
    """Called by Sphinx: connects what this file does to pages."""
    app.connect("source-read", _lead_inside)
    app.connect("source-read", _add_contents)
    app.connect("source-read", _add_options)
    app.connect("build-finished", _write_llms_text)
    app.connect("autodoc-skip-member", _skip_constructor)
    app.connect("autodoc-process-docstring", _mark_code)


# Pages outside docs/, and the pages here that include them.
OUTSIDE: Final = {
    "../README.md": "index.md",
    "../CHANGELOG.md": "reference/changelog.md",
    "../CONTRIBUTING.md": "reference/contributing.md",
    "../examples/README.md": "reference/examples.md",
}


def _lead_inside(app: Sphinx, name: str, source: list[str]) -> None:
    """Have links to pages outside docs/ lead to the pages that include them."""
    for outside, inside in OUTSIDE.items():
        source[0] = re.sub(rf"\]\({re.escape(outside)}(#[^)]*)?\)", f"]({inside})", source[0])


def _add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Give the first page a table of contents for the sidebar: one part for each group of docs/README.md."""
    if name != root_doc:
        return
    groups = groups_of(DOCS)
    groups["Reference"].append(INDEX)
    for title, pages in groups.items():
        names = "\n".join(page.removesuffix(".md") for page in pages)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{names}\n```\n"


def _add_options(app: Sphinx, name: str, source: list[str]) -> None:
    """Fill in the tables of options."""
    if name == "reference/options":
        source[0] = fill_in(source[0])


def _write_llms_text(app: Sphinx, error: Exception | None) -> None:
    """Write `llms.txt` into the site, unless the build failed."""
    if error is None:
        Path(app.outdir, "llms.txt").write_text(llms_text(DOCS))


def _skip_constructor(app: Sphinx, kind: str, name: str, value: object, skip: bool, options: object) -> bool | None:
    """Leave `__init__` out: most objects are made by a method of another."""
    return True if name == "__init__" else None


def _mark_code(app: Sphinx, kind: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Say that indented lines of a docstring are code: in our docstrings nothing else is indented."""
    text = re.sub(r"(?<=\n\n)(?= {4}(?! ))(?<!::\n\n)", "::\n\n", "\n".join(lines))
    lines[:] = re.sub(r"(\n {4}.*\n\n)::\n\n(?= {4})", r"\1", text).split("\n")
