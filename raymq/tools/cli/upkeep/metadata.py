"""`raymq export` and `raymq import`: commands that copy topics, groups and offsets from one cluster to another through
a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from raymq.tools.cli.entry import cli
from raymq.tools.cli.terminal.command import CommandResult, command
from raymq.tools.cli.terminal.output import Table, out
from raymq.tools.cli.terminal.progress import counting

if TYPE_CHECKING:
    from raymq.client.admin.admin import Admin
    from raymq.client.admin.upkeep.metadata import Part

_PARTS = ("topics", "groups", "offsets")


@command(cli, quiet=True)
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--topics", default="*", show_default=True, help="Only topics with these names; * and ? are wildcards.")
@click.option("--groups", default="*", show_default=True, help="Only groups with these names; * and ? are wildcards.")
def export(admin: Admin, file: Path | None, topics: str, groups: str) -> CommandResult | None:
    """Write topics, groups and the groups' offsets to FILE, or as JSON to standard output.

    The export has no messages, and neither the servers' own topics nor the topics of retries and dead letters.

    With FILE and --json, the command prints the numbers of exported topics and groups.

    Example: raymq export cluster.json --topics "orders*"
    """
    with counting("exporting") as counter:
        metadata = admin.export_metadata(topics=topics, groups=groups, progress=counter.advance)
    if file is None:
        out.file.write(metadata.to_json())
        return None
    try:
        file.write_text(metadata.to_json(), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write file {file}: {error.strerror}") from error
    counts = {"topics": len(metadata.topics), "groups": len(metadata.groups)}
    text = f"wrote {counts['topics']} topics and {counts['groups']} groups to {file}"
    return CommandResult({"file": str(file), **counts}, text)


@command(cli, "import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--only", "parts", multiple=True, type=click.Choice(_PARTS), help="Import only this part; repeatable.")
@click.option("--dry-run", is_flag=True, help="Only show the changes.")
def import_(admin: Admin, file: Path, parts: tuple[str, ...], dry_run: bool) -> CommandResult:
    """Apply the topics, groups and offsets of FILE, which `raymq export` wrote, to this cluster.

    Topics and groups that FILE does not name stay as they are. A topic never gets fewer queues. An offset is set only
    if its queue has a message at this offset. Exit code 1 if a step fails; the other steps are done.

    Example: raymq import cluster.json --only topics --only groups --dry-run
    """
    from raymq.client.admin.upkeep.metadata import Metadata

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"cannot read file {file}: {error}") from error
    metadata = Metadata.from_json(text)
    wanted = cast("tuple[Part, ...]", parts or _PARTS)
    with counting("importing") as counter:
        steps = admin.import_metadata(metadata, parts=wanted, dry_run=dry_run, progress=counter.advance)
    failed = [step for step in steps if step.failed]
    rows = [{"kind": one.kind, "name": one.name, "action": one.action, "failed": one.failed} for one in steps]
    same = sum(step.action == "same" for step in steps)
    first = f"the first: {failed[0].name}: {failed[0].action}" if failed else ""
    return CommandResult(
        {"steps": rows, "dry_run": dry_run},
        Table(["", "name", "action"], [[one.kind, one.name, one.action] for one in steps if one.action != "same"]),
        f"{same} already match the file" + ("; a dry run changes nothing" if dry_run else ""),
        errors=[f"{len(failed)} of {len(steps)} could not be done, {first}"] if failed else [],
        failed=bool(failed),
    )
