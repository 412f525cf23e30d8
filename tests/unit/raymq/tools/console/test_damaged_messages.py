"""Tests that the console can show unreadable messages without using much memory: a topic in which every second message
is damaged, and a topic of decompression bombs."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from raymq.client.admin.dead_letters import DeadLetter
from raymq.common.message import MessageExt
from raymq.records.format.compression import CompressionType, compress
from raymq.tools.console.messages.fields import FILE_BODIES_MAX_BYTES
from tests.support.console.asgi_client import AsgiClient
from tests.support.console.fake_cluster import FakeCluster
from tests.support.stores.damaged_topic import TOPIC, DamagedTopic, damaged_topic
from tests.support.stores.lying_bodies import lying_batch

MOST_BYTES = 100 << 20


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    with damaged_topic(tmp_path_factory.mktemp("damaged") / "store") as topic:
        yield topic


@pytest.fixture
def messages(damaged: DamagedTopic, cluster: FakeCluster) -> list[MessageExt]:
    """Put the messages of the damaged topic into the console's fake cluster, as messages of a topic and as dead letters
    of a group. Returns the messages."""
    found = list(damaged.admin.browse(TOPIC, limit=1000, newest_first=False, whole_bodies=False).messages)
    cluster.messages[TOPIC] = found
    cluster.letters["billing"] = [DeadLetter(message, TOPIC, False) for message in found]
    return found


def test_lists_show_each_message_and_mark_unreadable_messages(admin: AsgiClient, messages, damaged):
    for path in ("/topics/orders/messages?start=earliest&limit=100", "/groups/billing/dead-letters"):
        answer = admin.get(path)
        assert answer.status == 200
        for offset, body in enumerate(damaged.bodies):
            assert f"broker-a:0:{offset}" in answer.text
            assert body is None or body[:10].decode() in answer.text
        # A list of messages decodes only the beginning of a body. Decompression bombs and truncated bodies have an
        # intact beginning, so the list shows no error for them.
        unlike = [kind for kind in damaged.kinds.values() if not kind.endswith(("bomb", "cut"))]
        assert answer.text.count("cannot be read: ") >= len(unlike)


def test_the_page_of_a_message_that_cannot_be_read_gives_the_reason(admin: AsgiClient, messages, damaged):
    for message, body in zip(messages, damaged.bodies, strict=True):
        place = f"/messages?topic=orders&offset=broker-a:0:{message.queue_offset}"
        answer = admin.get(place)
        assert answer.status == 200, damaged.kinds.get(message.queue_offset)
        assert ("cannot be read" in answer.text) == (body is None)
        download = admin.get(place.replace("/messages?", "/messages/body?"))
        if body is None:
            assert (download.status, "cannot be read" in download.text) == (422, True)
        else:
            assert download.body == body


def test_files_have_an_error_in_place_of_a_body(admin: AsgiClient, messages, damaged):
    for path, rows in (
        ("/topics/orders/messages/export?start=earliest&limit=100&format=json", None),
        ("/groups/billing/dead-letters/export?format=json", None),
        ("/api/v1/topics/orders/messages?start=earliest&limit=100", "messages"),
    ):
        answer = admin.get(path)
        assert answer.status == 200
        found = json.loads(answer.text)[rows] if rows else [json.loads(line) for line in answer.text.splitlines()]
        assert [row["body"].encode() or None for row in found] == damaged.bodies
        assert [row["error"] is None for row in found] == [body is not None for body in damaged.bodies]


def test_a_page_of_bombs_costs_a_few_bytes_of_each(admin: AsgiClient, cluster: FakeCluster, tmp_path):
    """A console page that lists decompression bombs reads only a few bytes of each message. The page has 200 messages
    of 300 bytes. Each message states a decompressed size of 4 MiB, which is allowed."""
    bomb = compress(bytes(4 << 20), CompressionType.ZSTD)
    with damaged_topic(tmp_path / "store", lying=False, flipped=()) as topic:
        topic.store.append([lying_batch([(bomb, 0x201)] * 200)])
        tracemalloc.start()
        found = topic.admin.browse(TOPIC, limit=200, newest_first=False, whole_bodies=False).messages
        cluster.messages[TOPIC] = list(found)
        cluster.letters["billing"] = [DeadLetter(message, TOPIC, False) for message in found]
        for path in ("/topics/orders/messages?start=earliest&limit=200", "/groups/billing/dead-letters"):
            assert admin.get(path).status == 200
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        answer = admin.get("/api/v1/topics/orders/messages?start=earliest&limit=200")
        rows = json.loads(answer.text)["messages"]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert len(rows) == 200
    assert sum(len(row["body_base64"]) for row in rows) <= 2 * FILE_BODIES_MAX_BYTES
    assert "left out" in rows[-1]["error"]
    assert peak < 2 * MOST_BYTES
