"""`raymq acl`: commands that manage the policies of users.

`list`, `create`, `update` and `delete` call the cluster. `import` converts RocketMQ's ACL files to a file of users, and
`check` evaluates a file of users. `import` and `check` need no cluster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from raymq.tools.cli.entry import cli
from raymq.tools.cli.options import RenamedOption
from raymq.tools.cli.terminal.command import CommandResult, command, rows_result
from raymq.tools.cli.terminal.output import Table
from raymq.tools.cli.upkeep.users import policy_rows

if TYPE_CHECKING:
    from raymq.client.admin.admin import Admin
    from raymq.remoting.access.policies import Need

_file_type = click.Path(path_type=Path, dir_okay=False)


@cli.group()
def acl() -> None:
    """Change the policies of users, convert RocketMQ's ACL files, and check what a file of users allows."""


_POLICY_OPTIONS = (
    click.argument("user", metavar="USER"),
    click.option(
        "--resource", required=True, help="Topic:NAME, Group:NAME or Cluster:NAME; * is all, also at the end of a NAME."
    ),
    click.option(
        "--action", "actions", multiple=True, required=True, help="Pub, Sub, Create, Update, Delete, Get, List or All."
    ),
    click.option("--deny", is_flag=True, help="Deny the actions. Default: allow them."),
    click.option(
        "--source",
        "sources",
        multiple=True,
        help="Apply the policy only to requests from this address or network; repeatable.",
    ),
)
"""The arguments and options of the commands that write a policy, in the order in which the help lists them."""


def _policy_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments and options that describe a policy to a command's function."""
    for option in reversed(_POLICY_OPTIONS):
        function = option(function)
    return function


@command(acl, "list")
@click.argument("user", metavar="[USER]", required=False)
def acl_list(admin: Admin, user: str | None) -> CommandResult:
    """List the policies of all users, or of one user. Example: raymq acl list orders-team"""
    users = admin.users() if user is None else [admin.user(user)]
    rows = [[one.name, *row] for one in users for row in policy_rows(one.policies)]
    return rows_result("policies", ["user", "resource", "actions", "decision", "sources"], rows)


@command(acl, "create")
@_policy_options
def acl_create(
    admin: Admin, user: str, resource: str, actions: Sequence[str], deny: bool, sources: Sequence[str]
) -> CommandResult:
    """Allow or deny a user some actions on a resource. Every server applies the policy within seconds.

    Example: raymq acl create orders-team --resource "Topic:orders*" --action Pub --action Sub
    """
    admin.create_policy(user, resource, actions, "Deny" if deny else "Allow", sources=sources)
    return _policies(admin, user)


@command(acl, "update")
@_policy_options
def acl_update(
    admin: Admin, user: str, resource: str, actions: Sequence[str], deny: bool, sources: Sequence[str]
) -> CommandResult:
    """Replace a user's policy for a resource.

    Example: raymq acl update orders-team --resource "Topic:orders*" --action Sub
    """
    admin.update_policy(user, resource, actions, "Deny" if deny else "Allow", sources=sources)
    return _policies(admin, user)


@command(acl, "delete")
@click.argument("user", metavar="USER")
@click.option("--resource", help="Delete only the policy for this resource. Default: all policies of the user.")
def acl_delete(admin: Admin, user: str, resource: str | None) -> CommandResult:
    """Delete one or all policies of a user. Example: raymq acl delete orders-team --resource "Topic:orders*" """
    admin.delete_policy(user, resource)
    return _policies(admin, user)


def _policies(admin: Admin, user: str) -> CommandResult:
    rows = policy_rows(admin.user(user).policies)
    return rows_result("policies", ["resource", "actions", "decision", "sources"], rows)


@command(acl, "import")
@click.argument("files", nargs=-1, required=True, type=_file_type)
@click.option(
    "--output",
    "target",
    cls=RenamedOption,
    former=["--to"],
    required=True,
    type=_file_type,
    help="The new file, which must not exist yet.",
)
def acl_import(files: tuple[Path, ...], target: Path) -> CommandResult:
    """Write a file for access.users_file (mode 0600) from RocketMQ's files of ACL 1.0, and list what it leaves out.

    If several accounts have the same access key, the first account counts. A running raymq does not change: raymq reads
    the file when it starts.

    Example: raymq acl import plain_acl.yml --output users.yaml
    """
    from raymq.remoting.access.acl1 import read_acl1
    from raymq.remoting.access.state import NO_USERS
    from raymq.remoting.access.users_file import read_users_file

    accounts = read_acl1((str(file), _read(file)) for file in files)
    _write_new(target, accounts.users_file())
    try:
        # Check the users file that was just written. If `raymq up` would refuse the file, the command reports the error
        # and deletes the file.
        state = read_users_file(target, NO_USERS)
    except BaseException:
        target.unlink()
        raise
    users = [
        {"user": user.name, "type": user.type.value, "entries": len(state.entries(user.name))}
        for user in state.users.values()
    ]
    return CommandResult(
        {"file": str(target), "users": users, "left_out": list(accounts.left_out)},
        Table(["user", "type", "entries"], [list(user.values()) for user in users]),
        *(f"left out: {one}" for one in accounts.left_out),
        f"wrote {target}; name it in raymq.yaml as access.users_file",
    )


@command(acl, "check")
@click.argument("file", type=_file_type)
@click.option("--user", required=True, help="The user of the request.")
@click.option("--action", required=True, help="Pub, Sub, Create, Update, Delete, Get or List.")
@click.option("--resource", required=True, help="Topic:NAME, Group:NAME or Cluster:NAME.")
@click.option("--source", default="", help="The request's source address. Default: unknown, as in an actor's call.")
def acl_check(file: Path, user: str, action: str, resource: str, source: str) -> CommandResult:
    """Check whether a file of users and policies allows a request. Exit code 1 if not; the output gives the reason.

    Example: raymq acl check users.yaml --user orders-team --action Pub --resource Topic:orders
    """
    from raymq.common.errors import AccessDeniedError
    from raymq.remoting.access.decide import decide
    from raymq.remoting.access.state import NO_USERS
    from raymq.remoting.access.users_file import read_users_file

    need = _need(action, resource)
    state = read_users_file(file, NO_USERS)
    reason = ""
    try:
        decide(state, state.user(user), source, [need])
    except AccessDeniedError as error:
        reason = error.reason
    return CommandResult(
        {"user": user, "need": str(need), "allowed": not reason, "reason": reason},
        f"{user}: {need} is refused: {reason}" if reason else f"{user}: {need} is allowed",
        failed=bool(reason),
    )


def _need(action: str, resource: str) -> Need:
    """Return the permission that the options --action and --resource describe. Raises UsageError if the resource is a
    pattern for several resources."""
    from raymq.remoting.access.policies import Need, Pattern, Resource, ResourceType, make_entry, topic_resource

    actions = make_entry(resource, [action]).actions
    pattern = Pattern.parse(resource)
    if pattern.is_prefix:
        raise click.UsageError(
            f"{resource} is a pattern for several resources; name one resource, such as Topic:orders"
        )
    one = Resource(pattern.type, pattern.name)
    return Need(tuple(actions), topic_resource(one.name) if one.type is ResourceType.TOPIC else one)


def _read(file: Path) -> str:
    """Read a file of RocketMQ's ACL 1.0. Raises ConfigError if the file is unreadable, is not text, or is too
    large."""
    from raymq.common.errors import ConfigError
    from raymq.remoting.access.users_file import USERS_FILE_MAX_BYTES

    try:
        with file.open("rb") as stream:
            content = stream.read(USERS_FILE_MAX_BYTES + 1)
        if len(content) > USERS_FILE_MAX_BYTES:
            raise ConfigError(f"file {file} has more than {USERS_FILE_MAX_BYTES} bytes, so it is not a file of ACL 1.0")
        return content.decode()
    except OSError as error:
        raise ConfigError(f"cannot read file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"file {file} is not a text in UTF-8") from None


def _write_new(target: Path, text: str) -> None:
    """Write a new file that only this user may read. Raises ConfigError if the file exists or cannot be
    written."""
    from raymq.common.errors import ConfigError

    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"file {target} exists already and was not changed: choose another file") from None
    except OSError as error:
        raise ConfigError(f"cannot create file {target}: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        target.unlink()
        raise ConfigError(f"cannot write file {target}: {error.strerror}") from None
