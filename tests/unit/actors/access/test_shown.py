"""Tests that lists in a server's replies contain only the names that the user may see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.core.access.shown import VisibleNames, cut

SIGHT = VisibleNames(lambda topic: topic == "orders", lambda group: group == "billing")


def named(group: str) -> Any:
    return SimpleNamespace(group=group, consumer=SimpleNamespace(group=group))


BILLING, SHIPPING = named("billing"), named("shipping")


@pytest.mark.parametrize(
    ("server", "method", "answer", "expected"),
    [
        ("NameServer", "topics", ["bills", "orders"], ["orders"]),
        ("Broker", "groups", ["billing", "shipping"], ["billing"]),
        ("Broker", "group_topics", ["bills", "orders"], ["orders"]),
        ("Broker", "topic_offsets", {"billing": {0: 1}, "shipping": {}}, {"billing": {0: 1}}),
        ("Broker", "producer_connections", [BILLING, SHIPPING], [BILLING]),
        ("Broker", "consumer_connections", [BILLING, SHIPPING], [BILLING]),
        (
            "Broker",
            "status",
            {
                "ready": True,
                "topics": ["bills", "orders"],
                "groups": ["billing", "shipping"],
                "deleted_unread": [
                    {"group": "billing", "topic": "orders"},
                    {"group": "billing", "topic": "bills"},
                    {"group": "shipping", "topic": "orders"},
                ],
            },
            {
                "ready": True,
                "topics": ["orders"],
                "groups": ["billing"],
                "deleted_unread": [{"group": "billing", "topic": "orders"}],
            },
        ),
        ("Pull", "status", {"instances": [{"group": "billing"}, {"group": ""}]}, {"instances": [{"group": "billing"}]}),
        ("Broker", "committed_offsets", {0: 1}, {0: 1}),
    ],
)  # fmt: skip
def test_an_answer_contains_only_names_that_the_user_may_see(
    server: str, method: str, answer: Any, expected: Any
) -> None:
    assert cut(server, method, answer, SIGHT) == expected
