"""The names of topics, consumer groups and brokers that commands have seen, for completion with TAB.

To ask the cluster takes a second, so TAB asks `~/.cache/raymq/names.json` instead. A command that saw names writes them
there: a list of all replaces what was known, a single name is added. What was listed more than a day ago is forgotten.
The file is replaced as a whole, and only its user may read it. Nothing depends on it: without it, nothing is completed.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal

import click
from click.shell_completion import CompletionItem

Kind = Literal["topics", "groups", "brokers"]

NAMES_MAX: Final = 5000
"""The most names of a kind that are kept."""
NAMES_KEPT_S: Final = 86_400.0


def names_file() -> Path:
    """The path of the file; XDG_CACHE_HOME may say that caches are elsewhere."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "raymq/names.json"


def known_names(kind: Kind) -> list[str]:
    """The names of a kind that were seen in the last day, sorted."""
    return _names(_read(), kind)


def saw_all(kind: Kind, names: Iterable[str]) -> None:
    """Keep these names: they are all that there are."""
    _write({**_read(), kind: {"seen_s": time.time(), "names": sorted(names)[:NAMES_MAX]}})


def saw(kind: Kind, name: str) -> None:
    """Keep one more name. The others do not get younger by it."""
    content = _read()
    names = _names(content, kind)
    if name in names:
        return
    seen_s = content[kind]["seen_s"] if names else time.time()
    _write({**content, kind: {"seen_s": seen_s, "names": sorted([name, *names[: NAMES_MAX - 1]])}})


def gone(kind: Kind, name: str) -> None:
    """Forget a name: it was deleted."""
    content = _read()
    names = _names(content, kind)
    if name in names:
        names.remove(name)
        _write({**content, kind: {**content[kind], "names": names}})


def completes(kind: Kind) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """The completion of an argument that is a name of this kind."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in known_names(kind) if name.startswith(incomplete)]

    return complete


def _names(content: dict[str, Any], kind: Kind) -> list[str]:
    known = content.get(kind)
    if not isinstance(known, dict) or not isinstance(known.get("names"), list):
        return []
    seen_s = known.get("seen_s")
    if not isinstance(seen_s, (int, float)) or not 0 <= time.time() - seen_s < NAMES_KEPT_S:
        return []
    # Shells read a line for each name.
    return [name for name in known["names"][:NAMES_MAX] if isinstance(name, str) and name.isprintable()]


def _read() -> dict[str, Any]:
    try:
        content = json.loads(names_file().read_bytes())
    except (OSError, ValueError):
        return {}  # there is none yet, or something else was written over it
    return content if isinstance(content, dict) else {}


def _write(content: dict[str, Any]) -> None:
    path = names_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # of mode 0600
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError:
        return  # a home that is full or read-only is no reason for the command to fail
