"""The NameServer's only durable table: namespace → key → value (spec/messaging.md §1.6).

The file has RocketMQ's format, and each change rewrites the whole file: {"configTable": {"namespace": {"key":
"value"}}}

Unlike in RocketMQ, the configurations of order topics are not in this table. If a NameServer restarted on another node,
it would lack this file, and the messages of a sharding key would be sent to another queue. Instead, the brokers store
these configurations in their logs, and register them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from raymq.common.errors import InvalidArgumentError, StoreCorruptError
from raymq.common.protocol.route import ORDER_TOPIC_CONFIG

VALUE_MAX_CHARACTERS = 65_536


class KvConfig:
    """The NameServer's key-value table in memory. `changed` and `load` return a new table instead of changing this one,
    so that the file can be written first."""

    def __init__(self, table: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self._table = {namespace: dict(values) for namespace, values in (table or {}).items()}

    def list(self, namespace: str) -> dict[str, str]:
        """Return all keys and values of a namespace; an empty dict if the namespace does not exist."""
        return dict(self._table.get(namespace, {}))

    def changed(self, namespace: str, key: str, value: str | None) -> KvConfig:
        """Return a copy of the key-value table with one value set, or deleted if `value` is None. Raises
        InvalidArgumentError if the namespace, key or value cannot be stored in the table."""
        for what, text in (("namespace", namespace), ("key", key), ("value", "-" if value is None else value)):
            if not isinstance(text, str) or not text.strip() or len(text) > VALUE_MAX_CHARACTERS:
                raise InvalidArgumentError(
                    f"a {what} must be a text of 1 to {VALUE_MAX_CHARACTERS} characters, not {text!r}"
                )
        if namespace == ORDER_TOPIC_CONFIG:
            raise InvalidArgumentError(
                f"namespace {ORDER_TOPIC_CONFIG} is stored by the brokers: use admin.set_order_config"
            )
        copy = KvConfig(self._table)
        if value is None:
            copy._table.get(namespace, {}).pop(key, None)
        else:
            copy._table.setdefault(namespace, {})[key] = value
        return copy

    def dump(self) -> str:
        """Return the key-value table as the text of its file."""
        return json.dumps({"configTable": self._table}, indent=1, sort_keys=True, ensure_ascii=False)

    @classmethod
    def load(cls, text: str) -> KvConfig:
        """Parse the key-value table from the text of its file. Raises StoreCorruptError if the text is not a
        table."""
        try:
            table = json.loads(text)["configTable"]
            if not all(isinstance(value, str) for values in table.values() for value in values.values()):
                raise TypeError("a value is not text")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreCorruptError(f"the file does not contain a NameServer's KV configuration: {error}") from None
        return cls(table)
