"""Renderer: renders the console's templates to HTML text. All inserted values are escaped."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from raymq.tools.console.messages.body import visible
from raymq.tools.console.settings import ConsoleSettings
from raymq.tools.console.web import texts

CONSOLE_DIRECTORY: Final = Path(__file__).parents[1]
STATIC_DIRECTORY: Final = CONSOLE_DIRECTORY / "static"
NAVIGATION: Final = (
    ("/", "Overview"),
    ("/topics", "Topics"),
    ("/groups", "Groups"),
    ("/messages", "Messages"),
    ("/delayed", "Delayed"),
    ("/producers", "Producers"),
    ("/cluster", "Cluster"),
    ("/audit", "Audit"),
)
"""The pages in the navigation bar of every page: path and title."""


class Renderer:
    """Renders the templates of one console.

    All templates can use `url(path)`, the address of a page below the console's base path; `static(name)`, the address
    of a static file; `refresh` and `refresh_list`, htmx triggers for parts that refresh themselves; `ui`, the macros of
    macros.html; the filters of raymq.tools.console.web.texts; and `visible`.
    """

    def __init__(self, settings: ConsoleSettings) -> None:
        self._environment = environment = Environment(
            loader=FileSystemLoader(CONSOLE_DIRECTORY / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {
            "number": texts.number,
            "rate": texts.rate,
            "size": texts.size,
            "duration": texts.duration,
            "duration_ms": texts.duration_ms,
            "order": texts.order,
            "time": texts.time_of,
            "iso": texts.iso_time,
            "percent": texts.percent,
            "segment": texts.segment,
            "prose": texts.prose,
            "sentence": texts.sentence,
            "last_line": texts.last_line,
            "permission": texts.permission,
            "visible": visible,
        }
        base = settings.base_path
        environment.globals |= {
            "url": lambda path: base + path,
            "static": lambda name: f"{base}/static/{name}?{file_version(name)}",
            "plural": texts.plural,
            "refresh": f"every {settings.refresh_s * 1000:.0f}ms",
            "refresh_list": f"every {settings.refresh_s * 2000:.0f}ms",
            "navigation": NAVIGATION,
        }
        environment.globals["ui"] = environment.get_template("macros.html").module

    def render(self, template: str, values: dict[str, Any], block: str = "") -> str:
        """Render a template to HTML text. If `block` is given, only this block of the template is rendered."""
        found = self._environment.get_template(template)
        if not block:
            return found.render(values)
        return "".join(found.blocks[block](found.new_context(values)))

    def has_block(self, template: str, block: str) -> bool:
        """Return True if the template itself (not a template that it extends) has a block of this name."""
        return block in self._environment.get_template(template).blocks


@cache
def file_version(name: str) -> str:
    """Return a few digits that change with a file's content, so that browsers may cache the file."""
    return hashlib.sha256((STATIC_DIRECTORY / name).read_bytes()).hexdigest()[:12]
