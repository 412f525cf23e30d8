"""`raymq config` and `raymq kv`: settings that are seen and changed while raymq runs.

`raymq config` has the settings of broker groups, `raymq kv` the NameServers' KV configuration: values by namespace and
key that programs share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.output import (
    Group,
    address_option,
    client_of,
    json_option,
    print_rows,
    print_value,
    say,
    say_error,
)

broker_option = click.option(
    "--broker", shell_complete=completes("brokers"), help="Only of this broker group. Default: of all."
)


@click.group(cls=Group)
def config() -> None:
    """Show settings, and change those that may change while raymq runs."""


@config.command("show")
@click.option(
    "--effective", is_flag=True, help="All settings as they count. Default: those that differ from raymq.yaml."
)
@broker_option
@address_option
@json_option
def config_show(effective: bool, broker: str | None, address: str | None, as_json: bool) -> None:
    """Show the settings that were changed since raymq.yaml was read, or all. Example: raymq config show --effective

    The last column says when a setting can change: live, or at a start of raymq.
    """
    with client_of(address) as client:
        configs = client.admin.config(broker)
    rows = [
        [
            group,
            name,
            _text(one.effective.get(name)),
            _text(one.started.get(name)),
            "live" if name in one.live else "start",
        ]
        for group, one in configs.items()
        for name in (one.effective if effective else sorted(one.changed))
        if effective or one.effective.get(name) != one.started.get(name)
    ]
    refused = {group: dict(one.refused) for group, one in configs.items() if one.refused}
    print_rows(
        as_json, "settings", ["broker", "setting", "value", "raymq.yaml", "changes"], rows, more={"refused": refused}
    )
    for group, reasons in refused.items():
        for name, reason in reasons.items():
            say_error(f"{group}: {name} was changed, which does not count any more: {reason}")


@config.command("get")
@click.argument("name")
@broker_option
@address_option
@json_option
def config_get(name: str, broker: str | None, address: str | None, as_json: bool) -> None:
    """Print a setting as it counts; NAME as in raymq.yaml, or RocketMQ's. Example: raymq config get fileReservedTime"""
    from raymq.common.config.live import full_name

    full = full_name(name)
    with client_of(address) as client:
        configs = client.admin.config(broker)
    values = {group: one.effective[full] for group, one in configs.items() if full in one.effective}
    if not values:
        raise click.UsageError(f"{full} is not a setting of broker groups; see raymq.yaml")

    def show() -> None:
        for group, value in values.items():
            say(f"{group} {_text(value)}")

    print_value(as_json, {"setting": full, "values": values}, show)


@config.command("set")
@click.argument("name")
@click.argument("value")
@broker_option
@address_option
@json_option
def config_set(name: str, value: str, broker: str | None, address: str | None, as_json: bool) -> None:
    """Change a setting while raymq runs; it outlives restarts. It is checked as raymq.yaml is.

    Example: raymq config set store.file_reserved_time_hours 48
    """
    from raymq.common.config.live import live_name, parse_value

    full = live_name(name)
    with client_of(address) as client:
        configs = client.admin.set_config(full, parse_value(full, value), broker)
    _print_changed(as_json, full, configs)


@config.command("unset")
@click.argument("name")
@broker_option
@address_option
@json_option
def config_unset(name: str, broker: str | None, address: str | None, as_json: bool) -> None:
    """Have a setting be as raymq.yaml says again. Example: raymq config unset store.file_reserved_time_hours"""
    from raymq.common.config.live import live_name

    full = live_name(name)
    with client_of(address) as client:
        configs = client.admin.unset_config(full, broker)
    _print_changed(as_json, full, configs)


def _print_changed(as_json: bool, full: str, configs: Mapping[str, Any]) -> None:
    value = {
        "setting": full,
        "values": {group: one.effective[full] for group, one in configs.items()},
        "behind": {group: list(one.behind) for group, one in configs.items() if one.behind},
    }

    def show() -> None:
        for group, one in configs.items():
            late = f"; {', '.join(one.behind)} is told on its return" if one.behind else ""
            say(f"{group} has {full} {_text(one.effective[full])} now{late}")

    print_value(as_json, value, show)


def _text(value: Any) -> str:
    """A value as raymq.yaml has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


@click.group(cls=Group)
def kv() -> None:
    """Get, set, delete and list values of the NameServers' KV configuration."""


@kv.command("get")
@click.argument("namespace")
@click.argument("key")
@address_option
@json_option
def kv_get(namespace: str, key: str, address: str | None, as_json: bool) -> None:
    """Print a value. Exit code 1 when there is none. Example: raymq kv get billing currency"""
    with client_of(address) as client:
        value = client.admin.get_kv(namespace, key)
    if value is None:
        print_value(as_json, _entry(namespace, key, None), lambda: say(f"{namespace} has no key {key}"))
        raise click.exceptions.Exit(1)
    print_value(as_json, _entry(namespace, key, value), lambda: say(value))


@kv.command("put")
@click.argument("namespace")
@click.argument("key")
@click.argument("value")
@address_option
@json_option
def kv_put(namespace: str, key: str, value: str, address: str | None, as_json: bool) -> None:
    """Set a value at every NameServer. Example: raymq kv put billing currency EUR"""
    with client_of(address) as client:
        client.admin.put_kv(namespace, key, value)
    print_value(as_json, _entry(namespace, key, value), lambda: say(f"{key} of {namespace} is {value} now"))


@kv.command("delete")
@click.argument("namespace")
@click.argument("key")
@address_option
@json_option
def kv_delete(namespace: str, key: str, address: str | None, as_json: bool) -> None:
    """Delete a value at every NameServer; one that is not there is gone already.

    Example: raymq kv delete billing currency
    """
    with client_of(address) as client:
        client.admin.delete_kv(namespace, key)
    print_value(as_json, _entry(namespace, key, None), lambda: say(f"{namespace} has no key {key} now"))


@kv.command("list")
@click.argument("namespace")
@address_option
@json_option
def kv_list(namespace: str, address: str | None, as_json: bool) -> None:
    """List the keys and values of a namespace; ORDER_TOPIC_CONFIG has the order topics.

    Example: raymq kv list ORDER_TOPIC_CONFIG
    """
    with client_of(address) as client:
        values = client.admin.list_kv(namespace)
    print_rows(as_json, "values", ["key", "value"], [list(row) for row in sorted(values.items())])


def _entry(namespace: str, key: str, value: str | None) -> dict[str, str | None]:
    return {"namespace": namespace, "key": key, "value": value}
