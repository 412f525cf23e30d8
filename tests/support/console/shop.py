"""A FakeCluster that looks like the cluster of a web shop, for pictures: it is made of numbers, none by chance."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

from raymq.client.admin.dead_letters import DeadLetter
from raymq.client.admin.delayed import END_OF_TIME_MS, Delayed, DelayedMessage
from raymq.client.admin.track import MessageTrack, TrackState
from raymq.common.message import MessageExt
from raymq.common.protocol.clients import ProducerConnection
from raymq.common.protocol.group import GroupConfig
from raymq.tools.console.backend.cluster import AuditEntry, ClusterFigures
from raymq.tools.console.backend.groups import GroupRow
from raymq.tools.console.backend.topics import TopicRow
from tests.support.console.fake_cluster import BROKERS, FakeCluster, fake_message

TOPICS = (
    TopicRow("orders", 8, "RW", 14_204_554, 812.4, 4, {"message.type": "NORMAL"}),
    TopicRow("payments", 8, "RW", 9_388_120, 407.5, 3, {"message.type": "TRANSACTION"}),
    TopicRow("shipments", 4, "RW", 3_120_774, 96.2, 2, {"message.type": "FIFO"}),
    TopicRow("page-views", 16, "RW", 402_118_003, 5_204.0, 2, {"message.type": "NORMAL"}),
    TopicRow("stock-levels", 4, "RW", 48_220, 31.0, 1, {"cleanup.policy": "COMPACTION"}),
    TopicRow("invoices", 4, "RW", 1_870_334, 12.7, 1, {"message.type": "NORMAL"}),
    TopicRow("reminders", 4, "RW", 220_457, 3.1, 1, {"message.type": "DELAY"}),
    TopicRow("orders-2025", 8, "R", 88_410_229, 0.0, 0, {}),
)
GROUPS = (
    GroupRow("billing", "PUSH", "CLUSTERING", 6, 1_520, 95_000, 4, 17),
    GroupRow("warehouse", "PUSH", "CLUSTERING", 4, 212, 1_400, 0, 0),
    GroupRow("search-index", "PULL", "CLUSTERING", 2, 48_113, 41_000, 0, 0),
    GroupRow("fraud-check", "PUSH", "CLUSTERING", 8, 36, 220, 1, 3),
    GroupRow("mailer", "POP", "CLUSTERING", 12, 9, 80, 0, 0),
    GroupRow("cache-warmer", "PUSH", "BROADCASTING", 5, 0, 0, 0, 0),
    GroupRow("nightly-report", "", "", 0, 2_204_118, 50_400_000, 0, 0),
)
CITIES = ("Zürich", "Lisboa", "København", "Łódź", "Napoli")
ITEMS = ("desk lamp", "bicycle bell", "tea pot", "wool socks", "notebook", "rain coat")
TAGS = ("paid", "paid", "created", "paid", "refunded", "paid", "shipped")


def order(number: int, now_ms: int) -> MessageExt:
    """An order of the shop, the newer the larger its number."""
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
    """The cluster, as of now."""
    backend, now_ms = ShopCluster(), time.time_ns() // 1_000_000
    backend.topic_rows = {row.topic: row for row in TOPICS}
    backend.group_rows = {row.group: row for row in GROUPS}
    backend.configs = {row.group: GroupConfig(row.group) for row in GROUPS}
    backend.messages = {"orders": [order(number, now_ms) for number in range(200)]}
    backend.letters = {
        "billing": [
            DeadLetter(
                _died(order(number * 9, now_ms - 3_600_000 * (9 - number)), number),
                "orders",
                number < 1,
            )
            for number in range(9)
        ]
    }
    backend.delayed_messages = [
        DelayedMessage("reminders", now_ms + 42_000 + 97_000 * number, 0, order(number, now_ms)) for number in range(12)
    ]
    backend.producers = [
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
    backend.audit_entries = [
        AuditEntry(now_ms - ago_s * 1000, *who, action, arguments, outcome)
        for ago_s, who, action, arguments, outcome in changes
    ]
    return backend


def _died(message: MessageExt, number: int) -> MessageExt:
    """The message in the dead-letter topic."""
    values = {name: getattr(message, name) for name in MessageExt.__match_args__}
    values |= {"topic": "%DLQ%billing", "queue_id": 0, "queue_offset": 40 + number, "reconsume_times": 16}
    return MessageExt(**values)


def samples(now_ms: int) -> list[ClusterFigures]:
    """The counters of the last hour, every 10 s: a busy hour with a quiet spell."""
    figures, into, out, size = [], 9_000_000, 8_990_000, 4_000_000_000
    for step in range(360):
        rate = 1_320 + 260 * math.sin(step / 55) + 90 * math.sin(step / 7) - (700 if 190 <= step < 215 else 0)
        lagging = 0.72 if 240 <= step < 262 else 1.24 if 262 <= step < 288 else 1.0
        into, out, size = into + round(10 * rate), out + round(10 * rate * lagging), size + round(5_340 * rate)
        figures.append(ClusterFigures(now_ms - (360 - step) * 10_000, into, out, size, 20, 16, *_of_names(into, step)))
    return figures


def _of_names(into: int, step: int) -> tuple[dict[str, int], dict[str, int]]:
    """The messages put into each topic, in all and at this step, and the lag of each group."""
    topics = {
        row.topic: round(
            into * (row.rate or 0) / 6_567 + 900 * (row.rate or 0) * math.sin(step / (17 + 9 * number)) / 60
        )
        for number, row in enumerate(TOPICS)
    }
    swell = 1 + 4 * max(math.sin((step - 240) / 16), 0) if 240 <= step < 290 else 1
    return topics, {row.group: round((row.lag or 0) * (swell + 0.2 * math.sin(step / 9))) for row in GROUPS}


class ShopCluster(FakeCluster):
    """The shop's answers that depend on what is asked for."""

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
