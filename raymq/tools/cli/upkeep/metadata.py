"""`raymq export` and `raymq import`: topics, groups and offsets as a file, out of one cluster and into another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from raymq.tools.cli.terminal.output import (
    Command,
    address_option,
    client_of,
    json_option,
    out,
    print_value,
    quiet_option,
    say,
    say_error,
    table,
)
from raymq.tools.cli.terminal.progress import counting

if TYPE_CHECKING:
    from raymq.client.admin.upkeep.metadata import Part

_PARTS = ("topics", "groups", "offsets")


@click.command("export", cls=Command)
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--topics", default="*", show_default=True, help="Only topics of these names, with * and ?.")
@click.option("--groups", default="*", show_default=True, help="Only groups of these names, with * and ?.")
@quiet_option
@address_option
def export(file: Path | None, topics: str, groups: str, address: str | None) -> None:
    """Write the topics, the groups and the offsets of groups to FILE, or as JSON on standard output.

    Messages are not in it. The server's own topics are left out, and so are those of retries and dead letters.

    Example: raymq export cluster.json --topics "orders*"
    """
    with client_of(address) as client, counting("exporting") as counter:
        metadata = client.admin.export_metadata(topics=topics, groups=groups, progress=counter.advance)
    if file is None:
        out.file.write(metadata.to_json())
        return
    try:
        file.write_text(metadata.to_json(), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {file}: {error.strerror}") from error
    say(f"wrote {len(metadata.topics)} topics and {len(metadata.groups)} groups to {file}")


@click.command("import", cls=Command)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--only", "parts", multiple=True, type=click.Choice(_PARTS), help="Only this part; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@address_option
@json_option
@click.pass_context
def import_(
    ctx: click.Context, file: Path, parts: tuple[str, ...], dry_run: bool, address: str | None, as_json: bool
) -> None:
    """Make the topics, groups and offsets of FILE, which `raymq export` wrote, be here as it says.

    What the file does not name is left alone. A topic never gets fewer queues, and offsets are set only where a queue
    holds them. Exit code 1: something could not be done; the rest is.

    Example: raymq import cluster.json --only topics --only groups --dry-run
    """
    from raymq.client.admin.upkeep.metadata import Metadata

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"cannot read {file}: {error}") from error
    metadata = Metadata.from_json(text)
    wanted = cast("tuple[Part, ...]", parts or _PARTS)
    with client_of(address) as client, counting("importing") as counter:
        steps = client.admin.import_metadata(metadata, parts=wanted, dry_run=dry_run, progress=counter.advance)
    failed = [step for step in steps if step.failed]
    rows = [{"kind": one.kind, "name": one.name, "action": one.action, "failed": one.failed} for one in steps]

    def show() -> None:
        table(["", "name", "action"], [[one.kind, one.name, one.action] for one in steps if one.action != "same"])
        same = sum(step.action == "same" for step in steps)
        say(f"{same} were as the file says" + ("; nothing was changed, this was a dry run" if dry_run else ""))

    print_value(as_json, {"steps": rows, "dry_run": dry_run}, show)
    if failed:
        say_error(f"{len(failed)} of {len(steps)} could not be done, the first: {failed[0].name}: {failed[0].action}")
        ctx.exit(1)
