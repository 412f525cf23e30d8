"""`raymq completion`, and the names of topics, consumer groups and brokers that commands have seen, for completion
with TAB.

To ask the cluster takes a second, so TAB asks `~/.cache/raymq/names.json` instead. A command that saw names writes
them there: a list of all replaces what was known, a single name is added. What was listed more than a day ago is
forgotten. The file is replaced as a whole, and only its user may read it. Nothing depends on it: without it, nothing
is completed.
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
from click.shell_completion import CompletionItem, get_completion_class

from raymq.tools.cli.terminal.output import Command, out, say

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
    _write_names({**_read(), kind: {"seen_s": time.time(), "names": sorted(names)[:NAMES_MAX]}})


def saw(kind: Kind, name: str) -> None:
    """Keep one more name. The others do not get younger by it."""
    content = _read()
    names = _names(content, kind)
    if name in names:
        return
    seen_s = content[kind]["seen_s"] if names else time.time()
    _write_names({**content, kind: {"seen_s": seen_s, "names": sorted([name, *names[: NAMES_MAX - 1]])}})


def gone(kind: Kind, name: str) -> None:
    """Forget a name: it was deleted."""
    content = _read()
    names = _names(content, kind)
    if name in names:
        names.remove(name)
        _write_names({**content, kind: {**content[kind], "names": names}})


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


def _write_names(content: dict[str, Any]) -> None:
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


_VARIABLE: Final = "_RAYMQ_COMPLETE"
_MARK: Final = "# raymq completion"
_FISH: Final = "~/.config/fish/completions/raymq.fish"
_STARTUP: Final = {"bash": "~/.bashrc", "zsh": "~/.zshrc"}


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--install", is_flag=True, help="Put it where the shell finds it when it starts; again changes nothing.")
@click.pass_context
def completion(ctx: click.Context, shell: str, install: bool) -> None:
    """Print a script that completes raymq's commands, options, topics, groups and brokers with TAB.

    \b
    raymq completion bash --install            then open a new shell (bash 4.4 or newer)
    eval "$(raymq completion bash)"            for this shell only
    raymq completion fish --install

    Names are those that commands such as `raymq topic list` showed in the last day, from ~/.cache/raymq/names.json.
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"there is no completion for {shell}")
    script = kind(ctx.find_root().command, {}, "raymq", _VARIABLE).source().rstrip("\n")
    if install:
        say(_install(shell, script))
    else:
        click.echo(script, file=out.file)


def _install(shell: str, script: str) -> str:
    """Write the script to a file, and have the shell read it when it starts; returns the words that say so."""
    if shell == "fish":
        path = Path(_FISH).expanduser()
        _write(path, script)
        return f"wrote {path}; new shells complete raymq"
    path = Path(f"~/.local/share/raymq/completion.{shell}").expanduser()
    _write(path, script)
    startup = Path(_STARTUP[shell]).expanduser()
    before = startup.read_text() if startup.exists() else ""
    if _MARK in before:
        return f"wrote {path}; {startup} reads it already"
    new_line = "" if before.endswith("\n") or not before else "\n"
    with startup.open("a") as file:
        file.write(f'{new_line}[ -r "{path}" ] && . "{path}"  {_MARK}\n')
    return f"wrote {path}, and a line in {startup} that reads it; new shells complete raymq"


def _write(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script + "\n")
