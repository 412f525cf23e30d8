"""`raymq completion`: prints the script with which a shell completes raymq's commands and options."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

from raymq.cli.terminal.output import Command, out

_VARIABLE: Final = "_RAYMQ_COMPLETE"


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that completes raymq's commands and options with TAB.

    \b
    bash  eval "$(raymq completion bash)"      in ~/.bashrc (bash 4.4 or newer)
    zsh   eval "$(raymq completion zsh)"       in ~/.zshrc, behind compinit
    fish  raymq completion fish > ~/.config/fish/completions/raymq.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"there is no completion for {shell}")
    click.echo(kind(ctx.find_root().command, {}, "raymq", _VARIABLE).source().rstrip("\n"), file=out.file)
