"""Tests that the batches of BatchEncoder equal, byte for byte, the batches of raymq.records.format.encode, for any
number of messages."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from raymq.client.producer.checks.batches import check_batch
from raymq.client.producer.completion import Completion
from raymq.client.producer.senders.encoder import BatchEncoder
from raymq.client.producer.senders.send_batch import QueueSends, SendBatch
from raymq.common.errors import MessageIllegalError
from raymq.common.message import Message, MessageQueue
from raymq.records.format.compression import Compression, CompressionType
from raymq.records.format.decode import decode_records
from raymq.records.format.encode import encode_batch
from raymq.records.kernels.message_columns import MessageColumns

SEEDS = 150
TOPICS = ("orders", "%RETRY%" + "g" * 130)


def message(
    chance: random.Random, topic: str, *, waits: bool, rich_share: float = 0.4, flagged: bool = True
) -> Message:
    rich = chance.random() < rich_share
    body = chance.choice([b"x", b"body", bytes(5000), chance.randbytes(300)])
    if not rich:
        return Message(topic, body, wait_store_msg_ok=waits)
    return Message(
        topic,
        body,
        chance.choice([None, "paid", "größe"]),
        chance.choice([(), ("k1",), ("k1", "k2")]),
        chance.choice([{}, {"shop": "Zürich", "a": "b"}]),
        chance.choice([0, -5, 2**31 - 1] if flagged else [0]),
        wait_store_msg_ok=waits,
    )


def some_encoder(chance: random.Random, host: tuple[str, int]) -> tuple[Compression, BatchEncoder, QueueSends]:
    """Return a random compression, an encoder with this compression, and the QueueSends object of a random queue. Its
    next sequence number may show that messages were already sent to the queue."""
    compression = Compression(chance.choice([CompressionType.NONE, CompressionType.ZSTD]))
    sends = QueueSends(MessageQueue(chance.choice(TOPICS), "a", chance.randint(0, 3)))
    sends.next_sequence = chance.choice([0, 8, 95, 10**9])
    return compression, BatchEncoder(host, compression), sends


@pytest.mark.parametrize("host", [("127.0.0.1", 1), ("::1", 0)])
def test_batches_equal_the_batches_of_the_record_encoder(host):
    for seed in range(SEEDS):
        print("seed", seed)
        chance = random.Random(seed)
        compression, encoder, sends = some_encoder(chance, host)
        waits = chance.random() < 0.8
        for _ in range(3):
            batches = [
                batch_of([message(chance, sends.queue.topic, waits=waits) for _ in range(count)], sends, waits=waits)
                for count in chance.choice([[1], [2], [1, 3], [40], [41], [30, 30], [120]])
            ]
            check(encoder, sends, batches, host, compression)


def test_batches_that_go_as_columns_have_the_bytes_that_their_messages_have():
    host, as_columns = ("127.0.0.1", 1), 0
    for seed in range(SEEDS):
        print("seed", seed)
        chance = random.Random(seed)
        compression = Compression(chance.choice([CompressionType.NONE, CompressionType.ZSTD]))
        encoder = BatchEncoder(host, compression)
        sends = QueueSends(MessageQueue(TOPICS[0], "a", 0))
        sends.next_sequence = chance.choice([0, 95])
        rich_share, flagged, waits = chance.choice([0.0, 0.4]), chance.random() < 0.2, chance.random() < 0.8
        many = [
            [
                message(chance, TOPICS[0], waits=waits, rich_share=rich_share, flagged=flagged)
                for _ in range(chance.choice([2, 40, 41, 120]))
            ]
            for _ in range(chance.choice([1, 2]))
        ]
        batches = [batch_of(check_batch(messages), sends, waits=waits) for messages in many]
        as_columns += sum(isinstance(batch.messages, MessageColumns) for batch in batches)
        assert [list(batch.messages) for batch in batches] == many
        check(encoder, sends, batches, host, compression)
    assert as_columns > SEEDS // 4


def test_only_many_usual_messages_of_one_topic_go_as_columns():
    def as_columns(*more: Message, count: int = 100, as_objects: bool = False) -> bool:
        messages = [Message("orders", b"x", keys="k") for _ in range(count)]
        return isinstance(check_batch([*messages, *more], as_objects=as_objects), MessageColumns)

    class OwnMessage(Message):
        pass

    assert as_columns(Message("orders", b"x"))
    assert not as_columns(count=40)
    assert not as_columns(count=5000)
    assert not as_columns(as_objects=True)
    for other in (
        *(Message("orders", b"x", delay_level=1), Message("orders", b"x", deliver_at_ms=0), OwnMessage("orders", b"x")),
        *(Message("orders", b"x", flag=1), Message("orders", b"x", properties={"a": "b" * 32000})),
        Message("orders", bytes(4 << 20)),
    ):
        assert not as_columns(other)
    for other in (Message("others", b"x"), Message("orders", b"x", wait_store_msg_ok=False)):
        with pytest.raises(MessageIllegalError):
            as_columns(other)


@pytest.mark.parametrize("host", [("127.0.0.1", 1), ("::1", 0)])
def test_a_lone_record_is_the_batch_of_one_message(host):
    for seed in range(SEEDS):
        print("seed", seed)
        chance = random.Random(seed)
        compression, encoder, sends = some_encoder(chance, host)
        for _ in range(3):
            one, sequence = message(chance, sends.queue.topic, waits=chance.random() < 0.8), sends.next_sequence
            record = encoder.encode_one(sends, one)
            encoded = record.batch()
            expected = encode_batch(
                [one],
                sends.queue.queue_id,
                born_host=host,
                born_timestamp_ms=decode_records(encoded.records)[0].born_timestamp_ms,
                message_ids=[f"{record.stem}{record.counter:04X}"],
                producer=encoded.producer,
                compression=compression,
            )
            assert bytes(encoded.records) == b"".join(record.parts) == bytes(expected.records)
            assert (encoded.sizes.tolist(), encoded.tag_codes.tolist()) == (
                expected.sizes.tolist(),
                expected.tag_codes.tolist(),
            )
            assert (encoded.topic, encoded.queue_id) == (expected.topic, expected.queue_id)
            assert tuple(encoded.message_ids) == expected.message_ids
            assert encoded.wait_store_msg_ok is expected.wait_store_msg_ok
            assert (record.sequence, sends.next_sequence) == (sequence, sequence + 1)


def batch_of(messages: Sequence[Message], sends: QueueSends, *, waits: bool) -> SendBatch:
    return SendBatch(sends.queue.topic, sends.queue, sends, messages, Completion(), True, waits, 30.0, 1e9, 0, 0)


def check(encoder: BatchEncoder, sends: QueueSends, batches: list[SendBatch], host, compression) -> None:
    encoded = encoder.encode(sends, batches)
    made_ms = decode_records(encoded.records)[0].born_timestamp_ms
    expected = encode_batch(
        [message for batch in batches for message in batch.messages],
        sends.queue.queue_id,
        born_host=host,
        born_timestamp_ms=made_ms,
        message_ids=list(encoded.message_ids),
        producer=encoded.producer,
        compression=compression,
    )
    assert bytes(encoded.records) == bytes(expected.records)
    assert memoryview(encoded.records).format == "B"
    assert encoded.sizes.tolist() == expected.sizes.tolist()
    assert encoded.tag_codes.tolist() == expected.tag_codes.tolist()
    assert (encoded.topic, encoded.queue_id) == (expected.topic, expected.queue_id)
    assert (tuple(encoded.message_ids), encoded.wait_store_msg_ok) == (expected.message_ids, expected.wait_store_msg_ok)
    assert encoded.producer.first_sequence + len(encoded) == sends.next_sequence
    assert 0 <= time.time_ns() // 1_000_000 - made_ms < 60_000
    ids = encoded.message_ids
    again = [batch for batch in batches if batch.messages]
    for batch in again[: len(again) // 2 + 1]:
        batch.message_ids = ids[: len(batch.messages)]
    kept = encoder.encode(sends, batches)
    assert list(kept.message_ids)[: len(batches[0].messages)] == list(ids)[: len(batches[0].messages)]
