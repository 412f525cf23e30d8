"""The NameServer's one durable table: namespace → key → value (spec/messaging.md §1.6).

On disk, in RocketMQ's shape, rewritten whole at each change: {"configTable": {"ORDER_TOPIC_CONFIG": {"orders": "…"}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from raymq.errors import InvalidArgumentError, StoreCorruptError
from raymq.route import ORDER_TOPIC_CONFIG, parse_order_config

VALUE_MAX_CHARACTERS = 65_536


class KvConfig:
    """A table as it is in memory. Changed only by `changed` and `load`, so that the file can be written before."""

    def __init__(self, table: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self._table = {namespace: dict(values) for namespace, values in (table or {}).items()}

    def get(self, namespace: str, key: str) -> str | None:
        """The value, None where there is none."""
        return self._table.get(namespace, {}).get(key)

    def list(self, namespace: str) -> dict[str, str]:
        """All keys and values of a namespace; empty where there are none."""
        return dict(self._table.get(namespace, {}))

    def changed(self, namespace: str, key: str, value: str | None) -> KvConfig:
        """A copy with one value set, or deleted with None. InvalidArgumentError for what cannot be kept; a value in
        the namespace of order topics must be such a configuration."""
        for what, text in (("namespace", namespace), ("key", key), ("value", "-" if value is None else value)):
            if not isinstance(text, str) or not text.strip() or len(text) > VALUE_MAX_CHARACTERS:
                raise InvalidArgumentError(f"a {what} is text of 1 to {VALUE_MAX_CHARACTERS} characters, not {text!r}")
        if namespace == ORDER_TOPIC_CONFIG and value is not None:
            parse_order_config(value)
        copy = KvConfig(self._table)
        if value is None:
            copy._table.get(namespace, {}).pop(key, None)
        else:
            copy._table.setdefault(namespace, {})[key] = value
        return copy

    def dump(self) -> str:
        """The file's text."""
        return json.dumps({"configTable": self._table}, indent=1, sort_keys=True, ensure_ascii=False)

    @classmethod
    def load(cls, text: str) -> KvConfig:
        """The table of a file's text. StoreCorruptError when it is not one."""
        try:
            table = json.loads(text)["configTable"]
            for key in table.get(ORDER_TOPIC_CONFIG, {}).values():
                parse_order_config(key)
            if not all(isinstance(value, str) for values in table.values() for value in values.values()):
                raise TypeError("a value is not text")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreCorruptError(f"this is not a NameServer's KV configuration: {error}") from None
        return cls(table)
