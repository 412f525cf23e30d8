"""`raymq acl`: the policies of users (`list`, `create`, `update`, `delete`), and files of them, made of RocketMQ's and
asked what they allow, for which no cluster is asked (`import`, `check`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from raymq.tools.cli.terminal.output import (
    Group,
    address_option,
    client_of,
    json_option,
    print_rows,
    print_value,
    say,
    table,
)
from raymq.tools.cli.upkeep.users import policy_rows

if TYPE_CHECKING:
    from raymq.remoting.access.changes import UserDescription
    from raymq.remoting.access.policies import Need

_file_type = click.Path(path_type=Path, dir_okay=False)


@click.group(cls=Group)
def acl() -> None:
    """Change the policies of users; make a file of them from RocketMQ's, and ask such a file what it allows."""


_ENTRY_OPTIONS = (
    click.argument("user", metavar="USER"),
    click.option(
        "--resource", required=True, help="Topic:NAME, Group:NAME or Cluster:NAME; * is all, also at the end of a NAME."
    ),
    click.option(
        "--action", "actions", multiple=True, required=True, help="Pub, Sub, Create, Update, Delete, Get, List or All."
    ),
    click.option("--deny", is_flag=True, help="Deny it. Default: allow it."),
    click.option("--source", "sources", multiple=True, help="Only from this address or network."),
    address_option,
    json_option,
)
"""The arguments of the commands that make a policy, in the order of the help."""


def _of_an_entry(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the arguments of a policy."""
    for option in reversed(_ENTRY_OPTIONS):
        command = option(command)
    return command


@acl.command("list")
@click.argument("user", metavar="[USER]", required=False)
@address_option
@json_option
def acl_list(user: str | None, address: str | None, as_json: bool) -> None:
    """List the policies of all users, or of one. Example: raymq acl list orders-team"""
    with client_of(address) as client:
        users = client.admin.users() if user is None else [client.admin.user(user)]
    rows = [[one.name, *row] for one in users for row in policy_rows(one.policies)]
    print_rows(as_json, "policies", ["user", "resource", "actions", "decision", "sources"], rows)


@acl.command("create")
@_of_an_entry
def acl_create(
    user: str,
    resource: str,
    actions: Sequence[str],
    deny: bool,
    sources: Sequence[str],
    address: str | None,
    as_json: bool,
) -> None:
    """Allow a user something, or deny it; every server goes by it within seconds.

    Example: raymq acl create orders-team --resource "Topic:orders*" --action Pub --action Sub
    """
    with client_of(address) as client:
        client.admin.create_policy(user, resource, actions, "Deny" if deny else "Allow", sources=sources)
        _show_policies(as_json, client.admin.user(user))


@acl.command("update")
@_of_an_entry
def acl_update(
    user: str,
    resource: str,
    actions: Sequence[str],
    deny: bool,
    sources: Sequence[str],
    address: str | None,
    as_json: bool,
) -> None:
    """Put another policy in the place of the user's for a resource.

    Example: raymq acl update orders-team --resource "Topic:orders*" --action Sub
    """
    with client_of(address) as client:
        client.admin.update_policy(user, resource, actions, "Deny" if deny else "Allow", sources=sources)
        _show_policies(as_json, client.admin.user(user))


@acl.command("delete")
@click.argument("user", metavar="USER")
@click.option("--resource", help="Only the policy for this resource. Default: all of the user's.")
@address_option
@json_option
def acl_delete(user: str, resource: str | None, address: str | None, as_json: bool) -> None:
    """Delete a policy of a user, or all of them. Example: raymq acl delete orders-team --resource "Topic:orders*" """
    with client_of(address) as client:
        client.admin.delete_policy(user, resource)
        _show_policies(as_json, client.admin.user(user))


def _show_policies(as_json: bool, user: UserDescription) -> None:
    print_rows(as_json, "policies", ["resource", "actions", "decision", "sources"], policy_rows(user.policies))


@acl.command("import")
@click.argument("files", nargs=-1, required=True, type=_file_type)
@click.option("--to", "target", required=True, type=_file_type, help="The file to make, which must not be there yet.")
@json_option
def acl_import(files: tuple[Path, ...], target: Path, as_json: bool) -> None:
    """Make a file for access.users_file (mode 0600) from RocketMQ's files of ACL 1.0, and say what it leaves out.

    Of accounts with the same access key the first counts. The running raymq does not change: it reads the file when it
    is started.

    Example: raymq acl import plain_acl.yml --to users.yaml
    """
    from raymq.remoting.access.acl1 import read_acl1
    from raymq.remoting.access.state import NO_USERS
    from raymq.remoting.access.users_file import read_users_file

    accounts = read_acl1((str(file), _read(file)) for file in files)
    _write_new(target, accounts.users_file())
    try:
        state = read_users_file(target, NO_USERS)  # what `raymq up` would refuse is told now, and not kept
    except BaseException:
        target.unlink()
        raise
    users = [
        {"user": user.name, "type": user.type.value, "entries": len(state.entries(user.name))}
        for user in state.users.values()
    ]

    def show() -> None:
        table(["user", "type", "entries"], [list(user.values()) for user in users])
        for one in accounts.left_out:
            say(f"left out: {one}")
        say(f"wrote {target}; name it in raymq.yaml as access.users_file")

    print_value(as_json, {"file": str(target), "users": users, "left_out": list(accounts.left_out)}, show)


@acl.command("check")
@click.argument("file", type=_file_type)
@click.option("--user", required=True, help="The user who would do it.")
@click.option("--action", required=True, help="Pub, Sub, Create, Update, Delete, Get or List.")
@click.option("--resource", required=True, help="Topic:NAME, Group:NAME or Cluster:NAME.")
@click.option("--source", default="", help="The address it would come from. Default: unknown, as of an actor's call.")
@json_option
@click.pass_context
def acl_check(
    ctx: click.Context, file: Path, user: str, action: str, resource: str, source: str, as_json: bool
) -> None:
    """Say if a file of users and policies lets a user do something, and if not, why. Exit code 1: it does not.

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
    value = {"user": user, "need": str(need), "allowed": not reason, "reason": reason}
    print_value(
        as_json,
        value,
        lambda: say(f"{user}: {need} is refused: {reason}" if reason else f"{user}: {need} is allowed"),
    )
    ctx.exit(1 if reason else 0)


def _need(action: str, resource: str) -> Need:
    """The need that the options say. UsageError for a resource that stands for several."""
    from raymq.remoting.access.policies import Need, Pattern, Resource, ResourceType, make_entry, topic_resource

    actions = make_entry(resource, [action]).actions
    pattern = Pattern.parse(resource)
    if pattern.is_prefix:
        raise click.UsageError(f"{resource} stands for several; ask for one, such as Topic:orders")
    one = Resource(pattern.type, pattern.name)
    return Need(tuple(actions), topic_resource(one.name) if one.type is ResourceType.TOPIC else one)


def _read(file: Path) -> str:
    """The text of a file of ACL 1.0. ConfigError: it cannot be read, is no text, or is too large to be one."""
    from raymq.common.errors import ConfigError
    from raymq.remoting.access.users_file import USERS_FILE_MAX_BYTES

    try:
        with file.open("rb") as stream:
            content = stream.read(USERS_FILE_MAX_BYTES + 1)
        if len(content) > USERS_FILE_MAX_BYTES:
            raise ConfigError(f"{file} has more than {USERS_FILE_MAX_BYTES} bytes: it is no file of ACL 1.0")
        return content.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is no text in UTF-8") from None


def _write_new(target: Path, text: str) -> None:
    """Write a file that only this user may read. ConfigError: it is there already, or cannot be made."""
    from raymq.common.errors import ConfigError

    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"{target} is there already, and is left as it is: name another file") from None
    except OSError as error:
        raise ConfigError(f"cannot make {target}: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        target.unlink()
        raise ConfigError(f"cannot write {target}: {error.strerror}") from None
