"""The settings of a broker group that clients need. Clients get them from the group's broker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """The settings of a broker group by their full names, such as ``store.delete_when``.

    `started`: the values from raymq.yaml and the defaults when the broker started. `changed`: the values of changed
    live settings, from the group's log. `effective`: the current values. `refused`: changes that a later raymq.yaml has
    made invalid, with the reasons. `live`: the names of settings that may change while raymq runs. `behind`: storage
    actors that do not have the newest changes yet. An unreachable actor gets the changes within seconds after it is
    reachable again. `ordered`: the values that `raymq broker replicas` has changed, and that raymq.yaml no longer
    changes.
    """

    # the values have the types that YAML gives them: text, number, bool or list
    started: Mapping[str, Any] = field(default_factory=dict)
    changed: Mapping[str, Any] = field(default_factory=dict)  # each value as in YAML: text, number, bool or list
    effective: Mapping[str, Any] = field(default_factory=dict)  # each value as in YAML: text, number, bool or list
    refused: Mapping[str, str] = field(default_factory=dict)
    live: frozenset[str] = frozenset()
    behind: tuple[str, ...] = ()
    ordered: Mapping[str, Any] = field(default_factory=dict)  # each value as in YAML: text, number, bool or list
