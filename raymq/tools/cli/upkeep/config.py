"""`raymq config`: the settings of broker groups, seen and changed while raymq runs."""

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
