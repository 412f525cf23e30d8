"""Tests of `raymq group`: the calls that the commands make to a fake Admin, and their output."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from raymq.client.admin.groups import NewOffsets
from raymq.common.message import MessageQueue
from raymq.common.protocol.clients import ConsumerConnection, ConsumerData
from raymq.common.protocol.group import GroupConfig, GroupQueueProgress, GroupSummary

QUEUE = MessageQueue("orders", "broker-a", 3)


class Admin:
    """Fake Admin that records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def group_summary(self, group: str) -> GroupSummary:
        progress = GroupQueueProgress(group, QUEUE, 17, 0, 20, 65_000)
        return GroupSummary(group, (progress,), 3, 65_000, 2, 1)

    def reset_offsets(self, group: str, topic: str, **where: Any) -> NewOffsets:
        self.asked.append((group, topic, where))
        return NewOffsets({QUEUE: 5}, {QUEUE: None})

    def clone_offsets(self, source: str, target: str, topic: str, **how: Any) -> NewOffsets:
        self.asked.append((source, target, topic, how))
        return NewOffsets({QUEUE: 5}, {QUEUE: 2})

    def delete_offsets(self, group: str, topic: str, **how: Any) -> dict[MessageQueue, int]:
        self.asked.append((group, topic, how))
        return {QUEUE: 17}

    def forbid(self, group: str, topic: str) -> None:
        self.asked.append(("forbid", group, topic))

    def allow(self, group: str, topic: str) -> None:
        self.asked.append(("allow", group, topic))

    def forbidden_topics(self, group: str) -> list[str]:
        return ["orders"] if self.asked and self.asked[-1][0] == "forbid" else []

    def create_group(self, group: str, **settings: Any) -> None:
        self.asked.append(("create", group, settings))

    def update_group(self, group: str, **changes: Any) -> GroupConfig:
        self.asked.append((group, changes))
        return GroupConfig(group, **changes)

    def consumer_connections(self, group: str) -> list[ConsumerConnection]:
        own = ConsumerData(group, "PULL", member="pull-1")
        java = ConsumerData(group, "POP", member="java-1", language="JAVA", version="5.0.7", consume_mode="share")
        return [
            ConsumerConnection("c1", "h", 1, own, 0.5, version="0.2.0"),
            ConsumerConnection("gateway", "h", 2, java, 0.5, language="JAVA", version="5.0.7"),
        ]

    def group_config(self, group: str) -> GroupConfig:
        return GroupConfig(group)


@pytest.fixture
def admin() -> Admin:
    return Admin()


def test_a_group_is_described_with_its_lag_in_messages_and_in_time(run: Any) -> None:
    text = run("group", "describe", "billing").output
    assert "1 m 5 s" in text
    assert "2 messages wait for a retry, 1 dead letters" in text
    value = json.loads(run("group", "describe", "billing", "--json").output)
    assert (value["lag"], value["lag_ms"], value["retry_lag"], value["dead_letters"]) == (3, 65_000, 2, 1)
    assert value["queues"][0]["lag_ms"] == 65_000


@pytest.mark.parametrize(
    ("to", "expected"),
    [("earliest", {"to": "earliest"}), ("latest", {"to": "latest"}), ("120", {"offset": 120})],
)
def test_an_offset_is_reset_to_an_end_or_a_number(run: Any, admin: Admin, to: str, expected: dict[str, Any]) -> None:
    run("group", "reset-offset", "billing", "orders", "--to", to)
    assert admin.asked == [("billing", "orders", {"queue": None, "dry_run": False, **expected})]


def test_members_are_listed_with_their_libraries(run: Any) -> None:
    members = json.loads(run("group", "members", "billing", "--json").output)["members"]
    assert [(one["client"], one["member"], one["language"], one["version"]) for one in members] == [
        ("c1", "pull-1", "PYTHON", "0.2.0"),
        ("gateway", "java-1", "JAVA", "5.0.7"),
    ]
    assert [one["mode"] for one in members] == ["queue", "share"]
    assert "JAVA" in run("group", "connections", "billing").output


def test_an_offset_is_reset_to_a_time_in_one_queue(run: Any, admin: Admin) -> None:
    run("group", "reset-offset", "billing", "orders", "--to", "2026-03-01T12:00:00+00:00", "--queue", "broker-a:3")
    assert admin.asked == [("billing", "orders", {"queue": QUEUE, "dry_run": False, "timestamp_ms": 1_772_366_400_000})]


@pytest.mark.parametrize("arguments", [("--to", "someday"), ("--to", "latest", "--queue", "broker-a")])
def test_a_bad_time_or_queue_is_refused(run: Any, arguments: tuple[str, ...]) -> None:
    result = run("group", "reset-offset", "billing", "orders", *arguments, code=2)
    assert f"Invalid value for '{arguments[-2]}'" in result.output


def test_a_group_is_changed_only_if_an_option_is_given(run: Any, admin: Admin) -> None:
    run("group", "update", "billing")
    assert admin.asked == []
    run("group", "update", "billing", "--retry-max-times", "5", "--no-consume")
    run("group", "update", "billing", "--no-broadcast")
    assert "10s,1m,2h" in run("group", "update", "billing", "--retry-intervals", "10s, 1m,2h").output
    assert "1s,2s,4s,5s" in run("group", "update", "billing", "--retry-intervals", "1s*2..5s").output
    run("group", "update", "billing", "--retry-intervals", "default")
    for ordered in ("yes", "no", "by-topic"):
        run("group", "update", "billing", "--ordered", ordered)
    run("group", "update", "billing", "--ordered", "perhaps", code=2)
    for wrong in ("soon", "0s", "41d", ""):
        run("group", "update", "billing", "--retry-intervals", wrong, code=2)
    assert admin.asked == [
        ("billing", {"retry_max_times": 5, "consume_enable": False}),
        ("billing", {"consume_broadcast_enable": False}),
        ("billing", {"retry_intervals_s": (10, 60, 7200)}),
        ("billing", {"retry_intervals_s": (1, 2, 4, 5)}),
        ("billing", {"retry_intervals_s": ()}),
        *(("billing", {"ordered": ordered}) for ordered in (True, False, None)),
    ]


def test_a_group_is_created_with_the_settings_that_are_given(run: Any, admin: Admin) -> None:
    shown = json.loads(run("group", "create", "billing", "--json").output)
    assert shown == asdict(GroupConfig("billing")) | {"retry_intervals_s": []}
    run("group", "create", "billing", "--retry-max-times", "5", "--no-broadcast", "--retry-queues", "2")
    run("group", "create", "billing", "--retry-max-times", "-1", code=2)
    assert admin.asked == [
        ("create", "billing", {}),
        ("create", "billing", {"retry_max_times": 5, "consume_broadcast_enable": False, "retry_queue_nums": 2}),
    ]


def test_offsets_of_another_group_are_looked_at_and_taken(run: Any, admin: Admin) -> None:
    result = run("group", "clone-offsets", "billing", "copy", "orders", "--dry-run", "--json")
    assert json.loads(result.output)["queues"] == [{"broker": "broker-a", "queue": 3, "old": 2, "offset": 5}]
    run("group", "clone-offsets", "billing", "copy", "orders")
    assert admin.asked == [("billing", "copy", "orders", {"dry_run": dry}) for dry in (True, False)]


def test_offsets_in_a_topic_are_looked_at_and_dropped(run: Any, admin: Admin) -> None:
    result = run("group", "delete-offsets", "billing", "orders", "--dry-run", "--json")
    assert json.loads(result.output)["queues"] == [{"broker": "broker-a", "queue": 3, "dropped": 17}]
    run("group", "delete-offsets", "billing", "orders")
    assert admin.asked == [("billing", "orders", {"dry_run": dry}) for dry in (True, False)]


def test_a_group_is_forbidden_a_topic_and_allowed_again(run: Any, admin: Admin) -> None:
    assert "may read every topic" in run("group", "forbid", "billing").output
    assert admin.asked == []
    assert "billing may not read orders" in run("group", "forbid", "billing", "orders").output
    result = run("group", "allow", "billing", "orders", "--json")
    assert json.loads(result.output) == {"group": "billing", "forbidden": []}
    assert admin.asked == [("forbid", "billing", "orders"), ("allow", "billing", "orders")]


def test_a_dry_run_of_a_reset_shows_both_offsets(run: Any, admin: Admin) -> None:
    output = run("group", "reset-offset", "billing", "orders", "--to", "latest", "--dry-run", "--json").output
    [row] = json.loads(output)["queues"]
    assert "old" in row
    assert admin.asked == [("billing", "orders", {"queue": None, "dry_run": True, "to": "latest"})]
