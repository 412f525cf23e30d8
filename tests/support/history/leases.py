"""Messages under leases, for the tests of the consume mode "share"."""

from __future__ import annotations

from collections.abc import Sequence

from raymq.client.consumer.simple.received_message import Receipt, ReceivedMessage, received
from raymq.common.message import PROPERTY_SHARDING_KEY, MessageExt

POP_MS = 1_700_000_000_000


def leased_messages(
    start: int,
    count: int,
    *,
    queue_id: int = 3,
    groups: Sequence[str] = (),
    attempts: int = 1,
    retry_max_times: int = 16,
    retry_intervals_s: tuple[float, ...] = (10.0, 30.0),
    size_bytes: int = 0,
    broker: str = "broker-a",
) -> list[ReceivedMessage]:
    """Return the messages of one lease of topic `orders`. `groups`: the message group of each message."""
    hosts = ("10.0.0.1:0", "10.0.0.2:10911", "ID", "OFF")
    own = [
        MessageExt(
            *("orders", b"body %d" % (start + place), None, (), {}, 0, broker, queue_id, start + place, 0, 1, 2),
            *hosts,
            reconsume_times=0,
            sys_flag=0,
            system_properties={PROPERTY_SHARDING_KEY: groups[place]} if groups else {},
        )
        for place in range(count)
    ]
    receipt = Receipt(
        *("orders", broker, queue_id, start, POP_MS, 30_000, attempts),
        whole=count,
        retry_intervals_s=retry_intervals_s,
        retry_max_times=retry_max_times,
        size_bytes=size_bytes,
    )
    return received(own, receipt)


def offsets_of(messages: Sequence[MessageExt]) -> list[int]:
    """Return the queue offsets of messages."""
    return [message.queue_offset for message in messages]
