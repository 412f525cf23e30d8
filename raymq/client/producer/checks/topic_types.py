"""Checks messages against their topic's attributes before the messages are sent (raymq.common.protocol.attributes).

A message's type follows RocketMQ's `TopicMessageType.parseFromMessageProperty`. A half message is TRANSACTION. Any
other message is DELAY if it is delayed, FIFO if it has a sharding key, PRIORITY if it has a priority, and NORMAL
otherwise. A message with a queue or a selector is accepted by FIFO topics and by NORMAL topics, because its queue gives
it an order. PRIORITY topics refuse it, because there the priority chooses the queue.

As in RocketMQ, producers check the types; the store does not. After a change of a topic's attributes, a producer uses
the old attributes until it refreshes its route, for up to half a minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from raymq.client.producer.queue_selector import Destination
from raymq.client.producer.senders.message_facts import is_delayed
from raymq.common.delay import is_waiting_topic
from raymq.common.errors import MessageIllegalError
from raymq.common.message import PROPERTY_KEYS, PROPERTY_TRANSACTION_PREPARED, Message, MessageQueue
from raymq.common.names import HALF_TOPIC
from raymq.common.protocol.attributes import QUEUE_TYPE, TopicAttributes, TopicMessageType
from raymq.common.protocol.route import TopicRoute
from raymq.records.kernels.message_columns import MessageColumns

_KEYS: Final = f"{PROPERTY_KEYS}\x01".encode()
_FROM_ELSEWHERE: Final = frozenset((TopicMessageType.DELAY, TopicMessageType.TRANSACTION))
"""Types of messages that first wait in a system topic. The store later delivers each of these messages to its topic's
queue as a single message, never as part of an inner batch."""
_WAYS: Final = {
    TopicMessageType.NORMAL: "send it without sharding key, delay and transaction",
    TopicMessageType.FIFO: "send it with a sharding_key",
    TopicMessageType.DELAY: "give it a delay, a deliver_at, a delay_level or a deliver_at_ms",
    TopicMessageType.TRANSACTION: "send it in a transaction (client.transaction_producer)",
    TopicMessageType.PRIORITY: "give it a priority, and neither sharding key nor delay",
}


def check_types(
    route: TopicRoute, messages: Sequence[Message], destination: Destination, stored: MessageQueue | None
) -> None:
    """Raise MessageIllegalError unless the topic of `route` accepts all `messages`. Called only for topics whose
    attributes restrict messages. `stored`: the queue that stores the messages, if it is not the queue to which they are
    sent."""
    attributes = route.attributes
    if attributes.is_compacted and not _have_keys(messages):
        raise no_key_error(route.topic)
    # All messages in MessageColumns have the same type: either all are delayed, or all are half messages, or all are
    # ordinary messages.
    if isinstance(messages, MessageColumns):
        given = {_type_by_queue(destination, stored)}
    else:
        given = {_type_of(message, destination) for message in messages}
    if attributes.has_inner_batches and given & _FROM_ELSEWHERE:
        raise _no_single_error(route.topic)
    chosen = destination.queue is not None or destination.selector is not None
    for one in sorted(given):
        check_type(route.topic, attributes, one, chosen=chosen)
    if attributes.has_levels:
        _check_level(route.topic, messages, chosen=chosen)


def check_type(topic: str, attributes: TopicAttributes, given: TopicMessageType, *, chosen: bool = False) -> None:
    """Raise MessageIllegalError unless a topic accepts messages of the type `given`. `chosen`: the sender has given a
    queue or a selector, which counts as a sharding key."""
    wanted = attributes.message_type
    if wanted in (TopicMessageType.UNSPECIFIED, TopicMessageType.MIXED, given):
        return
    if wanted is TopicMessageType.FIFO and given is TopicMessageType.NORMAL and chosen:
        return
    raise MessageIllegalError(
        f"topic {topic!r} accepts {wanted} messages, and this message is {given}: {_WAYS[wanted]}, send it to "
        f"another topic, or let the topic accept all types: admin.update_topic({topic!r}, message_type='MIXED')"
    )


def _check_level(topic: str, messages: Sequence[Message], *, chosen: bool) -> None:
    if chosen:
        raise MessageIllegalError(
            f"the priority of a message chooses its queue in topic {topic!r} (message.type PRIORITY): send the "
            "message without queue= and selector="
        )
    if len({message.priority for message in messages}) > 1:
        raise MessageIllegalError(
            f"the messages of a batch go to one queue, and the priority chooses the queue in topic {topic!r} "
            "(message.type PRIORITY): send a separate batch for each priority"
        )


def check_rows(route: TopicRoute, table: pa.Table | pa.RecordBatch, delayed: int = 0) -> None:
    """Check a table against its topic before any row is sent. Raises MessageIllegalError if the topic does not accept
    the rows. `delayed`: the number of delayed rows."""
    attributes = route.attributes
    if not attributes.restricts or not table.num_rows:
        return
    if attributes.has_levels:
        raise MessageIllegalError(
            f"the rows of a table have no priorities, and topic {route.topic!r} needs them (message.type PRIORITY): "
            "send messages with a priority, or send the table to another topic"
        )
    if attributes.is_compacted and _rows_with_keys(table) < table.num_rows:
        raise no_key_error(route.topic)
    if attributes.has_inner_batches and delayed:
        raise _no_single_error(route.topic)
    keyed = _valid(table, "sharding_key")
    if delayed:
        check_type(route.topic, attributes, TopicMessageType.DELAY)
    if delayed < table.num_rows:
        if keyed:
            check_type(route.topic, attributes, TopicMessageType.FIFO)
        if keyed < table.num_rows:
            check_type(route.topic, attributes, TopicMessageType.NORMAL)


def _no_single_error(topic: str) -> MessageIllegalError:
    return MessageIllegalError(
        f"the queues of topic {topic!r} hold inner batches ({QUEUE_TYPE} BatchCQ), so the topic accepts neither "
        "delayed messages nor transactions, which are stored one at a time; send such messages to another topic"
    )


def no_key_error(topic: str) -> MessageIllegalError:
    """Return the error for a message without keys that is sent to a compaction topic."""
    return MessageIllegalError(
        f"topic {topic!r} keeps the newest message of each key (cleanup.policy COMPACTION), and this message has "
        "no key: pass keys=[…]"
    )


def _type_of(message: Message, destination: Destination) -> TopicMessageType:
    if PROPERTY_TRANSACTION_PREPARED in message.properties:
        return TopicMessageType.TRANSACTION
    if is_delayed(message):
        return TopicMessageType.DELAY
    if destination.sharding_key is not None:
        return TopicMessageType.FIFO
    return TopicMessageType.NORMAL if message.priority is None else TopicMessageType.PRIORITY


def _type_by_queue(destination: Destination, stored: MessageQueue | None) -> TopicMessageType:
    if stored is not None and stored.topic == HALF_TOPIC:
        return TopicMessageType.TRANSACTION
    if stored is not None and is_waiting_topic(stored.topic):
        return TopicMessageType.DELAY
    return TopicMessageType.NORMAL if destination.sharding_key is None else TopicMessageType.FIFO


def _have_keys(messages: Sequence[Message]) -> bool:
    if not isinstance(messages, MessageColumns):
        return all(message.keys for message in messages)
    texts = messages.properties
    return texts is not None and all(text.startswith(_KEYS) or b"\x02" + _KEYS in text for text in texts.tolist())


def _rows_with_keys(table: pa.Table | pa.RecordBatch) -> int:
    if "keys" not in table.schema.names or pa.types.is_null(table.schema.field("keys").type):
        return 0
    column = table.column("keys")
    if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type):
        return int(len(column) - column.null_count)
    import pyarrow.compute as pc  # imported only by processes that send tables, because the import takes 0.06 s

    return int(pc.sum(pc.greater(pc.fill_null(pc.list_value_length(column), 0), 0)).as_py() or 0)


def _valid(table: pa.Table | pa.RecordBatch, name: str) -> int:
    """Return the number of rows that have a value in a column; 0 if the table lacks the column."""
    if name not in table.schema.names:
        return 0
    column = table.column(name)
    return int(len(column) - column.null_count)
