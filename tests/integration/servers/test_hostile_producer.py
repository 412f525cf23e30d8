"""Tests of a hostile producer, which sends bodies with corrupt compression among the messages of honest producers.
Every kind of consumer gets all valid messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raymq
from raymq.common.message import PROPERTY_DLQ_ORIGIN_ERROR
from raymq.common.protocol.group import GroupConfig
from raymq.records.format import compression
from tests.support.clusters.cluster import SERVER_SETTINGS
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.waiting import eventually
from tests.support.stores.lying_bodies import lying_bodies

SETTINGS = SERVER_SETTINGS
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
LIES = [(body, flags) for body, flags in lying_bodies().values() if flags != 0x701]
HONEST = 40


@pytest.fixture
def topic(mq: raymq.Client, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create a topic with one queue, and fill it. Valid messages have their numbers as bodies. After every fourth valid
    message there is a message with a corrupt compressed body."""
    name = "hostile"
    mq.admin.create_topic(name, queues=1)
    honest = compression.Compression.compress_body

    def lie(self: compression.Compression, body: Any) -> tuple[Any, int]:
        number = bytes(body).removeprefix(b"lie ")
        return LIES[int(number)] if number != bytes(body) else honest(self, body)

    monkeypatch.setattr(compression.Compression, "compress_body", lie)
    zstd = raymq.Compression(raymq.CompressionType.ZSTD, threshold_bytes=1)
    with mq.producer("liar", compression=zstd) as producer:
        for number in range(HONEST):
            producer.send(raymq.Message(name, b"%d" % number))
            if number % 4 == 3:
                producer.send(raymq.Message(name, b"lie %d" % (number // 4 % len(LIES))))
    monkeypatch.undo()
    return name


def dead(mq: raymq.Client, group: str) -> list[str]:
    """Return, for each dead letter of a consumer group, the reason why it became a dead letter."""
    try:
        letters = mq.admin.dead_letters(group).letters()
    except (raymq.GroupNotExistError, raymq.TopicNotExistError):
        return []
    return [letter.message.system_properties[PROPERTY_DLQ_ORIGIN_ERROR] for letter in letters]


def test_others_messages_reach_every_kind_of_consumer(mq: raymq.Client, topic: str, tmp_path: Path) -> None:
    lies = HONEST // 4
    expected = [b"%d" % number for number in range(HONEST)]

    with mq.pull_consumer("hostile-pull", consume_from=FIRST) as pull:
        pull.subscribe(topic)
        found: list[raymq.MessageExt] = []
        while len(found) < HONEST + lies:
            found += pull.poll(timeout_s=10.0)
    assert [message.queue_offset for message in found] == list(range(HONEST + lies))
    assert [message.body for message in found if message.body_error is None] == expected
    for message in found:
        if message.body_error is not None:
            with pytest.raises(raymq.BodyUnreadableError, match=f"offset {message.queue_offset} of queue {topic}@"):
                _ = message.body

    with mq.pull_consumer("hostile-table", consume_from=FIRST) as pull:
        pull.subscribe(topic)
        rows: list[dict[str, Any]] = []
        while len(rows) < HONEST + lies:
            rows += pull.poll_table(timeout_s=10.0, columns=["body", "error"]).to_pylist()
    assert [row["body"] for row in rows if row["error"] is None] == expected
    assert sum(row["body"] is None for row in rows) == lies

    mq.admin.create_group(GroupConfig("hostile-simple", retry_max_times=0))
    with mq.simple_consumer("hostile-simple", consume_from=FIRST) as simple:
        simple.subscribe(topic)
        received: list[bytes] = []
        while len(received) < HONEST:
            messages = simple.receive(16, 60.0, wait_s=10.0)
            received += [message.body for message in messages]
            simple.ack(messages)
    assert received == expected
    eventually(lambda: len(dead(mq, "hostile-simple")) == lies, "the dead letters of the simple consumer")

    kinds: dict[str, dict[str, Any]] = {"hostile-push": {}, "hostile-lists": {}, "hostile-order": {"orderly": True}}
    for group, options in kinds.items():
        journal = ListenerNotes(tmp_path / group)
        batch = group == "hostile-lists"

        def listen(messages: Any, journal: ListenerNotes = journal, batch: bool = batch) -> None:
            for message in messages if batch else [messages]:
                journal.write(message.body.decode())

        consumer = mq.push_consumer(group, consume_from=FIRST, **options).subscribe(topic)
        with (consumer.on_messages(listen, batch_max=8) if batch else consumer.on_message(listen)).start():
            eventually(lambda group=group: len(dead(mq, group)) == lies, f"the dead letters of {group}")
            eventually(lambda journal=journal: len(journal.lines()) == HONEST, f"the messages of {group}")
        lines = [int(line) for line in journal.lines()]
        assert sorted(lines) == list(range(HONEST))
        if options.get("orderly"):
            assert lines == sorted(lines)
        assert all("compressed" in reason for reason in dead(mq, group))
        assert sum(entry.lag for entry in mq.admin.describe_group(group)) == 0
