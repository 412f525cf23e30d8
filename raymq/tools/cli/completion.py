"""`raymq completion`: the script with which a shell completes raymq's commands, options and names; its installation."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
from click.shell_completion import get_completion_class

from raymq.tools.cli.terminal.output import Command, out, say

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
