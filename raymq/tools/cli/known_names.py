"""`raymq completion`, and the cache of topic, consumer group and broker names for completion with TAB.

A request to the cluster takes a second, so completion reads `~/.cache/raymq/names.json` instead. Commands write the
names that they receive from the cluster to this file. A list of all names replaces the older names; a single name is
added. Names that were listed more than a day ago are not used. Each write replaces the whole file, and only its user
may read it. Commands do not need the file; without it, TAB completes no names.
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

from raymq.tools.cli.entry import cli
from raymq.tools.cli.terminal.command import CommandResult, command
from raymq.tools.cli.terminal.output import out

Kind = Literal["topics", "groups", "brokers"]

NAMES_MAX: Final = 5000
"""Maximum number of names of one kind (topics, groups or brokers) in the cache file."""
NAMES_KEPT_S: Final = 86_400.0


def names_file() -> Path:
    """Return the path of the cache file for TAB completion, below XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "raymq/names.json"


def known_names(kind: Kind) -> list[str]:
    """Return the cached names of one kind (topics, groups or brokers), sorted. Names that were listed more than a day
    ago are left out."""
    return _names(_read(), kind)


def remember_all_names(kind: Kind, names: Iterable[str]) -> None:
    """Replace all cached names of one kind (topics, groups or brokers) by `names`.

    `names` must be the complete list of these names, or TAB no longer completes the missing names. A command with an
    option that filters its list must call this function first, and filter the list after the call.
    """
    _write_names({**_read(), kind: {"seen_s": time.time(), "names": sorted(names)[:NAMES_MAX]}})


def remember_name(kind: Kind, name: str) -> None:
    """Add the name of a topic, group or broker to the cache for TAB completion. The recorded time at which all names of
    this kind were last listed stays the same."""
    content = _read()
    names = _names(content, kind)
    if name in names:
        return
    seen_s = content[kind]["seen_s"] if names else time.time()
    _write_names({**content, kind: {"seen_s": seen_s, "names": sorted([name, *names[: NAMES_MAX - 1]])}})


def forget_name(kind: Kind, name: str) -> None:
    """Remove a name from the cache, because the topic, group or broker was deleted."""
    content = _read()
    names = _names(content, kind)
    if name in names:
        names.remove(name)
        _write_names({**content, kind: {**content[kind], "names": names}})


def completes(kind: Kind) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return the TAB completion function for an argument that is the name of a topic, group or broker."""

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
    # A shell reads one name per line, so a name with a line break is left out.
    return [name for name in known["names"][:NAMES_MAX] if isinstance(name, str) and name.isprintable()]


def _read() -> dict[str, Any]:
    try:
        content = json.loads(names_file().read_bytes())
    except (OSError, ValueError):
        return {}  # the cache file does not exist yet, or is not JSON
    return content if isinstance(content, dict) else {}


def _write_names(content: dict[str, Any]) -> None:
    path = names_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mkstemp creates the file with mode 0600
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError:
        return  # TAB completion is optional: the command succeeds even if the home directory is full or read-only


_VARIABLE: Final = "_RAYMQ_COMPLETE"
_MARK: Final = "# raymq completion"
_FISH: Final = "~/.config/fish/completions/raymq.fish"
_STARTUP: Final = {"bash": "~/.bashrc", "zsh": "~/.zshrc"}


@command(cli)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--install", is_flag=True, help="Install the script for new shells. A second run changes nothing.")
@click.pass_context
def completion(ctx: click.Context, shell: str, install: bool, as_json: bool) -> CommandResult | None:
    """Print a script that completes raymq's commands, options, topics, groups and brokers with TAB.

    \b
    raymq completion bash --install            then open a new shell (bash 4.4 or newer)
    eval "$(raymq completion bash)"            for this shell only
    raymq completion fish --install

    The script completes the names that commands such as `raymq topic list` printed in the last day. They are in
    ~/.cache/raymq/names.json.
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"completion is not available for shell {shell!r}")
    script = kind(ctx.find_root().command, {}, "raymq", _VARIABLE).source().rstrip("\n")
    if install:
        done = _install(shell, script)
        return CommandResult({"shell": shell, "installed": done}, done)
    if as_json:
        return CommandResult({"shell": shell, "script": script})
    # print the shell script unchanged, without the library rich, which would wrap its long lines
    click.echo(script, file=out.file)
    return None


def _install(shell: str, script: str) -> str:
    """Write the completion script to a file that new shells read. Returns a sentence that names the file."""
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
