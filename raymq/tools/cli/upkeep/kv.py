"""`raymq kv`: the NameServers' KV configuration, values by namespace and key that programs share."""

from __future__ import annotations

import click

from raymq.tools.cli.terminal.output import Group, address_option, client_of, json_option, print_rows, print_value, say


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
