"""`raymq config` and `raymq kv`: commands that show and change settings while raymq runs.

`raymq config` manages the settings of broker groups. `raymq kv` manages the NameServers' KV configuration: values that
programs share, by namespace and key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from raymq.tools.cli.entry import cli
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.command import CommandResult, command, rows_result

if TYPE_CHECKING:
    from raymq.client.admin.admin import Admin

broker_option = click.option(
    "--broker", shell_complete=completes("brokers"), help="Only this broker group. Default: all broker groups."
)


@cli.group()
def config() -> None:
    """Show settings, and change settings while raymq runs."""


@command(config, "show")
@click.option(
    "--effective",
    is_flag=True,
    help="Show all settings with their current values. Default: only settings that differ from raymq.yaml.",
)
@broker_option
def config_show(admin: Admin, effective: bool, broker: str | None) -> CommandResult:
    """Show the settings that differ from raymq.yaml, or all. Example: raymq config show --effective

    The last column says how a setting changes: live, at a start of raymq, or by `raymq broker replicas`.
    """
    configs = admin.config(broker)
    rows = [
        [
            *(group, name, _text(one.effective.get(name)), _text(one.started.get(name))),
            "raymq broker replicas" if name in one.ordered else "live" if name in one.live else "start",
        ]
        for group, one in configs.items()
        for name in (one.effective if effective else sorted({*one.changed, *one.ordered}))
        if effective or one.effective.get(name) != one.started.get(name)
    ]
    refused = {group: dict(one.refused) for group, one in configs.items() if one.refused}
    errors = [
        f"{group}: {name} was changed, but the change no longer counts: {reason}"
        for group, reasons in refused.items()
        for name, reason in reasons.items()
    ]
    names = ["broker", "setting", "value", "raymq.yaml", "changes"]
    return rows_result("settings", names, rows, more={"refused": refused}, errors=errors)


@command(config, "get")
@click.argument("name")
@broker_option
def config_get(admin: Admin, name: str, broker: str | None) -> CommandResult:
    """Print the current value of a setting. NAME is the name in raymq.yaml, or RocketMQ's name.

    Example: raymq config get fileReservedTime
    """
    from raymq.common.config.live import full_name

    full = full_name(name)
    values = {group: one.effective[full] for group, one in admin.config(broker).items() if full in one.effective}
    if not values:
        raise click.UsageError(
            f"{full} is not a setting of broker groups: raymq reads it from raymq.yaml when it starts; see "
            "docs/settings.md"
        )
    return CommandResult(
        {"setting": full, "values": values}, *(f"{group} {_text(value)}" for group, value in values.items())
    )


@command(config, "set")
@click.argument("name")
@click.argument("value")
@broker_option
def config_set(admin: Admin, name: str, value: str, broker: str | None) -> CommandResult:
    """Change a live setting, also for later starts. The brokers check the value as they check raymq.yaml.

    Example: raymq config set store.file_reserved_time_hours 48
    """
    from raymq.common.config.live import live_name, parse_value

    full = live_name(name)
    return _changed(full, admin.set_config(full, parse_value(full, value), broker))


@command(config, "unset")
@click.argument("name")
@broker_option
def config_unset(admin: Admin, name: str, broker: str | None) -> CommandResult:
    """Reset a setting to its value in raymq.yaml. Example: raymq config unset store.file_reserved_time_hours"""
    from raymq.common.config.live import live_name

    full = live_name(name)
    return _changed(full, admin.unset_config(full, broker))


def _changed(full: str, configs: Mapping[str, Any]) -> CommandResult:
    late = {group: list(one.behind) for group, one in configs.items() if one.behind}
    return CommandResult(
        {
            "setting": full,
            "values": {group: one.effective[full] for group, one in configs.items()},
            "behind": late,
        },
        *(
            f"{group} has {full} {_text(one.effective[full])} now"
            + (f"; {', '.join(late[group])} gets the setting when it runs again" if group in late else "")
            for group, one in configs.items()
        ),
    )


def _text(value: Any) -> str:
    """Format a setting's value as it is written in raymq.yaml."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


@cli.group()
def kv() -> None:
    """Get, set, delete and list values of the NameServers' KV configuration."""


@command(kv, "get")
@click.argument("namespace")
@click.argument("key")
def kv_get(admin: Admin, namespace: str, key: str) -> CommandResult:
    """Print a value. Exit code 1 if the key does not exist. Example: raymq kv get billing currency"""
    value = admin.get_kv(namespace, key)
    text = f"{namespace} has no key {key}" if value is None else value
    return _entry(namespace, key, value, text, failed=value is None)


@command(kv, "put")
@click.argument("namespace")
@click.argument("key")
@click.argument("value")
def kv_put(admin: Admin, namespace: str, key: str, value: str) -> CommandResult:
    """Set a value at every NameServer. Example: raymq kv put billing currency EUR"""
    admin.put_kv(namespace, key, value)
    return _entry(namespace, key, value, f"{key} of {namespace} is {value} now")


@command(kv, "delete")
@click.argument("namespace")
@click.argument("key")
def kv_delete(admin: Admin, namespace: str, key: str) -> CommandResult:
    """Delete a value at every NameServer. The deletion of a missing key succeeds.

    Example: raymq kv delete billing currency
    """
    admin.delete_kv(namespace, key)
    return _entry(namespace, key, None, f"{namespace} has no key {key} now")


@command(kv, "list")
@click.argument("namespace")
def kv_list(admin: Admin, namespace: str) -> CommandResult:
    """List the keys and values of a namespace; ORDER_TOPIC_CONFIG has the order topics.

    Example: raymq kv list ORDER_TOPIC_CONFIG
    """
    return rows_result("values", ["key", "value"], sorted(admin.list_kv(namespace).items()))


def _entry(namespace: str, key: str, value: str | None, text: str, *, failed: bool = False) -> CommandResult:
    return CommandResult({"namespace": namespace, "key": key, "value": value}, text, failed=failed)
