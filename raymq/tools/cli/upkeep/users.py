"""`raymq user`: commands that show and change the users of a running cluster with access control on. `raymq acl`
manages the users' policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click

from raymq.remoting.access.users import BOUNDS, QUOTA, Bounds
from raymq.tools.cli.entry import cli
from raymq.tools.cli.terminal.command import CommandResult, command, rows_result
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import Table

if TYPE_CHECKING:
    from raymq.client.admin.admin import Admin
    from raymq.remoting.access.changes import UserDescription
    from raymq.remoting.access.policies import Entry

_user_argument = click.argument("name", metavar="USER")
_secret_option = click.option(
    "--secret-file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A file with the secret, mode 0600. Default: the command prompts for the secret.",
)
_BOUND_HELPS: Final = (
    "Maximum number of bytes per second that the user sends to each store; 0 is no limit.",
    "Maximum number of messages per second that the user sends to each store; 0 is no limit.",
    "Maximum number of bytes per second that the user consumes from each store; 0 is no limit.",
    "Maximum number of messages per second that the user consumes from each store; 0 is no limit.",
)
_BOUND_COLUMNS: Final = ("bytes/s", "messages/s", "consumed bytes/s", "consumed messages/s")


def _bound_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for a user's quotas to a command. The command's function gets them as keyword arguments named as
    in raymq.remoting.access.users.Bounds."""
    for bound, text in zip(reversed(BOUNDS), reversed(_BOUND_HELPS), strict=True):
        function = click.option(f"--{bound.replace('_', '-')}", type=NumberType(QUOTA), help=text)(function)
    return function


def _given(bounds: Mapping[str, int | None]) -> Bounds:
    return cast("Bounds", {name: bound for name, bound in bounds.items() if bound is not None})


@cli.group()
def user() -> None:
    """Create, change, delete and list users. Needs access control (docs/access.md) and a super user."""


@command(user, "list")
def user_list(admin: Admin) -> CommandResult:
    """List all users. Example: raymq user list"""
    columns = ["user", "type", "status", *_BOUND_COLUMNS, "policies"]
    return rows_result("users", columns, ([*_values(one), len(one.policies)] for one in admin.users()))


@command(user, "show")
@_user_argument
def user_show(admin: Admin, name: str) -> CommandResult:
    """Show a user with its policies. No server has the user's secret. Example: raymq user show orders-team"""
    return _shown(admin.user(name))


@command(user, "create")
@_user_argument
@_secret_option
@click.option("--super", "is_super", is_flag=True, help="Allow the user all requests.")
@_bound_options
def user_create(
    admin: Admin, name: str, secret_file: Path | None, is_super: bool, **bounds: int | None
) -> CommandResult:
    """Create a user. The user may do nothing until `raymq acl create` allows it.

    The command prompts for the secret, or reads it from a file. It sends only a key that is derived from the secret.

    Example: raymq user create orders-team --secret-file secret.txt
    """
    secret = _secret(secret_file)
    admin.create_user(name, secret, is_super=is_super, **_given(bounds))
    return _shown(admin.user(name))


@command(user, "update")
@_user_argument
@_secret_option
@click.option("--ask-secret", is_flag=True, help="Prompt for a new secret.")
@click.option("--super/--normal", "is_super", default=None, help="Allow all requests, or only what policies allow.")
@click.option(
    "--enable/--disable",
    "enabled",
    default=None,
    help="Enable or disable the user; servers refuse all requests of a disabled user.",
)
@_bound_options
def user_update(
    admin: Admin,
    name: str,
    secret_file: Path | None,
    ask_secret: bool,
    is_super: bool | None,
    enabled: bool | None,
    **bounds: int | None,
) -> CommandResult:
    """Change a user. Options that are not given change nothing. Example: raymq user update orders-team --disable"""
    secret = _secret(secret_file) if secret_file is not None or ask_secret else None
    admin.update_user(name, secret=secret, is_super=is_super, enabled=enabled, **_given(bounds))
    return _shown(admin.user(name))


@command(user, "delete")
@_user_argument
def user_delete(admin: Admin, name: str) -> CommandResult:
    """Delete a user with its policies. Servers refuse its open connections within seconds.

    Example: raymq user delete orders-team
    """
    admin.delete_user(name)
    return CommandResult({"deleted": name}, f"deleted {name}")


@command(user, "gateway-secret")
@_user_argument
@_secret_option
def user_gateway_secret(name: str, secret_file: Path | None) -> CommandResult:
    """Print the secret with which the user's RocketMQ clients sign their calls to a gateway.

    The command derives it from the user's own secret, without a cluster. A client's access key is the user's name. A
    change of the user's own secret changes it.

    Example: raymq user gateway-secret orders-team --secret-file secret.txt
    """
    from raymq.remoting.access.users import check_user_name, derive_key, gateway_secret

    key = derive_key(check_user_name(name), _secret(secret_file, confirm=False))
    found = gateway_secret(key)
    return CommandResult({"access_key": name, "access_secret": found}, found)


def _secret(file: Path | None, *, confirm: bool = True) -> str:
    """Read a user's secret from `file`, or prompt for it if no file is given. `confirm`: prompt twice."""
    from raymq.remoting.access.credentials import read_secret

    if file is not None:
        return read_secret(file)
    typed: str = click.prompt("secret", hide_input=True, confirmation_prompt=confirm, err=True)
    return typed


def _values(one: UserDescription) -> list[Any]:
    return [one.name, one.type, one.status, *(getattr(one, bound) or "" for bound in BOUNDS)]


def _shown(one: UserDescription) -> CommandResult:
    from raymq.client.admin.upkeep.users import shown_user

    return CommandResult(
        shown_user(one),
        Table(["user", "type", "status", *_BOUND_COLUMNS], [_values(one)]),
        "",
        Table(["resource", "actions", "decision", "sources"], policy_rows(one.policies)),
    )


def policy_rows(policies: Iterable[Entry]) -> list[list[Any]]:  # a table cell may have any type
    """Return the rows of a table of policies: resource, actions, decision and source addresses."""
    return [
        [shown["resource"], " ".join(shown["actions"]), shown["decision"], " ".join(shown["sources"])]
        for shown in (entry.shown() for entry in policies)
    ]
