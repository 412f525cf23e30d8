"""A FakeCluster that looks like the cluster of a web shop, for screenshots. Its data is computed, not random."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

from raymq.client.admin.dead_letters import DeadLetter
from raymq.client.admin.delayed import END_OF_TIME_MS, Delayed, DelayedMessage
from raymq.client.admin.track import MessageTrack, TrackState
from raymq.common.message import MessageExt, MessageModel
from raymq.common.protocol.attributes import CleanupPolicy, TopicAttributes, TopicMessageType
from raymq.common.protocol.clients import ProducerConnection
from raymq.common.protocol.group import GroupConfig
from raymq.common.protocol.route import PERM_READ
from raymq.common.protocol.stats import GroupTotals
from raymq.tools.console.cluster import AuditEntry
from raymq.tools.console.web.history import ClusterFigures
from tests.support.console.fake_cluster import BROKERS, FakeCluster, fake_message, members_of, topic_reading

TOPICS = {
    "orders": topic_reading(8, 14_204_554, 812.4),
    "payments": topic_reading(8, 9_388_120, 407.5),
    "shipments": topic_reading(4, 3_120_774, 96.2),
    "page-views": topic_reading(16, 402_118_003, 5_204.0),
    "stock-levels": topic_reading(4, 48_220, 31.0),
    "invoices": topic_reading(4, 1_870_334, 12.7),
    "reminders": topic_reading(4, 220_457, 3.1),
    "orders-2025": topic_reading(8, 88_410_229, 0.0, PERM_READ),
}
ATTRIBUTES = {
    "orders": TopicAttributes(TopicMessageType.NORMAL),
    "payments": TopicAttributes(TopicMessageType.TRANSACTION),
    "shipments": TopicAttributes(TopicMessageType.FIFO),
    "page-views": TopicAttributes(TopicMessageType.NORMAL),
    "stock-levels": TopicAttributes(cleanup_policy=CleanupPolicy.COMPACTION),
    "invoices": TopicAttributes(TopicMessageType.NORMAL),
    "reminders": TopicAttributes(TopicMessageType.DELAY),
}
READERS = {
    "orders": ("billing", "fraud-check", "search-index", "warehouse"),
    "payments": ("billing", "fraud-check", "nightly-report"),
    "shipments": ("mailer", "warehouse"),
    "page-views": ("nightly-report", "search-index"),
    "stock-levels": ("cache-warmer",),
    "invoices": ("mailer",),
    "reminders": ("mailer",),
}
GROUPS = {
    "billing": GroupTotals(lag=1_520, lag_ms=95_000, retries=4, dead_letters=17),
    "warehouse": GroupTotals(lag=212, lag_ms=1_400),
    "search-index": GroupTotals(lag=48_113, lag_ms=41_000),
    "fraud-check": GroupTotals(lag=36, lag_ms=220, retries=1, dead_letters=3),
    "mailer": GroupTotals(lag=9, lag_ms=80),
    "cache-warmer": GroupTotals(),
    "nightly-report": GroupTotals(lag=2_204_118, lag_ms=50_400_000),
}
MEMBERS = {
    "billing": members_of("billing", "PUSH", 6),
    "warehouse": members_of("warehouse", "PUSH", 4),
    "search-index": members_of("search-index", "PULL", 2),
    "fraud-check": members_of("fraud-check", "PUSH", 8),
    "mailer": members_of("mailer", "POP", 12),
    "cache-warmer": members_of("cache-warmer", "PUSH", 5, MessageModel.BROADCASTING),
}
CITIES = ("Zürich", "Lisboa", "København", "Łódź", "Napoli")
ITEMS = ("desk lamp", "bicycle bell", "tea pot", "wool socks", "notebook", "rain coat")
TAGS = ("paid", "paid", "created", "paid", "refunded", "paid", "shipped")


def order(number: int, now_ms: int) -> MessageExt:
    """Return the message of one order of the shop. A larger number is a newer order."""
    city, item = CITIES[number % len(CITIES)], ITEMS[number % len(ITEMS)]
    body = {
        "order": 481_200 + number,
        "customer": f"c-{7 * number % 9973:04d}",
        "items": [{"name": item, "count": 1 + number % 3, "price": round(4.9 + number * 37 % 90, 2)}],
        "ship_to": {"city": city, "express": number % 4 == 0},
    }
    return fake_message(
        "orders",
        json.dumps(body, ensure_ascii=False).encode(),
        queue_offset=1_775_000 + number // 8,
        queue_id=number % 4,
        broker_name=BROKERS[number // 4 % 2],
        tags=TAGS[number % len(TAGS)],
        keys=(f"o-{481_200 + number}", f"c-{7 * number % 9973:04d}"),
        properties={"region": "eu" if number % 3 else "us", "trace": f"{number * 2654435761 % 2**32:08x}"},
        at_ms=now_ms - (200 - number) * 1_230,
    )


def shop() -> FakeCluster:
    """Return the cluster of a web shop. Its newest events happen now."""
    cluster, now_ms = ShopCluster(), time.time_ns() // 1_000_000
    cluster.topics, cluster.attributes, cluster.readers = dict(TOPICS), dict(ATTRIBUTES), dict(READERS)
    cluster.groups, cluster.members = dict(GROUPS), dict(MEMBERS)
    cluster.configs = {group: GroupConfig(group) for group in GROUPS}
    cluster.messages = {"orders": [order(number, now_ms) for number in range(200)]}
    cluster.letters = {
        "billing": [
            DeadLetter(
                _died(order(number * 9, now_ms - 3_600_000 * (9 - number)), number),
                "orders",
                number < 1,
            )
            for number in range(9)
        ]
    }
    cluster.delayed_messages = [
        DelayedMessage("reminders", now_ms + 42_000 + 97_000 * number, 0, order(number, now_ms)) for number in range(12)
    ]
    cluster.producers = [
        ProducerConnection(
            f"10.0.0.{11 + number}@{4711 + 13 * number}", f"10.0.0.{11 + number}", 4711 + 13 * number, *rest
        )
        for number, rest in enumerate(
            [
                ("shop", 1.2),
                ("shop", 4.0),
                ("bank", 8.3),
                ("tracker", 0.4),
                ("tracker", 11.9),
                ("warehouse", 2.7),
            ]
        )
    ]
    mira, jonas = ("mira", "admin", "10.0.3.7"), ("jonas", "admin", "10.0.3.9")
    changes = (
        (86_400, mira, "topic create", {"topic": "invoices", "queues": "4"}, "done"),
        (7_300, mira, "group update", {"group": "billing", "retry_max_times": "16"}, "done"),
        (5_400, jonas, "group reset", {"group": "search-index", "to": "earliest"}, "done"),
        (900, jonas, "topic delete", {"topic": "orders"}, "topic 'orders' is kept: its name was not typed"),
        (240, mira, "dead letters replay", {"group": "billing", "letters": "1"}, "1 brought back, 0 failed"),
    )
    cluster.audit_entries = [
        AuditEntry(now_ms - ago_s * 1000, *who, action, arguments, outcome)
        for ago_s, who, action, arguments, outcome in changes
    ]
    return cluster


def _died(message: MessageExt, number: int) -> MessageExt:
    """Return the message in the form in which the dead-letter topic stores it."""
    values = {name: getattr(message, name) for name in MessageExt.__match_args__}
    values |= {"topic": "%DLQ%billing", "queue_id": 0, "queue_offset": 40 + number, "reconsume_times": 16}
    return MessageExt(**values)


def samples(now_ms: int) -> list[ClusterFigures]:
    """Return samples of the cluster's counters for the last hour, one every 10 s. The hour is busy, with one quiet
    period."""
    figures, into, out, size = [], 9_000_000, 8_990_000, 4_000_000_000
    for step in range(360):
        rate = 1_320 + 260 * math.sin(step / 55) + 90 * math.sin(step / 7) - (700 if 190 <= step < 215 else 0)
        lagging = 0.72 if 240 <= step < 262 else 1.24 if 262 <= step < 288 else 1.0
        into, out, size = into + round(10 * rate), out + round(10 * rate * lagging), size + round(5_340 * rate)
        figures.append(ClusterFigures(now_ms - (360 - step) * 10_000, into, out, size, 20, 16, *_of_names(into, step)))
    return figures


def _of_names(into: int, step: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return two tables for sample number `step`: the number of messages appended to each topic so far, and the lag of
    each group.

    `into`: number of messages appended to the cluster up to this sample.
    """
    topics = {
        topic: round(into * one.rate / 6_567 + 900 * one.rate * math.sin(step / (17 + 9 * number)) / 60)
        for number, (topic, one) in enumerate(TOPICS.items())
    }
    swell = 1 + 4 * max(math.sin((step - 240) / 16), 0) if 240 <= step < 290 else 1
    return topics, {group: round(one.lag * (swell + 0.2 * math.sin(step / 9))) for group, one in GROUPS.items()}


class ShopCluster(FakeCluster):
    """A fake cluster for a web shop. This class defines the calls whose results depend on their arguments."""

    def message_track(self, message: MessageExt) -> list[MessageTrack]:
        return [
            MessageTrack("billing", TrackState.RETRYING, 2, "next attempt in 30 s"),
            MessageTrack("warehouse", TrackState.CONSUMED, detail="committed 2 s after it was stored"),
            MessageTrack("search-index", TrackState.NOT_YET, detail="412 messages before it"),
            MessageTrack("fraud-check", TrackState.FILTERED, detail="subscribes to created"),
        ]

    def delayed(self, begin_ms: int = 0, end_ms: int = END_OF_TIME_MS, *, limit: int = 100) -> Delayed:
        view = super().delayed(begin_ms, end_ms, limit=limit)
        hours = tuple(round(60 + 55 * math.sin(hour / 3.2) + 11 * (hour % 4)) for hour in range(24))
        levels = {"3 (10 s)": 212, "5 (1 min)": 96, "9 (5 min)": 31, "17 (1 h)": 8, "deliver_at": sum(hours)}
        return replace(view, levels=levels, hours=hours, truncated=True)
