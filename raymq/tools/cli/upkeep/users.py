"""`raymq user`: the users of a raymq with access on, seen and changed while it runs. `raymq acl` has their policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click

from raymq.remoting.access.users import BOUNDS, QUOTA, Bounds
from raymq.tools.cli.terminal.number_type import NumberType
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

if TYPE_CHECKING:
    from raymq.remoting.access.changes import UserDescription
    from raymq.remoting.access.policies import Entry

_secret_option = click.option(
    "--secret-file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A file, mode 0600, with the secret. Default: it is asked for.",
)
_BOUND_HELPS: Final = (
    "Bound of what it sends to each store; 0 is none.",
    "Likewise, in messages.",
    "Bound of what it consumes from each store.",
    "Likewise, in messages.",
)
_BOUND_COLUMNS: Final = ("bytes/s", "messages/s", "consumed bytes/s", "consumed messages/s")


def _bound_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options for a user's quotas (raymq.remoting.access.users.Bounds), as keyword arguments of these names."""
    for bound, text in zip(reversed(BOUNDS), reversed(_BOUND_HELPS), strict=True):
        command = click.option(f"--{bound.replace('_', '-')}", type=NumberType(QUOTA), help=text)(command)
    return command


def _given(bounds: Mapping[str, int | None]) -> Bounds:
    return cast("Bounds", {name: bound for name, bound in bounds.items() if bound is not None})


@click.group(cls=Group)
def user() -> None:
    """Create, change, delete and list users, where access is on (docs/access.md). Only super users may."""


@user.command("list")
@address_option
@json_option
def user_list(address: str | None, as_json: bool) -> None:
    """List all users. Example: raymq user list"""
    with client_of(address) as client:
        users = client.admin.users()
    columns = ["user", "type", "status", *_BOUND_COLUMNS, "policies"]
    print_rows(as_json, "users", columns, [[*_values(one), len(one.policies)] for one in users])


@user.command("show")
@click.argument("name", metavar="USER")
@address_option
@json_option
def user_show(name: str, address: str | None, as_json: bool) -> None:
    """Show a user with its policies; its secret is not kept anywhere. Example: raymq user show orders-team"""
    with client_of(address) as client:
        _show(as_json, client.admin.user(name))


@user.command("create")
@click.argument("name", metavar="USER")
@_secret_option
@click.option("--super", "is_super", is_flag=True, help="It may do everything.")
@_bound_options
@address_option
@json_option
def user_create(
    name: str,
    secret_file: Path | None,
    is_super: bool,
    address: str | None,
    as_json: bool,
    **bounds: int | None,
) -> None:
    """Create a user, who may do nothing before `raymq acl create` allows it.

    The secret is asked for, or read from a file; it is not sent, only a key that is made of it.

    Example: raymq user create orders-team --secret-file secret.txt
    """
    secret = _secret(secret_file)
    with client_of(address) as client:
        client.admin.create_user(name, secret, is_super=is_super, **_given(bounds))
        _show(as_json, client.admin.user(name))


@user.command("update")
@click.argument("name", metavar="USER")
@_secret_option
@click.option("--ask-secret", is_flag=True, help="Ask for another secret.")
@click.option("--super/--normal", "is_super", default=None, help="It may do everything, or what policies allow.")
@click.option("--enable/--disable", "enabled", default=None, help="With --disable all its requests are refused.")
@_bound_options
@address_option
@json_option
def user_update(
    name: str,
    secret_file: Path | None,
    ask_secret: bool,
    is_super: bool | None,
    enabled: bool | None,
    address: str | None,
    as_json: bool,
    **bounds: int | None,
) -> None:
    """Change a user; what is not named stays as it is. Example: raymq user update orders-team --disable"""
    secret = _secret(secret_file) if secret_file is not None or ask_secret else None
    with client_of(address) as client:
        client.admin.update_user(name, secret=secret, is_super=is_super, enabled=enabled, **_given(bounds))
        _show(as_json, client.admin.user(name))


@user.command("delete")
@click.argument("name", metavar="USER")
@address_option
@json_option
def user_delete(name: str, address: str | None, as_json: bool) -> None:
    """Delete a user with its policies. Its open connections are refused within seconds.

    Example: raymq user delete orders-team
    """
    with client_of(address) as client:
        client.admin.delete_user(name)
    print_value(as_json, {"deleted": name}, lambda: say(f"deleted {name}"))


def _secret(file: Path | None) -> str:
    """The secret in a file, or the one that somebody types."""
    from raymq.remoting.access.credentials import read_secret

    if file is not None:
        return read_secret(file)
    typed: str = click.prompt("secret", hide_input=True, confirmation_prompt=True, err=True)
    return typed


def _values(one: UserDescription) -> list[Any]:
    return [one.name, one.type, one.status, *(getattr(one, bound) or "" for bound in BOUNDS)]


def _show(as_json: bool, one: UserDescription) -> None:
    from raymq.client.admin.upkeep.users import shown_user

    shown = shown_user(one)

    def show() -> None:
        table(["user", "type", "status", *_BOUND_COLUMNS], [_values(one)])
        say("")
        table(["resource", "actions", "decision", "sources"], policy_rows(one.policies))

    print_value(as_json, shown, show)


def policy_rows(policies: Iterable[Entry]) -> list[list[Any]]:  # Any: cells
    """The rows of a table of policies: resource, actions, decision and sources."""
    return [
        [shown["resource"], " ".join(shown["actions"]), shown["decision"], " ".join(shown["sources"])]
        for shown in (entry.shown() for entry in policies)
    ]
