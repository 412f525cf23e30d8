"""The settings of a broker group, as its broker tells them to clients: as started, as changed since, as they count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """The settings of a broker group by their full names, such as ``store.delete_when``.

    `started`: as raymq.yaml and the defaults had them when the broker was started. `changed`: the live settings that
    differ, kept in the group's log. `effective`: as they count now. `refused`: changes that do not count any more,
    with the reasons: raymq.yaml has been changed since. `live`: the names that may change while raymq runs. `behind`:
    storage actors that have not been told of the newest changes yet; they are told within seconds of their return.
    """

    started: Mapping[str, Any] = field(default_factory=dict)  # values as YAML has them: text, numbers, bools, lists
    changed: Mapping[str, Any] = field(default_factory=dict)  # likewise
    effective: Mapping[str, Any] = field(default_factory=dict)  # likewise
    refused: Mapping[str, str] = field(default_factory=dict)
    live: frozenset[str] = frozenset()
    behind: tuple[str, ...] = ()
